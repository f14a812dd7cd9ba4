"""`python -m fxhome`: the command line where the console script is not installed."""

import sys

from fxhome.cli import main

sys.exit(main())
