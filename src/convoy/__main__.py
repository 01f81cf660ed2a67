"""`python -m convoy`: the command line."""

import sys

from convoy.cli import main

sys.exit(main())
