"""Numbers to words: results files in, tables, generated docs and HTML pages out. Nothing here needs torch."""
