"""`script`: the phases that the script names, and its memory, as of a benchmark."""

from app.web.panels.benchmark import panels

__all__ = ["panels"]
