"""`python -m dphybrid` equals `dphybrid`."""

import sys

from dphybrid.cli import main

sys.exit(main())
