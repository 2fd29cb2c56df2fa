"""`python -m emoe` is the command line."""

from emoe.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
