"""Python imports this module at start where its folder is on the path, and no other `sitecustomize` before it."""

import light_warm_parent  # noqa: F401
