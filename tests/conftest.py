"""What holds for all tests."""

import signal

# A shell starts background jobs with SIGINT ignored, and processes pass that on to their children.
signal.signal(signal.SIGINT, signal.default_int_handler)
