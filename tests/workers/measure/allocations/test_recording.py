"""Recordings of a model whose sizes are known: on the CPU, on a GPU, and of a fake allocator with a short history."""

import warnings
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from tests.workers.viewer import check_that_the_viewer_reads
from workers.measure.allocations import cuda, make_recording
from workers.measure.allocations.categories import CATEGORIES, Owner, owners_of
from workers.measure.allocations.cuda import CudaRecording
from workers.measure.allocations.ledger import Entry, Point
from workers.measure.allocations.snapshot import write
from workers.measure.allocations.stacks import site
from workers.measure.timing import run_step

WIDTH, HIDDEN, BATCH = 256, 512, 32


class Work:
    """A training step of the model, in phases."""

    def __init__(self, device: str, optimizer: Callable[..., torch.optim.Optimizer] | None) -> None:
        self.device = torch.device(device)
        with self.device:
            self.model = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, WIDTH))
        self.optimizer = None if optimizer is None else optimizer(self.model.parameters())
        self.batch: torch.Tensor | None = None
        self.loss: torch.Tensor | None = None
        self.phases = {"forward": self.forward, "backward": self.backward, "optimizer": self.optimize}

    def prepare(self) -> None:
        self.batch = torch.randn(BATCH, WIDTH, device=self.device)

    def forward(self) -> None:
        assert self.batch is not None
        self.loss = self.model(self.batch).square().sum()

    def backward(self) -> None:
        assert self.loss is not None
        self.loss.backward()  # type: ignore[no-untyped-call]

    def optimize(self) -> None:
        if self.optimizer is not None:
            self.optimizer.step()

    def owners(self) -> dict[int, Owner]:
        inputs, losses = ([one] if one is not None else [] for one in (self.batch, self.loss))
        return owners_of(self.device, self.model, [one for one in (self.optimizer,) if one], None, inputs, losses)


def usage(point: Point) -> dict[str, int]:
    return {category: size for category, size in zip(CATEGORIES, point.usage, strict=True) if size}


