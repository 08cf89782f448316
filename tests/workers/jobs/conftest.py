from __future__ import annotations

import gc

import pytest


@pytest.fixture(autouse=True)
def _what_is_frozen_stays_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """A runner of cells unfreezes in the end what it has frozen, and with it what tests/conftest.py has."""
    monkeypatch.setattr(gc, "unfreeze", lambda: None)
