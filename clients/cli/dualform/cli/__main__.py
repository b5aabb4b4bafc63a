"""`python -m dualform.cli`: the same as `dualform`."""

import sys

from dualform.cli.main import main

sys.exit(main())
