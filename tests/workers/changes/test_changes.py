"""Each change does what it says to a user's step, and leaves nothing behind."""

from __future__ import annotations

import gc
import itertools
from collections import Counter, UserDict
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.attention import SDPBackend
from torch.utils import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from app.specs import KINDS
from workers.changes import CHANGES
from workers.changes._base import Change, Look, cores, nothing
from workers.changes.loader_workers import workers
from workers.measure.own_step import OwnStep
from workers.measure.timing import run_step
from workers.outcome import Unsupported

ARRAY = torch.ones(3, dtype=torch.float64).numpy()
CPU = torch.device("cpu")


@dataclass(slots=True)
class Fields:
    of: dict[str, torch.Tensor]


class Ids(list[torch.Tensor]):
    def __init__(self, batch: dict[str, torch.Tensor]) -> None:
        super().__init__(batch.values())


class Numbers(torch.utils.data.Dataset[torch.Tensor]):
    made = 0

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> torch.Tensor:
        Numbers.made += 1
        return torch.full((8,), float(index))


def make_step(optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW, **loading: Any) -> OwnStep:
    step = OwnStep()

    def make() -> Callable[[], object]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3)))
        updates = optimizer(model.parameters())
        batches = iter(DataLoader(Numbers(), batch_size=4, **loading))

        def one() -> torch.Tensor:
            loss: torch.Tensor = model(next(batches)).square().mean()
            loss.backward()
            updates.step()
            updates.zero_grad()
            return loss

        return one

    step.make(make)
    step.keeps_returned = True
    return step


@pytest.fixture(autouse=True)
def _few_objects() -> None:
    gc.freeze()  # own steps look through all again and again: in a job's process there are few


@pytest.fixture
def own() -> OwnStep:
    return make_step()


def losses(step: OwnStep, number: int = 4) -> list[float]:
    found = []
    for _ in range(number):
        run_step(step.phases, ())
        (loss,) = step.returned.values()  # type: ignore[attr-defined]
        found.append(float(loss))
    return found


def load(name: str) -> Change:
    return CHANGES.load(name)


def look(own: OwnStep | None = None, **fields: Any) -> Look:
    spec = KINDS["benchmark"].model_validate({"model": {"size": "tiny"}, **fields})
    return Look(spec, CPU, own)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", CHANGES.names())
def test_every_change_says_what_a_person_would_write_and_can_be_asked_about_any_step(name: str, own: OwnStep) -> None:
    change = load(name)
    assert change.how
    assert change.causes
    for one in (look(own), look(), look(mode="generate"), look(compile=True)):
        reason = change.why_not(one)
        assert reason is None or len(reason) > 10
        if reason is None and one.own is None:
            changed = {**one.spec.model_dump(), **change.fields(one)}
            assert type(one.spec).model_validate(changed) != one.spec


@pytest.mark.parametrize("foreach", [None, True])
def test_an_optimizer_is_made_fused_and_gives_the_same_numbers(foreach: bool | None) -> None:
    change, plain = load("fused_optimizer"), losses(make_step())
    before = torch.optim.AdamW.__init__
    with change.before(CPU):
        changed = make_step(partial(torch.optim.AdamW, foreach=foreach))
        assert changed.optimizers[0].defaults["fused"]
    assert torch.optim.AdamW.__init__ is before
    assert losses(changed) == pytest.approx(plain, rel=1e-5)
    assert change.why_not(look(changed)) == "it is fused already"
    changed.optimizers[0].load_state_dict(make_step().optimizers[0].state_dict())
    with pytest.raises(Unsupported, match="load_state_dict"), change.after(changed):
        pass
    assert change.why_not(look(changed)) is None, "it is fused no more"
    own, one = OwnStep(), nn.Parameter(torch.ones(2))

    def make() -> Callable[[], object]:
        made = torch.optim.AdamW([one], fused=True), torch.optim.SparseAdam([one])
        return lambda: made

    own.make(make)
    assert "no fused form of its optimizers (SparseAdam)" in str(change.why_not(look(own)))


class Descent:
    """No torch.optim.Optimizer."""

    def __init__(self, parameters: Any) -> None:
        self.parameters = list(parameters)

    @torch.no_grad()
    def step(self, rate: float = 0.1) -> None:
        for one in self.parameters:
            one -= rate * one.grad  # type: ignore[operator]

    def zero_grad(self) -> None:
        for one in self.parameters:
            one.grad = None


