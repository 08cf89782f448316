"""A user's step as observers see it: phases follow each other and cover all of it."""

import contextlib
import functools
import gc
import os
import threading
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future

import pytest
import torch
from torch import nn

from flopwatch.steps import why_not_run
from workers.measure.own_step import MAX_PHASES, ForkReturned, NoStep, OwnStep, StepStopped, WrongPhase
from workers.measure.timing import make_clock, run_step, time_steps


class Heard:
    """An observer that keeps what it hears."""

    def __init__(self) -> None:
        self.words: list[str] = []

    def step_begins(self) -> None:
        self.words.append("[")

    def phase_begins(self, name: str) -> None:
        self.words.append(f"+{name}")

    def phase_ends(self, name: str) -> None:
        self.words.append(f"-{name}")

    def step_ends(self) -> None:
        self.words.append("]")


def made(body: Callable[[OwnStep], object]) -> OwnStep:
    own = OwnStep(why_not_run=why_not_run)
    own.make(lambda: lambda: body(own))
    return own


def heard(own: OwnStep) -> str:
    """What an observer hears of one more step."""
    observer = Heard()
    own.prepare()
    run_step(own.phases, [observer])
    return " ".join(observer.words)


def test_what_lies_between_phases_is_the_rest() -> None:
    def body(own: OwnStep) -> None:
        for _ in range(2):
            with own.phase("forward"), own.phase("attention"):
                pass
        with own.phase("optimizer"):
            pass

    own = made(body)
    first, second = heard(own), heard(own)
    assert first.startswith("[ +step -step +forward -forward +rest")
    assert second == (
        "[ +rest -rest +forward -forward +rest -rest +forward -forward +rest -rest +optimizer -optimizer +rest -rest ]"
    )
    assert own.phase_names == ("forward", "optimizer", "rest")


def test_an_error_that_the_step_handles_ends_its_phase() -> None:
    def body(own: OwnStep) -> None:
        for _ in range(2):
            with contextlib.suppress(StopIteration), own.phase("data"), own.phase("inside"):
                next(iter(()))
        with contextlib.suppress(StopIteration), own.phase("last"):
            next(iter(()))

    own = made(body)
    heard(own)
    assert heard(own) == "[ +rest -rest +data -data +rest -rest +data -data +rest -rest +last -last +rest -rest ]"
    assert own.phase_names == ("data", "last", "rest")


def test_phases_outside_of_steps_are_none() -> None:
    own = OwnStep()

    def make() -> Callable[[], None]:
        with own.phase("loading"):
            return own.phase("forward")(lambda: None)

    own.make(make)
    assert heard(own) == "[ +step -step +forward -forward +rest -rest ]"


def test_a_thread_of_the_code_and_a_compiler_name_no_phases() -> None:
    begin, end = threading.Event(), threading.Event()

    def load() -> None:
        with own.phase("load"):
            begin.set()
            end.wait(10)

    def body(own: OwnStep) -> None:
        thread = threading.Thread(target=load)
        thread.start()
        begin.wait(10)
        with own.phase("forward"):
            end.set()
            thread.join()

    own = made(body)
    assert heard(own) == "[ +step -step +forward -forward +rest -rest ]"

    @torch.compile(backend="eager", fullgraph=True)
    def compiled(x: torch.Tensor) -> torch.Tensor:
        with inside.phase("scores"):
            return x + x

    inside = made(lambda _own: compiled(torch.ones(2)))
    assert heard(inside) == "[ +step -step ]"


def test_a_worker_process_of_a_loader_names_no_phases() -> None:
    def body(own: OwnStep) -> None:
        child = os.fork()
        if child == 0:
            with own.phase("augment"):
                os._exit("augment" in own.phase_names)
        assert os.waitpid(child, 0)[1] == 0

    assert heard(made(body)) == "[ +step -step ]"


def test_a_phase_that_is_open_after_the_step_is_refused() -> None:
    def batches() -> Iterator[int]:
        with own.phase("data"):
            yield 1

    own = made(lambda _own: next(batches_of_own))
    batches_of_own = batches()
    with pytest.raises(WrongPhase, match="phase 'data' is open after the step, as where a generator yields inside"):
        heard(own)


@pytest.mark.parametrize("name", ["Forward", "two words", "", "step", "rest", "step_2", "oom", "peak"])
def test_a_name_that_results_cannot_hold_is_refused(name: str) -> None:
    def body(own: OwnStep) -> None:
        with own.phase(name):
            pass

    with pytest.raises(WrongPhase, match=f"phase '{name}'"):
        heard(made(body))


def test_the_number_of_phases_is_limited() -> None:
    def body(own: OwnStep) -> None:
        for number in range(MAX_PHASES + 1):
            with own.phase(f"part{number}"):
                pass

    with pytest.raises(WrongPhase, match=f"part{MAX_PHASES}'.*at most {MAX_PHASES}"):
        heard(made(body))


def test_work_of_every_step_is_that_of_steps_that_tell_none() -> None:
    def body(own: OwnStep) -> None:
        own.work(flops=None, tokens=next(tokens), items=None)

    tokens = iter([3, None, 3])
    own = made(body)
    own.work(flops=None, tokens=9, items=None)
    own.count_work(3)
    for _ in range(3):
        heard(own)
    assert (own.varies("tokens"), own.mean_work("tokens")) == (True, 5)


def test_work_that_varies_is_that_of_all_measured_steps() -> None:
    def body(own: OwnStep) -> None:
        own.work(flops=3, tokens=next(tokens), items=None)

    tokens = iter(range(9))
    own = made(body)
    for counted in (0, 3):
        own.count_work(counted)
        for _ in range(4):
            heard(own)
    assert [own.mean_work(kind) for kind in ("flops", "tokens", "items")] == [3, 5, None]
    assert [own.varies(kind) for kind in ("flops", "tokens", "items")] == [False, True, False]


