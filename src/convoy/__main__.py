"""`python -m convoy`, and the command `convoy`."""

import sys


def main() -> int:
    """Run the command line; the exit status."""
    try:
        from convoy.cli import main as run  # a third of a second, in which Ctrl-C is to be no traceback either
    except KeyboardInterrupt:
        sys.stderr.write("convoy: interrupted\n")
        return 1
    return run()


if __name__ == "__main__":
    sys.exit(main())
