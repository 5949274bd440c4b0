"""`python -m interlace.cli`."""

import sys

from interlace.cli import main

sys.exit(main())
