"""The tests of this folder are about SQLite, but for those of test_postgresql.py."""

from __future__ import annotations

import pytest


@pytest.fixture
def engine() -> str:
    return "sqlite"