def test_steps_leave_no_records_that_would_seem_to_be_their_memory() -> None:
    own = made(lambda own: own.work(flops=None, tokens=7, items=None))
    own.count_work(10_000)
    heard(own)
    tracemalloc.start()
    for _ in range(10_000):
        own.phases(())
    kept, _peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 10_000


def test_what_is_no_step_is_said() -> None:
    with pytest.raises(NoStep, match="returned int"):
        OwnStep().make(lambda: 3)  # type: ignore[arg-type,return-value]


def test_models_and_optimizers_of_the_code_are_seen_also_those_of_the_first_step() -> None:
    before = nn.Linear(2, 2)
    own, kept = OwnStep(), dict[str, object]()

    def make() -> Callable[[], None]:
        kept["model"] = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        kept["loss"] = nn.CrossEntropyLoss()

        def step() -> None:
            model = kept["model"]
            kept.setdefault("head", nn.Linear(4, 5))
            kept.setdefault("optimizer", torch.optim.SGD(model.parameters(), lr=0.1))

        return step

    own.make(make)
    assert own.model is kept["model"]
    assert own.optimizers == []
    gc.freeze()  # as before measured steps, which hides what is there from a second look
    for _ in range(2):
        heard(own)
    assert own.optimizers == [kept["optimizer"]]
    names = {name for name, _ in own.model.named_parameters()}
    assert names == {"Sequential.0.weight", "Sequential.0.bias", "Sequential.1.weight", "Sequential.1.bias"} | {
        "Linear.weight",
        "Linear.bias",
    }
    assert all(parameter is not before.weight for parameter in own.model.parameters())


def test_times_of_a_phase_that_comes_several_times_are_added(device: str) -> None:
    """Each part multiplies the same matrices, so three of a kind take longer than one, on any host."""
    matrix = torch.randn(600, 600, device=device)

    def body(own: OwnStep) -> None:
        for _ in range(3):
            with own.phase("thrice"):
                matrix @ matrix
        with own.phase("once"):
            matrix @ matrix

    times = time_steps(made(body).phases, make_clock(torch.device(device)), warmup_steps=3, measure_steps=9)
    thrice, once = (sorted(times.phases[name])[4] for name in ("thrice", "once"))
    assert thrice > 1.5 * once
    for index, step in enumerate(times.step):
        assert sum(samples[index] for samples in times.phases.values()) <= step


def test_a_model_in_the_place_of_one_that_is_gone_is_seen() -> None:
    gone = [nn.Linear(1, 1) for _ in range(50)]
    own, kept = OwnStep(), list[nn.Module]()
    places = {id(one) for one in gone}
    gone.clear()
    gc.collect()

    def make() -> Callable[[], None]:
        kept.extend(nn.Linear(1, 1) for _ in range(50))
        return lambda: None

    own.make(make)
    if not places & {id(one) for one in kept}:
        pytest.skip("the allocator gave them other places")
    assert {id(one) for one in own.model.children()} == {id(one) for one in kept}


def yields() -> Iterator[int]:
    yield 1


async def yields_later() -> AsyncIterator[None]:
    yield


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (yields, "returned a generator: its code has not run.*remove the yield"),
        (yields_later, "returned a async_generator: its code has not run"),
        (lambda: print, "may not have been done: call it"),
        (lambda: functools.partial(int), "may not have been done: call it"),
        (Future, r"may not have been done: return its \.result"),
    ],
)
def test_a_step_whose_work_may_not_have_been_done_is_refused(step: Callable[[], object], words: str) -> None:
    with pytest.raises(NoStep, match=words) as caught:
        heard(made(lambda _own: step()))
    assert (caught.value.code is not None) == (step in (yields, yields_later))
    attributes = type("Attributes", (dict,), {"__getattr__": dict.__getitem__})
    for returned in ((value for value in (1.0, 2.0)), attributes(loss=1.0)):
        heard(made(lambda _own, returned=returned: returned))


def test_a_step_that_takes_an_argument_is_refused_with_its_place_and_cure() -> None:
    def step(batch: object, scale: float = 1.0) -> None: ...

    with pytest.raises(NoStep, match=r"this one takes batch: let the function that makes the step") as caught:
        OwnStep().make(lambda: step)
    assert caught.value.code is step.__code__
    OwnStep().make(lambda: lambda *_, **__: None)
    OwnStep().make(lambda: functools.wraps(step)(lambda: step(1)))  # which gives it the argument


def test_a_loader_that_ends_is_named() -> None:
    loader = iter(range(3))
    own = made(lambda _own: next(loader))
    own.takes = "2 steps to warm up and 5 measured ones"
    for _ in range(3):
        heard(own)
    with pytest.raises(StepStopped, match=r"^StopIteration: .*loader.*takes 2 steps.*begin again"):
        heard(own)
    with pytest.raises(StepStopped, match=r"^StopIteration: "):  # also under a profiler, whose generators would hide it
        heard(own)


@pytest.mark.parametrize("where", ["making", "step"])
def test_a_fork_that_comes_back_goes_no_further(where: str) -> None:
    """Each of its steps would fork again, and measure beside the job."""
    children: list[int] = []

    def fork() -> None:
        if not children:
            children.append(os.fork())

    def make() -> Callable[[], None]:
        if where == "making":
            fork()
        return fork

    try:
        own = OwnStep()
        own.make(make)
        heard(own)
    except ForkReturned:
        os._exit(17)
    finally:
        if children == [0]:
            os._exit(1)
    _, status = os.waitpid(children[0], 0)
    assert os.waitstatus_to_exitcode(status) == 17
    heard(own)