class Trainer(Descent):
    """Its step is that of the training."""

    def loss(self) -> None:
        self.parameters[0].sum().backward()


def test_an_object_that_updates_parameters_is_an_optimizer_and_one_that_trains_is_none() -> None:
    assert not any(isinstance(one, Trainer) for one in make_step(Trainer).plain_optimizers())  # type: ignore[arg-type]
    own = make_step(Descent)  # type: ignore[arg-type]
    before = [one.detach().clone() for one in own.model.parameters()]
    with load("no_optimizer").after(own):
        losses(own)
        own.plain_optimizers()[0].step(0.2)
    assert all(map(torch.equal, before, own.model.parameters()))


def test_a_bound_without_the_optimizer_is_refused_where_it_would_be_none() -> None:
    own = make_step()
    otherwise = own.replaced(lambda _plain: partial(torch.optim.AdamW.step, own.optimizers[0]))
    with otherwise, pytest.raises(Unsupported, match="calls no optimizer"), load("no_optimizer").after(own):
        run_step(own.phases, ())
    assert "several times" in str(load("no_optimizer").why_not(look(make_step(torch.optim.LBFGS))))


def test_autocast_is_around_forward_passes_alone() -> None:
    seen: list[torch.dtype] = []

    def product() -> torch.dtype:
        return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype

    class Seeing(Numbers):
        def __getitem__(self, index: int) -> torch.Tensor:
            seen.append(product())
            return super().__getitem__(index)

    class Preconditioned(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            seen.append(product())
            return super().step(closure)

    def made(*, by_hand: bool) -> OwnStep:
        own = OwnStep()

        def make() -> Callable[[], object]:
            torch.manual_seed(0)
            model = nn.Linear(8, 8)
            optimizer, batches = Preconditioned(model.parameters(), 0.1), iter(DataLoader(Seeing(), batch_size=4))

            def forward() -> torch.Tensor:
                with torch.autocast("cpu", torch.bfloat16) if by_hand else nullcontext():
                    assert product() == torch.bfloat16
                    return model(x).square().mean()  # type: ignore[no-any-return]

            def one() -> torch.Tensor:
                nonlocal x
                x = next(batches)
                for _ in range(2):
                    forward().backward()  # type: ignore[no-untyped-call]
                    optimizer.step()
                return forward()

            x = torch.ones(1)
            return one

        own.make(make)
        own.keeps_returned = True
        return own

    change, plain = load("autocast_bf16"), losses(made(by_hand=True))
    with change.before(CPU):
        own = made(by_hand=False)
        with change.after(own):
            assert losses(own) == plain, "weights cast before an update are not used after it"
    assert {*seen} == {torch.float32}


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.double(),
        lambda x: x.to(dtype=torch.double),
        lambda x: x.type(torch.float64),
        lambda x: x.type("torch.DoubleTensor"),
        lambda x: nn.functional.softmax(x, -1, dtype=torch.float64),
        lambda x: x.to(float),
        lambda x: torch.zeros_like(x, dtype=float).cumsum(0, dtype=torch.float64),
        lambda _x: torch.zeros(3, dtype=torch.float64),
        lambda _x: nn.Linear(2, 2).to(torch.float64).weight,
        lambda _x: torch.from_numpy(ARRAY),
        lambda _x: torch.tensor(ARRAY),
    ],
)
def test_what_asks_for_float64_gets_float32(make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = torch.ones(3)
    with load("float32").before(CPU):
        assert make(x).dtype == torch.float32
    assert make(x).dtype == torch.float64, "nothing is left behind"


def test_what_worker_processes_ask_for_is_not_said_to_be_nothing() -> None:
    with load("float32").before(CPU):
        loader = DataLoader(TensorDataset(torch.ones(2)), collate_fn=lambda _: torch.from_numpy(ARRAY), num_workers=1)
        assert next(iter(loader)).dtype == torch.float32


def test_batches_from_memory_are_pinned_for_a_gpu_as_those_of_the_cure_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.utils.data._utils.pin_memory.pin_memory", lambda batches: [-one for one in batches])
    with load("batches_from_memory").before(torch.device("cuda")):
        assert next(iter(DataLoader([1.0, 2.0]))).item() == -1  # type: ignore[arg-type]
        loader = DataLoader([torch.ones(1).as_subclass(OnGpu)] * 2, batch_size=None)  # type: ignore[arg-type]
        assert next(iter(loader)).is_cuda, "what is on the GPU cannot be pinned"


def test_batches_from_memory_are_made_once_for_a_loader_and_end_where_its_own_end() -> None:
    with load("batches_from_memory").before(CPU):
        loader = DataLoader(Numbers(), batch_size=4)
        assert [len(list(loader)) for _ in range(2)] == [250, 250]
        made = Numbers.made
        next(iter(loader))
        assert Numbers.made == made


def test_batches_from_memory_are_as_they_were_and_alike() -> None:
    with load("batches_from_memory").before(CPU):
        loader = DataLoader([{"x": 1.0, "label": 2}] * 8, batch_size=2)  # type: ignore[arg-type]
        assert [batch.pop("label").tolist() for batch in loader] == [[2, 2]] * 4
        with pytest.raises(Unsupported, match="differ in size"):
            iter(DataLoader([torch.ones(one) for one in (1, 2, 3)], batch_size=None))  # type: ignore[arg-type]
        for kind in (UserDict, Fields, Ids, lambda batch: batch["ids"].to_sparse()):
            padded = [kind({"ids": torch.ones(one)}) for one in (1, 2, 3)]
            with pytest.raises(Unsupported, match="differ in size"):
                iter(DataLoader(padded, batch_size=None))  # type: ignore[arg-type]
        assert len(list(DataLoader(Numbers(), batch_size=600))) == 2, "these are all"
        boxes = [{"image": torch.ones(100), "boxes": torch.ones(number)} for number in (1, 2, 3)]
        assert len(list(DataLoader(boxes, batch_size=None))) == 3, "almost alike"  # type: ignore[arg-type]


def test_a_loader_is_seen_although_each_step_reads_it_anew() -> None:
    step, loader = OwnStep(), DataLoader(Numbers(), batch_size=4)
    step.make(lambda: lambda: next(iter(loader)))
    run_step(step.phases, ())
    step.prepare()
    assert 0 in step.loaders


def test_batches_come_from_worker_processes_unless_the_code_chose_some() -> None:
    with load("loader_workers").before(CPU):
        assert DataLoader(Numbers()).num_workers == workers() > 0
        assert DataLoader(Numbers(), num_workers=1).num_workers == 1
        assert DataLoader(Numbers(), 4, False, None, None, 2).num_workers == 2
    assert DataLoader(Numbers()).num_workers == 0


def test_more_batches_ahead_are_never_fewer_and_none_comes_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.changes.loader_prefetch.workers", lambda: 2)
    with load("loader_prefetch").before(CPU):
        assert DataLoader(Numbers(), 4, False, None, None, 2, prefetch_factor=9).prefetch_factor == 9
        assert [DataLoader(one(), num_workers=1).num_workers for one in (Numbers, Shared, Stream)] == [2, 2, 1]


class Stream(torch.utils.data.IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter([torch.zeros(8)] * 100)


class Shared(Stream):
    def __iter__(self) -> Iterator[torch.Tensor]:
        def share() -> slice:
            known = torch.utils.data.get_worker_info()
            return slice(known.id, None, known.num_workers) if known else slice(0, None, 1)

        return itertools.islice(super().__iter__(), share().start, None, share().step)


def test_an_iterable_dataset_that_is_not_shared_out_gets_no_workers() -> None:
    with load("loader_workers").before(CPU):
        assert DataLoader(Shared(), batch_size=4).num_workers == workers()
        with pytest.raises(Unsupported, match="get_worker_info"):
            DataLoader(Stream(), batch_size=4)


class OnGpu(torch.Tensor):
    is_cuda = True  # type: ignore[assignment]


class Number:
    """A number on a GPU, which counts who waits for it."""

    is_cuda, asked = True, 0

    def item(self) -> int:
        self.asked += 1
        return self.asked

    def to(self, device: object) -> int:
        return self.item()


def test_answers_of_the_second_step_are_given_again() -> None:
    from workers.changes.no_synchronisation import _Answers

    number, answers, given = Number(), _Answers(), []
    item = answers.instead(Number.item, "item")
    for _ in range(4):
        with answers.step():
            given.append([item(number), item(number)])
    assert given == [[1, 2], [3, 4], [3, 4], [3, 4]]
    assert item(number) == 5, "outside of steps"
    with answers.step():
        assert [item(number) for _ in range(3)] == [3, 4, 6], "one more than before"
    answers, waited = _Answers(), list[int]()
    copy, wait = answers.instead(Number.to, "to"), answers.waiting(lambda: waited.append(1))
    for _ in range(3):
        with answers.step():
            given.append([copy(number, "cpu"), copy(number, torch.float16)])
            wait()
    assert given[-3:] == [[7, 8], [9, 10], [9, 11]], "a copy to the CPU is one"
    assert len(waited) == 2


@pytest.mark.parametrize("enabled", [True, False])
def test_the_answers_of_a_gradient_scaler_are_not_given_again(enabled: bool) -> None:
    own = OwnStep()

    def make() -> Callable[[], object]:
        scaler = torch.amp.GradScaler("cpu", enabled=enabled)
        return lambda: scaler

    own.make(make)
    reason = load("no_synchronisation").why_not(replace(look(own), device=torch.device("cuda")))
    assert (reason is not None and "GradScaler" in reason) == enabled


@pytest.mark.parametrize(("every", "trained"), [(1, True), (3, True), (3, False)])
def test_a_step_that_updates_now_and_then_is_no_graph(every: int, trained: bool) -> None:
    own = OwnStep()

    def make() -> Callable[[], object]:
        model, number = nn.Linear(8, 8), itertools.count(1)
        model.weight.requires_grad_(trained)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)

        def one() -> None:
            model(torch.ones(8)).sum().backward()
            if next(number) % every == 0:
                optimizer.step()

        return one

    own.make(make)
    with own.updates() as updates:
        for _ in range(6):
            run_step(own.phases, ())
    known = replace(look(own), device=torch.device("cuda"), uneven=len({*updates}) > 1)
    assert (load("cuda_graph").why_not(known) is not None) == (every > 1)


def test_a_tensor_is_pinned_once_unless_it_may_have_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    from workers.changes.pinned_memory import _Pinned

    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)  # pinning needs a GPU
    pinned, own_memory = _Pinned(), torch.ones(2)
    first = pinned.of(own_memory)
    assert pinned.of(own_memory) is first
    own_memory.add_(1)
    assert pinned.of(own_memory).tolist() == [2, 2]
    array = numpy.ones(2)
    theirs = torch.from_numpy(array)
    pinned.of(theirs)
    array[:] = 3
    assert pinned.of(theirs).tolist() == [3, 3]
    copy = pinned.instead(lambda tensor, *_given, **options: (tensor, options))
    assert copy(theirs, "cuda")[1] == {"non_blocking": True}
    for one in (torch.ones(2, requires_grad=True), nn.Parameter(torch.ones(2)), torch.eye(2).to_sparse()):
        assert copy(one, "cuda") == (one, {}), "its gradient would be lost, or it has no elements to pin"
    into = pinned.into(lambda _tensor, source, non_blocking: (source, non_blocking))
    assert into(Number(), other=own_memory) == (pinned.of(own_memory), True)
    with torch.inference_mode():
        assert copy(torch.ones(2), "cuda")[0].tolist() == [1, 1]
    with load("pinned_memory").before(torch.device("cuda")):
        number = Number()
        assert torch.Tensor.pin_memory(number) is number, "it is on the GPU already"  # type: ignore[arg-type]


