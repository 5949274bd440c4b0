"""`python -m interlace`: the command `interlace`, where its script is not on the path."""

import sys

from interlace.cli import main

sys.exit(main())
