"""Data, metrics and figures: one module per domain, named after its kind unless it is listed here."""

KINDS = {"mnist": "images", "digits": "images", "text": "text.data"}
