"""Binary images: MNIST, whose files are read or downloaded, and small digits that come with the package."""

from emoe.domains.images.data import MNIST, Digits, DigitsConfig, Images, MNISTConfig
from emoe.figures.panels import as_images

__all__ = ["MNIST", "Digits", "DigitsConfig", "Images", "MNISTConfig", "as_images"]