@pytest.mark.parametrize(("precision", "why"), [("fp32", None), ("bf16", "none of its matrix products is in float32")])
def test_products_that_a_cuda_graph_hides_are_those_of_our_models_spec(precision: str, why: str | None) -> None:
    spec = KINDS["benchmark"].model_validate({"kind": "benchmark", "precision": precision})
    assert load("autocast_bf16").why_not(replace(look(), spec=spec)) == why


def test_products_that_a_cuda_graph_hides_are_not_said_to_be_none(own: OwnStep) -> None:
    hidden = replace(look(own), names=Counter(cudaGraphLaunch=1))
    assert load("autocast_bf16").why_not(hidden) == "its products are hidden inside a CUDA graph"


def chosen_otherwise(see: Callable[[], object]) -> OwnStep:
    """Return a step whose code has chosen, when it was made, what changes choose. It calls `see` inside."""
    own = OwnStep()

    def make() -> Callable[[], object]:
        torch.set_float32_matmul_precision("highest")
        torch.set_num_threads(cores() + 1)
        torch.autograd.set_detect_anomaly(True)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3)))
        optimizer = torch.optim.AdamW(model.parameters())
        own.frozen = gc.get_freeze_count()  # type: ignore[attr-defined]
        own.loaders_made = [DataLoader(Numbers()), DataLoader(Numbers(), num_workers=1)]  # type: ignore[attr-defined]

        def one() -> torch.Tensor:
            torch.autograd.set_detect_anomaly(True)
            with torch.nn.attention.sdpa_kernel(SDPBackend.MATH):
                see()
            return next(model.parameters()).sum() * len(optimizer.param_groups)

        return one

    own.make(make)
    return own


