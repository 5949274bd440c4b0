"""The measurements of `interlace calibrate`, made through Paddle itself."""

import warnings

warnings.filterwarnings("ignore", message="Tensor do not have 'place' interface")  # raised by Paddle's own layers in static mode
