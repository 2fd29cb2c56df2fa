"""Text as rows of tokens on the disk. Nothing is imported here: the processes that prepare it do without torch."""
