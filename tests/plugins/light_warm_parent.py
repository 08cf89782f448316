"""Lets the workers that tests start be ready sooner.

Their warm parents import no `torch._dynamo`, which takes half of their time and which hardly a test's job needs: a
process that does imports it by itself. tests/workers/test_launch.py starts a real warm parent.
"""

from __future__ import annotations

import sys

if "warm" in sys.orig_argv:
    from workers import warm

    warm.PRELOADED = tuple(name for name in warm.PRELOADED if name != "torch._dynamo")
