"""Lets the workers that tests start be ready sooner.

Their warm parents, and units in new interpreters, import no `torch._dynamo`, which takes half of their time and which
hardly a test's job needs: a process that does imports it by itself. With WARM_PARENT=empty warm parents import nothing:
for services whose jobs need no torch, or that run none. tests/workers/processes/test_launch.py starts real ones.
"""

import os
import sys

if "warm" in sys.orig_argv:
    from flopwatch.workers.processes import warm  # by the name that programs use: they drop modules with short ones

    empty = os.environ.get("WARM_PARENT") == "empty"
    warm.PRELOADED = () if empty else tuple(name for name in warm.PRELOADED if name != "torch._dynamo")
elif "child" in sys.orig_argv:
    from flopwatch.workers.processes import child

    child.PRELOADED = ("torch",)
