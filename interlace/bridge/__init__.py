"""The only room that knows Paddle."""

import warnings

warnings.filterwarnings("ignore", message="No ccache found")  # Paddle's import; it concerns builds of C++ extensions
