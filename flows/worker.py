"""Moved: `python -m dphybrid.orchestration.worker` is what `python -m flows.worker` was; this keeps the old
command going in a clone."""

import sys

from dphybrid.orchestration.worker import main

if __name__ == "__main__":
    sys.exit(main())
