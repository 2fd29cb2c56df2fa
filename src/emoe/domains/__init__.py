"""Data, metrics and pictures: one module per domain, named after its kind."""