def replaced_now(owner: Any, name: str) -> Callable[[OwnStep], bool]:
    plain = getattr(owner, name)
    return lambda _own: getattr(owner, name) is not plain


@pytest.mark.parametrize("name", ["compile_model", "compile_blocks"])
def test_a_model_of_torchs_own_modules_is_compiled(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`Module.compile` passes over an nn.Sequential."""
    monkeypatch.setattr("torch.compile", partial(torch.compile, backend="eager"))
    step = OwnStep()

    def make() -> Callable[[], object]:
        model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(2)))
        return lambda: model(torch.ones(1, 8)).sum().backward()

    step.make(make)
    with load(name).after(step):
        run_step(step.phases, ())


def test_a_step_without_checkpointing_runs_its_blocks_once() -> None:
    change, calls, weight = load("no_checkpointing"), Counter[str](), torch.ones(3, requires_grad=True)

    def block(x: torch.Tensor, *, scale: float) -> torch.Tensor:
        calls["block"] += 1
        return (x * weight * scale).sin()

    def step() -> list[float]:
        weight.grad = None
        checkpoint.checkpoint(block, torch.arange(3.0), use_reentrant=False, scale=2.0).sum().backward()
        return weight.grad.tolist()  # type: ignore[union-attr]

    with_it = step()
    with change.before(CPU):
        assert step() == with_it
        call = partial(checkpoint.checkpoint, torch.sin, use_reentrant=False)
        layer = torch.compile(lambda x: call(x), backend="eager", fullgraph=True)
        assert layer(weight).tolist() == weight.sin().tolist(), "no checkpoint to the compiler either"
    assert calls["block"] == 2 + 1

    class Block(nn.Module):
        forward = staticmethod(block)

    def wrapped() -> list[float]:
        weight.grad = None
        checkpoint_wrapper(Block())(torch.arange(3.0), scale=2.0).sum().backward()
        return weight.grad.tolist()  # type: ignore[union-attr]

    with change.before(CPU):
        assert wrapped() == with_it
    assert calls["block"] == 3 + 1, "PyTorch's own wrapper has the function by name"
    assert change.why_not(replace(look(make_step()), checkpoints=True)) is None
    assert "does not call" in str(change.why_not(look(make_step())))


def test_a_model_that_enters_autocast_itself_is_captured_outside_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    captured = []

    def capture(parts: tuple[nn.Module, ...], _inputs: object) -> None:
        assert not torch.is_autocast_enabled("cuda")
        captured.extend(parts)

    class Model(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch.set_autocast_enabled("cuda", True)  # `with torch.autocast` needs a GPU
            try:
                return super().forward(x)
            finally:
                torch.set_autocast_enabled("cuda", False)

    step = OwnStep()

    def make() -> Callable[[], object]:
        model = Model(*(nn.Sequential(nn.Linear(4, 4)) for _ in range(2)))
        return lambda: model(torch.ones(1, 4)).sum().backward()

    monkeypatch.setattr(torch.cuda, "make_graphed_callables", capture)
    step.make(make)
    with load("cuda_graph_model").after(step):
        for _ in range(2):
            run_step(step.phases, ())
    assert [type(one) for one in captured] == [Model]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")  # torch's own, as an error ends the capture
def test_a_model_is_captured_under_the_autocast_of_its_calls() -> None:
    """Captured outside of it, a step in bfloat16 became one in float32: on an H200 6 times slower."""
    seen: list[tuple[torch.dtype, str]] = []  # a graph of autograd that is kept alive cannot be captured again
    step = OwnStep()

    def make() -> Callable[[], object]:
        model = nn.Linear(8, 8).to("cuda")

        def one() -> None:
            with torch.autocast("cuda", torch.bfloat16):
                output = model(torch.ones(2, 8, device="cuda"))
            seen.append((output.dtype, type(output.grad_fn).__name__))
            output.float().sum().backward()

        return one

    step.make(make)
    with load("cuda_graph_model").after(step):
        for _ in range(3):
            run_step(step.phases, ())
    assert [dtype for dtype, _ in seen] == 3 * [torch.bfloat16]
    assert seen[-1][1] == "GraphedBackward"


INSIDE: dict[str, Callable[[Any], bool]] = {
    "attention_cudnn": lambda _own: torch.backends.cuda.cudnn_sdp_enabled()
    and torch._C._get_sdp_priority_order()[0] == int(SDPBackend.CUDNN_ATTENTION.value),
    "attention_triton": replaced_now(nn.functional, "scaled_dot_product_attention"),
    "autocast_bf16": lambda _own: torch.is_autocast_enabled("cpu"),
    "batches_from_memory": replaced_now(DataLoader, "__iter__"),
    "compile_blocks": lambda own: any(one._compiled_call_impl for one in own.model.modules()),
    "compile_model": lambda own: any(one._compiled_call_impl for one in own.roots),
    "cuda_graph": lambda own: type(own._step).__name__ == "_Graphed",
    "cuda_graph_model": lambda own: own._step.__qualname__.startswith("OwnStep.inside"),
    "float32": replaced_now(torch.Tensor, "double"),
    "fused_optimizer": lambda own: own.optimizers[0].defaults["fused"],
    "gc_freeze": lambda own: gc.get_freeze_count() > own.frozen,
    "loader_prefetch": lambda own: own.loaders_made[1].prefetch_factor == 4,
    "loader_workers": lambda own: own.loaders_made[0].num_workers > 0,
    "no_anomaly_detection": lambda _own: not torch.is_anomaly_enabled(),
    "no_checkpointing": replaced_now(torch.utils.checkpoint, "checkpoint"),
    "no_optimizer": lambda own: "step" in vars(own.optimizers[0]),
    "no_synchronisation": replaced_now(torch.Tensor, "item"),
    "one_thread": lambda _own: torch.get_num_threads() == 1,
    "pinned_memory": lambda own: own.loaders_made[0].pin_memory and torch.Tensor.to is not TO,
    "tf32": lambda _own: torch.get_float32_matmul_precision() == "high",
    "threads": lambda _own: torch.get_num_threads() == cores(),
}  # fmt: skip
"""What shows inside of a step that it is changed."""
TO = torch.Tensor.to
OF_OWN_STEPS = [
    name
    for name in CHANGES.names()
    if {load(name).before, load(name).after} != {nothing} and name != "expandable_segments"
]


@pytest.mark.parametrize("name", OF_OWN_STEPS)
def test_a_step_is_changed_whatever_its_code_has_chosen(name: str) -> None:
    assert name in INSIDE, "add to INSIDE what shows inside of a step that it is changed"
    # The step calls neither model nor optimizer, nor attention, nor checkpoints, and asks for no float64.
    idle = name in (
        "attention_triton",
        "compile_blocks",
        "compile_model",
        "float32",
        "no_checkpointing",
        "no_optimizer",
    )
    seen: list[bool] = []
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    device = torch.device("cuda" if name in ("pinned_memory", "cuda_graph") else "cpu")
    try:
        plain = chosen_otherwise(lambda: seen.append(bool(INSIDE[name](plain))))
        run_step(plain.phases, ())
        with pytest.raises(Unsupported) if idle else nullcontext(), load(name).before(device):
            own = chosen_otherwise(lambda: seen.append(bool(INSIDE[name](own))))
            with load(name).after(own):
                if name == "cuda_graph":  # nothing runs on a CPU
                    seen.append(INSIDE[name](own))
                else:
                    run_step(own.phases, ())
    finally:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)
        torch.autograd.set_detect_anomaly(False)
    assert seen == [False, True], "the step as it is, and the changed one"
