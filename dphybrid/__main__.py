"""`python -m dphybrid` equals `dphybrid`."""

import sys

from dphybrid.cli.main import main

sys.exit(main())
