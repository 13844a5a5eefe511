"""Moved: `python -m dphybrid.orchestration.setup` is what `python -m flows.setup` was; this keeps the old
command going in a clone."""

import sys

from dphybrid.orchestration.setup import main

if __name__ == "__main__":
    sys.exit(main())
