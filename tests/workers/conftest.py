"""What the workers' tests share. GPU hosts run some of them without the service's dependencies."""

from __future__ import annotations

import pytest


@pytest.fixture
def childless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a launcher run in pytest's own process: the children there, Chromium or ranks, are those of other tests."""
    from workers import launch

    monkeypatch.setattr(launch, "adopt_orphans", lambda: None)
    monkeypatch.setattr(launch, "reap", dict)
    monkeypatch.setattr(launch, "kill_all", lambda _spare=(): None)
