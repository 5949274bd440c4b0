"""Several ranks on CPU processes: transport, communication operations in Paddle programs, installation in a rank."""

import warnings

warnings.filterwarnings("ignore", message="No ccache found")  # from Paddle's import; it only concerns builds of C++ extensions
