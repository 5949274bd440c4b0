"""A Paddle device of our own whose streams are really asynchronous: host threads, or CUDA streams. See README.md."""
