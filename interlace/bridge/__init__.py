"""Paddle: capture of its programs, lowering of plans, hooks in its engine. Besides `interlace.cpu` the only code that imports it."""

import warnings

warnings.filterwarnings("ignore", message="No ccache found")  # Paddle's import; it concerns builds of C++ extensions
