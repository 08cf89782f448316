"""The host's clock, for everything that measures or waits in a process of the user's code.

Code that is measured may replace `time.perf_counter`, as tests that freeze the time do (freezegun) and as kernels that
cheat do. So `now_s` holds what the function was when this module was imported, which is before any code of the user
runs; `kernels.device_events` does the same for a GPU. Nothing here may import torch, or other packages of this project.
"""

from __future__ import annotations

import functools
import time

# A partial object is not the function itself: freezegun looks through all modules for the clock's own functions, and
# puts its own in their place.
now_s = functools.partial(time.perf_counter)
"""Return seconds of the monotonic clock, which all processes of a host share."""
