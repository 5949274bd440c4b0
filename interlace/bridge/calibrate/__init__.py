"""What `interlace calibrate` measures of a device, through Paddle itself."""

import warnings

warnings.filterwarnings("ignore", message="Tensor do not have 'place' interface")  # Paddle's own layers, where training steps are built
