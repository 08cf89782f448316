"""What changes of a DataLoader's arguments share."""

import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch.utils.data import DataLoader

from workers.changes._base import replaced


def loaders_made(change: Callable[[dict[str, Any]], None]) -> AbstractContextManager[None]:
    """Let `change` change the arguments, by name, with which each DataLoader is made."""
    plain: Any = DataLoader.__init__

    @functools.wraps(plain)
    def init(*arguments: Any, **options: Any) -> None:
        given = inspect.signature(plain).bind(*arguments, **options)
        change(given.arguments)
        plain(*given.args, **given.kwargs)

    return replaced(DataLoader, "__init__", init)
