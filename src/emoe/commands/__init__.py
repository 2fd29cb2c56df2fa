"""The commands; `emoe.cli` has their table."""
