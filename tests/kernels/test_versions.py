"""Which kernels `triton` runs, by device and version of Triton."""

from collections.abc import Iterator

import pytest
import torch

from kernels import versions

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def no_memory() -> Iterator[None]:
    for function in (versions.attention_kernels, versions.is_verified):
        function.cache_clear()
    yield
    for function in (versions.attention_kernels, versions.is_verified):
        function.cache_clear()


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A host with a GPU for Hopper and Triton 3.6."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(versions, "_triton_version", lambda: "3.6.0")
    return monkeypatch


@pytest.mark.parametrize(("version", "kernels"), [("3.6.0", "hopper"), ("3.7.1", "hopper"), ("3.8.0", "triton")])
def test_the_version_of_triton_decides(host: pytest.MonkeyPatch, version: str, kernels: str) -> None:
    host.setattr(versions, "_triton_version", lambda: version)
    assert versions.attention_kernels(GPU) == kernels
    reason = versions.why_not_hopper(GPU)
    assert (reason is None) == (kernels == "hopper")
    assert reason is None or reason.startswith(
        "Triton is 3.8.0, and the kernels for Hopper are verified with 3.6.x and"
    )


def test_other_gpus_have_no_reason(host: pytest.MonkeyPatch) -> None:
    host.setattr(torch.cuda, "get_device_capability", lambda _device: (8, 0))
    assert versions.attention_kernels(GPU) == "triton"
    assert versions.why_not_hopper(GPU) is None


def test_the_interpreter(host: pytest.MonkeyPatch) -> None:
    assert versions.attention_kernels(CPU) is None
    host.setenv("TRITON_INTERPRET", "1")
    versions.attention_kernels.cache_clear()
    assert versions.attention_kernels(CPU) == "interpreter"
    host.setattr(versions, "_triton_version", lambda: None)
    versions.attention_kernels.cache_clear()
    assert versions.attention_kernels(CPU) is None


@pytest.mark.parametrize(("version", "held"), [("3.7.1", True), ("3.8.0", False)])
def test_tiles_are_held_with_a_verified_triton_only(host: pytest.MonkeyPatch, version: str, held: bool) -> None:
    """Triton 3.8 compiles a held tile to wrong products."""
    pytest.importorskip("triton")
    from kernels.attention.triton import launch, tilings

    q = torch.empty(1, 1, 64, 64, dtype=torch.bfloat16)
    kind = launch.kind(q)
    scoring, tiling = launch.Scoring.of(q, q, is_causal=True), tilings.Tiling(64, 64, 4, 3, hold=True)
    host.setattr(versions, "_triton_version", lambda: version)
    planned = launch._forward_launch.__wrapped__(kind, kind, kind, kind, scoring, False, "ieee", False, tiling)
    assert planned._options["HOLD"] == held
