"""Several ranks on CPU processes: transport, communication ops in Paddle programs, installation in a rank."""

import warnings

warnings.filterwarnings("ignore", message="No ccache found")  # Paddle's import; it concerns builds of C++ extensions
