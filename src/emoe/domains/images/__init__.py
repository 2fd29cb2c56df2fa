"""Binary images: MNIST, whose files are read or downloaded, and small digits that come with the package."""

from emoe.domains.images.data import (
    MNIST,
    Digits,
    DigitsConfig,
    Images,
    MNISTConfig,
    as_images,
    pack_rows,
    unpack_rows,
)

__all__ = ["MNIST", "Digits", "DigitsConfig", "Images", "MNISTConfig", "as_images", "pack_rows", "unpack_rows"]
