"""Data, metrics and figures: one module per domain, named after its kind unless it is listed here."""

SHARED_MODULES = {"mnist": "images", "digits": "images", "text": "text.data"}
