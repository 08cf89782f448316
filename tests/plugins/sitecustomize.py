"""Python imports this module at start where its folder is on the path, and no other `sitecustomize` before it."""

from __future__ import annotations

import light_warm_parent  # noqa: F401
