"""`python -m dphybrid`: the same as the command `dphybrid`."""

import sys


def main() -> int:
    """Run the command and return its exit code."""
    # Imported inside the `try`: the imports take a second, and Ctrl-C then should print no traceback.
    try:
        from dphybrid.cli.main import main as command
    except KeyboardInterrupt:
        return 130
    return command()


if __name__ == "__main__":
    sys.exit(main())
