"""Results files, and tables, generated docs and HTML pages made from them. Nothing here needs torch."""
