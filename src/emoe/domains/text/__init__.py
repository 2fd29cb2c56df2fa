"""Text: prepared once as rows of tokens on the disk, trained on from there.

Nothing is imported here, since the processes that prepare text have no use for torch. The domain is in `data`, the
preparation in `prepare`.
"""
