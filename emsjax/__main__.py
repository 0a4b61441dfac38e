"""`python -m emsjax`, the same as the command `emsjax`."""

import sys

from emsjax.cli.main import main

sys.exit(main())