def test_parameters_in_no_module_sparse_gradients_and_nested_state_have_owners() -> None:
    table, weight, other = nn.Embedding(4, 2, sparse=True), nn.Parameter(torch.ones(8)), torch.ones(16).requires_grad_()
    (table(torch.tensor([1, 3])).sum() + weight.sum()).backward()
    optimizer = torch.optim.LBFGS([weight], max_iter=2)
    optimizer.step(lambda: weight.square().sum())
    mine = SimpleNamespace(moments={other: [torch.ones(32)]})
    mine.moments["itself"] = mine.moments
    table.register_parameter("lazy", nn.UninitializedParameter())
    rows = torch.eye(4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, about layouts that are new
        buffers = [getattr(rows, name)() for name in ("to_sparse", "to_sparse_csr", "to_sparse_csc", "to_mkldnn")]
        buffers += [torch.nested.nested_tensor([rows, rows[:2]], layout=one) for one in (torch.jagged, torch.strided)]
    for number, one in enumerate(buffers):
        table.register_buffer(str(number), one)
    sizes: Counter[str] = Counter()
    owners = owners_of(torch.device("cpu"), table, [optimizer], bare=[other], states=[mine])
    for one in owners.values():
        sizes[CATEGORIES[one.category]] += one.size
    assert sizes["parameter"] == 4 * (8 + 8 + 16)
    assert sizes["gradient"] == 2 * 8 + 4 * 4 + 4 * 8, "indices and rows of the table's"
    assert sizes["optimizer_state"] >= 4 * 32 + 4 * 8, "a list of directions, too"
    compressed, jagged = 5 * 8 + 8 * 8 + 4 * 4, 3 * 8 + 24 * 4
    assert sizes["input"] == 8 * 8 + 4 * 4 + 2 * compressed + jagged + 24 * 4, "all that layouts consist of"


def test_a_recording_that_is_abandoned_makes_room_for_another() -> None:
    recording = make_recording(torch.device("cpu"), 10_000)
    recording.begin({})
    recording.abandon()
    recording.abandon()
    recording.begin({})
    recording.mark("forward", {})
    assert len(recording.end()) == 1


class MadeAllocator:
    """A fake of a GPU's allocator, for tests without a GPU: blocks in one segment, a history of limited length."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, max_entries: int) -> None:
        self.blocks: dict[int, int] = {}
        self.history: list[Entry] = []
        self.peak = 0
        self.clock = 0
        self._most = max_entries
        monkeypatch.setattr(torch.cuda, "init", lambda: None)
        monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda *_, **__: self.history.clear())
        monkeypatch.setattr(cuda, "reset_peaks", lambda _: setattr(self, "peak", self.total))
        monkeypatch.setattr(torch.cuda, "memory_stats", lambda _: self.stats())
        monkeypatch.setattr(cuda, "_attach", lambda _: None)
        monkeypatch.setattr(cuda, "_take", self.snapshot)

    @property
    def total(self) -> int:
        return sum(self.blocks.values())

    def note(self, action: str, address: int, size: int) -> None:
        self.clock += 1
        entry: Entry = {"action": action, "size": size, "stream": 0, "time_us": self.clock}
        if action == "oom":
            entry |= {"device_free": 0, "frames": []}
        elif action == "snapshot":
            entry |= {"addr": address}
        else:
            entry |= {"addr": address, "frames": []}
        self.history = [*self.history, entry][-self._most :]

    def allocate(self, address: int, size: int) -> None:
        self.blocks[address] = size
        self.peak = max(self.peak, self.total)
        self.note("alloc", address, size)

    def release(self, address: int) -> None:
        size = self.blocks.pop(address)
        self.note("free_requested", address, size)
        self.note("free_completed", address, size)

    def stats(self) -> dict[str, int]:
        kinds = {"allocated_bytes": self.total, "requested_bytes": self.total, "reserved_bytes": 1 << 20}
        stats = {f"{kind}.all.current": value for kind, value in kinds.items()}
        return stats | {f"{kind}.all.peak": max(value, self.peak) for kind, value in kinds.items()}

    def snapshot(self) -> dict[str, Any]:
        blocks, at = [], 0
        for address, size in sorted(self.blocks.items()):
            blocks.append({"size": address - at, "requested_size": 0, "state": "inactive", "frames": []})
            blocks.append({"size": size, "requested_size": size, "state": "active_allocated", "frames": []})
            at = address + size
        blocks.append({"size": (1 << 20) - at, "requested_size": 0, "state": "inactive", "frames": []})
        blocks = [one for one in blocks if one["size"]]
        self.note("snapshot", 0, self.total)
        segment = {"device": 0, "address": 0, "total_size": 1 << 20, "allocated_size": self.total, "stream": 0}
        return {"segments": [{**segment, "blocks": blocks}], "device_traces": [list(self.history)]}


PARAMETER = {4096: Owner(0, "weight", 1000)}


@pytest.mark.parametrize("max_entries", [1000, 12])
def test_an_overflowing_gpu_history_is_followed(monkeypatch, tmp_path, max_entries) -> None:
    """With 12 entries, the forward pass fits, and the beginning of the backward pass is lost."""
    allocator = MadeAllocator(monkeypatch, max_entries)
    recording = CudaRecording(torch.device("cuda", 0), max_entries)
    allocator.allocate(4096, 1000)
    recording.begin(PARAMETER)
    allocator.allocate(8192, 500)
    recording.mark("forward", PARAMETER, keep=True)
    for number in range(10):
        allocator.allocate(16384 + 64 * number, 64)
    for number in range(10):
        allocator.release(16384 + 64 * number)
    allocator.release(8192)
    recording.mark("backward", PARAMETER, keep=True)
    allocator.allocate(8192, 100)
    recording.mark("optimizer", {**PARAMETER, 8192: Owner(2, "weight", 100)}, keep=True)
    stretches = recording.end()
    lost = max_entries == 12
    assert [one.stretch.lost for one in stretches] == [False, lost, False]
    assert [one.history_lost for one in stretches] == [False, lost, lost]
    forward, backward, optimizer = (one.stretch for one in stretches)
    assert usage(forward.end) == {"parameter": 1000, "activation": 500}
    assert usage(optimizer.end) == {"parameter": 1000, "optimizer_state": 100}
    assert [one.counters.allocated_peak for one in stretches if one.counters] == [1500, 2140, 1100]
    if not lost:
        assert usage(backward.peak) == {"parameter": 1000, "activation": 500, "temporary": 640}
    else:
        assert backward.peak.total < 2140, "the history does not reach back to the peak"
        assert usage(backward.start)["parameter"] == 1000
        assert usage(backward.start)["activation"] == 500, "what the forward pass left is known over the gap"
    for one in stretches:
        assert one.snapshot is not None
        write(one.snapshot, tmp_path / "snapshot.pickle")
        snapshot = check_that_the_viewer_reads(tmp_path / "snapshot.pickle")
        assert snapshot["flopwatch"]["history_lost"] == one.history_lost


def test_the_snapshot_of_a_lack_of_memory_is_of_its_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = MadeAllocator(monkeypatch, 1000)
    recording = CudaRecording(torch.device("cuda", 0), 1000)
    recording.begin({})
    allocator.allocate(4096, 1000)
    allocator.note("oom", 0, 1 << 40)
    recording.at_oom = allocator.snapshot()
    allocator.release(4096)
    recording.mark("forward", {}, keep=True, failed=True)
    (lacked,) = recording.end()
    assert usage(lacked.stretch.end) == {"activation": 1000}
    assert lacked.snapshot is not None
    assert [one["action"] for one in lacked.snapshot["device_traces"][0]][-2:] == ["oom", "snapshot"]


def test_a_lack_of_memory_that_was_survived_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = MadeAllocator(monkeypatch, 1000)
    recording = CudaRecording(torch.device("cuda", 0), 1000)
    recording.begin({})
    recording.at_oom = allocator.snapshot()
    allocator.allocate(4096, 1000)
    recording.mark("forward", {})
    allocator.allocate(8192, 500)
    recording.mark("backward", {}, failed=True)
    assert [each.stretch.end.total for each in recording.end()] == [1000, 1500]


def test_the_workspaces_of_matrix_products_have_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = MadeAllocator(monkeypatch, 1000)
    recording = CudaRecording(torch.device("cuda", 0), 1000)
    allocator.allocate(4096, 1000)
    allocator.allocate(8192, 500)
    allocator.allocate(12288, 500)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: allocator.release(8192), raising=False)
    recording.measure_workspaces()
    allocator.allocate(16384, 500)
    recording.begin(PARAMETER)
    recording.mark("forward", PARAMETER)
    (forward,) = recording.end()
    # One workspace was released, so one of the two blocks of its size gets the name.
    assert usage(forward.stretch.end) == {"parameter": 1000, "unknown": 1000}
    assert sorted(str(one.name) for one in forward.stretch.at_peak) == ["None", "cuBLAS workspace", "weight"]


@pytest.mark.gpu
def test_workspaces_of_products_have_a_name_on_a_gpu() -> None:
    torch._C._cuda_clearCublasWorkspaces()
    left_by_others = torch.cuda.memory_allocated()
    recording = make_recording(torch.device("cuda"), 10_000)
    recording.begin({})
    work = Work("cuda", None)
    for number in range(2):
        if number:
            recording.measure_workspaces()
        work.prepare()
        run_step(work.phases, [])
        work.model.zero_grad()
    recording.end()
    recording.begin(work.owners())
    recording.mark("forward", work.owners())
    (forward,) = recording.end()
    unknown = [one for one in forward.stretch.at_peak if CATEGORIES[one.category] == "unknown"]
    assert "cuBLAS workspace" in {one.name for one in unknown}
    nameless = [(one.size, site(one.frames)) for one in unknown if one.name is None]
    assert sum(size for size, _ in nameless) <= left_by_others, nameless


@pytest.mark.gpu
def test_a_graphs_workspaces_stay() -> None:
    """Peaks would lack them, since a replay allocates nothing."""
    torch._C._cuda_clearCublasWorkspaces()
    factor = torch.ones(512, 512, device="cuda")
    factor @ factor  # a library begins outside of graphs
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        product = factor @ factor
    held = torch.cuda.memory_allocated()
    make_recording(torch.device("cuda"), 10_000).measure_workspaces()
    assert torch.cuda.memory_allocated() == held > 3 * factor.nbytes
    graph.replay()
    assert product[0, 0] == 512
    torch._C._cuda_clearCublasWorkspaces()


@pytest.mark.gpu
def test_a_checkpoint_may_stop_early_while_it_is_recorded() -> None:
    """Its last operator makes tensors that are released when the exception passes that stops it."""
    recording = make_recording(torch.device("cuda"), 10_000)
    recording.begin({})
    logits, targets = torch.randn(64, 32, device="cuda", requires_grad=True), torch.zeros(64, dtype=int, device="cuda")
    checkpoint(cross_entropy, logits.exp(), targets, use_reentrant=False).backward()
    recording.end()
