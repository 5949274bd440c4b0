"""`python -m interlace`: the command `interlace`, where its script is not on the path."""

import sys

from interlace.cli import main

if __name__ == "__main__":
    sys.exit(main())
