"""`python -m dphybrid`: the same as the command `dphybrid`."""

import sys


def main() -> int:
    """Run the command and return its exit code."""
    # The imports take a second. Inside the `try`, Ctrl-C during them ends the command without a traceback.
    try:
        from dphybrid.cli.main import main as command
    except KeyboardInterrupt:
        return 130
    return command()


if __name__ == "__main__":
    sys.exit(main())
