"""`python -m dphybrid` equals `dphybrid`."""

import sys


def main() -> int:
    """Run the command; Ctrl-C during its imports, which take a second, ends it without a traceback."""
    try:
        from dphybrid.cli.main import main as command
    except KeyboardInterrupt:
        return 130
    return command()


if __name__ == "__main__":
    sys.exit(main())
