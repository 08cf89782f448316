from __future__ import annotations

import gc

import pytest

from app.importing import without_collector


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_leaves_imports_alone(enabled: bool) -> None:
    before, frozen = gc.isenabled(), gc.get_freeze_count()
    try:
        (gc.enable if enabled else gc.disable)()
        with without_collector():
            assert not gc.isenabled()
            imported = [[number] for number in range(1000)]
        assert gc.isenabled() == enabled
        assert gc.get_freeze_count() >= frozen + len(imported)
    finally:
        (gc.enable if before else gc.disable)()


def test_the_collector_works_again_after_an_import_that_fails() -> None:
    with pytest.raises(ModuleNotFoundError), without_collector():
        raise ModuleNotFoundError("no such module")
    assert gc.isenabled()
