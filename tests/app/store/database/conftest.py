"""The tests of this folder are about SQLite, but for those of test_postgresql.py."""

import pytest


@pytest.fixture
def engine() -> str:
    return "sqlite"
