"""What holds for all tests."""

import atexit
import os
import signal
import tempfile

# A shell starts background jobs with SIGINT ignored, and processes pass that on to their children.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Runs and plans keep what they measure: here, not in the user's profile store.
_cache = tempfile.TemporaryDirectory(prefix="convoy-tests-")
atexit.register(_cache.cleanup)
os.environ["CONVOY_CACHE"] = _cache.name
