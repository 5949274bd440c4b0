"""The bridge to Paddle: capture of its programs, lowering of plans, hooks in its engine. Only this package and `interlace.cpu` import
it."""

import warnings

warnings.filterwarnings("ignore", message="No ccache found")  # on import of Paddle; only matters for building C++ extensions
