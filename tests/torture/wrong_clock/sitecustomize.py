"""Sets the clock wrong: Python imports this first in each process with this folder in PYTHONPATH."""

import os
import time

# Active only where the tests set the variable: pytest's collection imports this file too.
if seconds := float(os.environ.get("CASTORE_TEST_CLOCK", "0")):
    _right, _right_ns = time.time, time.time_ns
    time.time = lambda: _right() + seconds
    time.time_ns = lambda: _right_ns() + int(seconds * 1e9)
