"""The kernels for compute capability 9.0: what they take and in which order they work, and, on such a device, their
results against the oracle, with hundreds of shapes drawn at random."""

import math
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from benchmarks import attention_stress as stress
from kernels.attention.flash_triton import flash_attention
from kernels.attention.hopper import backward, forward, native, plans, rules, visible
from kernels.attention.hopper import launch as hopper
from kernels.attention.masks import visible_keys
from kernels.attention.problem import AttentionProblem
from kernels.attention.triton import inputs as triton_inputs
from kernels.attention.triton.kernels import finish_kernel
from kernels.attention.triton.launch import ROW_TILE, Kind, Scoring, kind
from kernels.attention.triton.tilings import padded_width
from kernels.launching import Address, Launch, Window
from kernels.registry import ATTENTION
from tests.kernels.flash import Shape, check, draw, draw_inputs

CPU = torch.device("cpu")


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an H200."""

    class Properties:
        multi_processor_count = 132

    monkeypatch.setattr(rules, "runs_on", lambda _device: True)
    monkeypatch.setattr(triton_inputs, "capability", lambda _device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: Properties)


@pytest.fixture
def h200() -> None:
    if not torch.cuda.is_available() or not rules.runs_on(torch.device("cuda", 0)):
        pytest.skip("needs compute capability 9.0 and the Triton that the kernels are for")


def kind_of(*shape: int) -> Kind:
    return kind(torch.empty(shape, dtype=torch.bfloat16))


def backward_launches(
    one: Kind, scale: float, bounded: rules.Bounded | None = None, is_causal: bool = True
) -> plans.BackwardLaunches | None:
    """Those of a backward pass all of whose tensors are of one kind."""
    return plans.backward_launches(plans.BackwardProblem((one,) * 7, one.strides, False, is_causal, scale, bounded))


@contextmanager
def launches_seen() -> Iterator[list[str]]:
    """Names of the kernels that Triton launches inside."""
    import triton

    seen: list[str] = []
    hook = triton.knobs.runtime.launch_enter_hook

    def note(metadata: Any) -> None:
        seen.append(metadata.get()["name"])

    hook.add(note)
    try:
        yield seen
    finally:
        hook.remove(note)


@pytest.fixture(autouse=True)
def _nothing_remembered() -> Iterator[None]:
    yield
    for cached in (plans.forward_launch, plans.backward_launches):
        cached.cache_clear()
    if native._loaded is not None:
        native._loaded.forget()


visible_span, visible_tile = visible.span.fn, visible.span_of_tile.fn


@contextmanager
def on_the_host(bounds: Tensor | None = None) -> Iterator[None]:
    """Functions of the kernels work on numbers, and load from these bounds."""
    numbers = [] if bounds is None else bounds.flatten().tolist()
    with pytest.MonkeyPatch.context() as patch:
        language = SimpleNamespace(minimum=min, maximum=max, load=numbers.__getitem__)
        for module in (visible, forward, backward):
            patch.setattr(module, "gl", language)
            patch.setattr(module, "span_of_tile", visible_tile)
        patch.setattr(visible, "span", visible_span)
        yield


BOUNDED = [
    *(AttentionProblem(is_causal=True, window=window) for window in (1, 7, 64, 129, 400)),
    *(AttentionProblem(window=window) for window in (1, 130)),
    AttentionProblem(is_causal=True, bottom_right=True),
    *(AttentionProblem(is_causal=causal, window=90, bottom_right=True) for causal in (False, True)),
    *(
        AttentionProblem(is_causal=causal, document_lengths=lengths, window=window)
        for lengths in ((0, 1, 200, 0, 64, 129, 3, 118, 0), (515,), (128, 128, 128, 131))
        for causal in (False, True)
        for window in (None, 100)
    ),
]
"""Problems whose masks are not plain, some of them only for some lengths."""
MASKS = [
    (problem, queries, keys)
    for problem in BOUNDED
    for queries, keys in [(515, 515), (300, 1111), (700, 300), (1, 1), (128, 640)]
    if problem.document_lengths is None or queries == keys == 515  # documents fill the sequence
]


def bounds_of(problem: AttentionProblem, queries: int, keys: int) -> tuple[rules.Bounded, Tensor | None, Tensor]:
    """The mask as the kernels get it, the documents' bounds, and who sees whom: (queries, keys), by the definition."""
    ends = problem.options(CPU).get("document_ends")
    scoring = Scoring.of(
        torch.empty(queries, 64), torch.empty(keys, 64), problem.is_causal, window=problem.window,
        bottom_right=problem.bottom_right, documents=ends is not None,
    )  # fmt: skip
    bounded = rules.Bounded.of(scoring, queries, keys, ends is not None)
    options = {"window": problem.window, "bottom_right": problem.bottom_right, "document_ends": ends}
    hidden = visible_keys(queries, keys, CPU, problem.is_causal, **options).hidden(slice(0, keys))
    seen = torch.ones(queries, keys, dtype=torch.bool) if hidden is None else ~hidden
    if bounded is None:  # for these lengths
        bounded = rules.Bounded(-queries, keys if not problem.is_causal else 0, False)
    documents = None
    if ends is not None:
        whole = visible_keys(queries, keys, CPU, False, document_ends=ends)
        documents = torch.stack([whole.first, whole.end])
    return bounded, documents, seen


def arguments_of(bounded: rules.Bounded) -> tuple[int, int, int | None]:
    """`band` of the kernels; an address of 0 is the first of the numbers that `on_the_host` loads."""
    return bounded.lower, bounded.upper, 0 if bounded.has_documents else None


@pytest.mark.parametrize(("problem", "queries", "keys"), MASKS)
def test_bounds_are_those_of_the_definition(problem: AttentionProblem, queries: int, keys: int) -> None:
    """Row by row, and for tiles: nobody sees a tile outside, and everybody all of a tile that gets no mask."""
    bounded, documents, seen = bounds_of(problem, queries, keys)
    with on_the_host(documents):
        for turned, matrix in ((bounded, seen), (bounded.turned(), seen.T)):
            rows, columns = matrix.shape
            band = arguments_of(turned)
            for row in range(rows):
                low, high = visible_span(row, rows, columns, band)
                assert torch.equal(matrix[row].nonzero().flatten(), torch.arange(low, max(low, high)))
                assert 0 <= high <= columns
            for height, width in ((128, 128), (64, 128), (192, 128), (128, 64)):
                for start in range(0, rows, height):
                    begin, free, bound, end = visible_tile(start, rows, columns, band, height, width)
                    assert 0 <= begin <= free <= bound <= end
                    tile = matrix[start : start + height]
                    places = tile.any(0).nonzero().flatten() // width
                    assert not len(places) or (begin, end) == (places[0], places[-1] + 1)
                    assert tile[:, free * width : bound * width].all()
                    assert bound * width <= columns or bound == free
                    # Tiles that all see are masked in vain only at the end of the columns.
                    whole = [
                        each for each in range(columns // width) if tile[:, each * width : (each + 1) * width].all()
                    ]
                    assert whole == list(range(free, bound))


@pytest.mark.parametrize("thread", range(4))
def test_a_mask_has_a_bit_for_each_column_of_a_thread(thread: int) -> None:
    own = [column for column in range(128) if column % 8 // 2 == thread]
    with on_the_host():
        for bound in range(-300, 300):
            before = visible.bits_before.fn(bound - 2 * thread)
            assert min(before, len(own)) == sum(column < bound for column in own)


@pytest.mark.parametrize(
    ("options", "lengths", "bounded"),
    [
        ({"is_causal": True}, (9, 9), None),
        ({"is_causal": False}, (9, 17), None),
        ({"is_causal": True, "bottom_right": True}, (9, 9), None),
        ({"is_causal": True, "window": 9}, (9, 9), None),
        ({"is_causal": True, "bottom_right": True}, (9, 17), (-9, 8, False)),
        ({"is_causal": True, "window": 3}, (9, 9), (-2, 0, False)),
        ({"is_causal": False, "window": 3}, (9, 9), (-2, 2, False)),
        ({"is_causal": True, "documents": True}, (9, 9), (-9, 0, True)),
        ({"is_causal": False, "documents": True}, (9, 9), (-9, 9, True)),
    ],
)
def test_masks_that_are_not_plain_have_bounds(options, lengths, bounded) -> None:
    scoring = Scoring.of(*(torch.empty(length, 64) for length in lengths), **options)
    assert rules.Bounded.of(scoring, *lengths, bool(options.get("documents"))) == bounded
    assert rules.takes(scoring._replace(scale=0.5))
    for other in (scoring._replace(scale=-0.5), scoring._replace(softcap=3.0)):
        assert not rules.takes(other)


@pytest.mark.usefixtures("here")
def test_inputs_that_the_kernels_take(rng: random.Random) -> None:
    def taken(*inputs: Tensor) -> str | None:
        return rules.why_not(*map(kind, inputs))

    for head_dim, reason in ((64, None), (40, None), (256, None), (32, "from 40 to 256"), (100, "multiples of 8")):
        inputs = draw_inputs(Shape(1, 2, 1, 9, 17, head_dim), rng, torch.bfloat16)
        why = taken(*inputs)
        assert (why is None) == (reason is None)
        assert reason is None or reason in (why or "")
        launch = plans.forward_launch(*map(kind, (*inputs, inputs[0])), True, 0.5)
        assert (launch is None) == (reason is not None)
    q, k, v = draw_inputs(Shape(1, 2, 1, 9, 17, 64), rng, torch.float32)
    assert "not torch.float32" in (taken(q, k, v) or "")
    q, k, v = (one.half() for one in (q, k, v))
    odd = draw(1, 1, 17, 65, rng=rng, dtype=torch.float16)[..., :64]
    assert "are no multiples of 16 bytes" in (taken(q, odd, v) or "")


@pytest.mark.usefixtures("here")
def test_calls_without_options_and_copies_are_learned(monkeypatch: pytest.MonkeyPatch, rng: random.Random) -> None:
    """Under the mask that was asked for, also where it hides nothing."""
    learned: list[tuple[Any, ...]] = []
    monkeypatch.setattr(Launch, "__call__", lambda *_: None)
    monkeypatch.setattr(native, "learn_forward", lambda *given: learned.append(given))
    monkeypatch.setattr(native, "learn_backward", lambda *given: learned.append(given))

    def call(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = True, **options: Any) -> int:
        learned.clear()
        leaves = [one.detach().requires_grad_() for one in (q, k, v)]
        flash_attention(*leaves, is_causal, **options).sum().backward()
        assert all(given[3 if len(given) == 5 else 6] is is_causal for given in learned)
        return len(learned)

    q, k, v = draw_inputs(Shape(1, 4, 2, 200, 300, 64), rng, torch.bfloat16)
    for inputs in ((q, k, v), (q.transpose(1, 2).contiguous().transpose(1, 2), k, v), (q, k[:, :, :1], v[:, :, :1])):
        assert call(*inputs) == call(*inputs, is_causal=False) == 2
    for inputs in ((q[:, 0], k[:, 0], v[:, 0]), (q[:, :, :100], k, v), (q, k, v[..., :1].expand_as(k))):
        assert call(*inputs) == 0
    assert call(q, k, v, window=9) == call(q, k, v, scale=0.5) == call(q, k, v, bottom_right=True) == 0


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("width", rules.CHOICES)
def test_every_choice_can_be_launched(width: int) -> None:
    """Launches name every argument of their kernels, and tiles fit the buffers."""
    for length in (100, 9000):
        plans.forward_launch.cache_clear()
        plans.backward_launches.cache_clear()
        one_kind = kind_of(2, 3, length, width)
        for bounded in (None, rules.Bounded(-9, 0, False), rules.Bounded(-9, 0, True)):
            one = plans.forward_launch(*[one_kind] * 4, True, 0.5, bounded)
            others = backward_launches(one_kind, 0.5, bounded)
            for launch in (one, others.rows, others.keys, others.queries):
                arguments = launch._in_order()
                assert len(arguments) == len(launch._kernel.arg_names)
                rows = {each.block[2] for each in arguments if isinstance(each, Window) and each.place != 4}
                assert all(ROW_TILE % each == 0 for each in rows)
                if "CAUSAL" in launch._options:
                    assert launch._options["CAUSAL"] == (None if bounded else True)
            keys = dict(zip(others.keys._kernel.arg_names, others.keys._in_order(), strict=True))
            assert (keys["lower"], keys["upper"]) == ((0, 9) if bounded else (None, None))
            assert (keys["bounds"] is None) == (bounded is None or not bounded.has_documents)
            for launch in (one, others.keys, others.queries):
                named = dict(zip(launch._kernel.arg_names, launch._in_order(), strict=True))
                assert named.get("scale", 0.5 * math.log2(math.e)) == 0.5 * math.log2(math.e)
                assert named.get("root", 0.5) == 0.5


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("head_dim", "columns"),
    [(40, 64), (56, 64), (64, 64), (72, 80), (80, 80), (88, 128), (96, 128), (104, 128), (128, 128)],
)
def test_kernels_of_the_backward_pass_agree_on_the_sum_of_dq(head_dim: int, columns: int, is_causal: bool) -> None:
    length = 100
    launches = backward_launches(kind_of(2, 3, length, head_dim), 1.0, is_causal=is_causal)
    padded = -(-length // ROW_TILE) * ROW_TILE
    counter = (2 + columns) * 2 * 3 * padded  # behind exponents, deltas and the sum
    assert launches.size > counter
    assert launches.rows._options["SUM"] == launches.queries._options["SUM"] == columns
    assert launches.keys._options["NARROW"] == (columns == 80)
    named = dict(zip(launches.keys._kernel.arg_names, launches.keys._in_order(), strict=True))
    cleared = dict(zip(launches.rows._kernel.arg_names, launches.rows._in_order(), strict=True))["counter"]
    assert named["counter"] == cleared == Address(4, counter)
    first, second = named["dq_sum"], named["dq_rest"]
    assert (first == Address(4, 2 * 2 * 3 * padded)) == named["DIRECT"] == (is_causal and columns == 128)
    if named["DIRECT"]:
        return
    assert first.shape == second.shape == (2, 3, padded * columns // 256, 256)
    assert first.strides == second.strides
    assert math.prod(first.block) + math.prod(second.block) == named["M"] * columns
    most = re.search(r"MOST_WINDOWS = (\d+)", (Path(hopper.__file__).parent / "source/calls.cpp").read_text())
    assert sum(isinstance(one, Window) for one in named.values()) <= int(most[1])


@pytest.mark.parametrize(("head_dim", "queries"), [(64, 100), (56, 128), (72, 70), (80, 130), (128, 128)])
def test_dq_is_read_in_the_order_in_which_threads_store_its_sum(head_dim, queries, rng) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    padded, columns = -(-queries // ROW_TILE) * ROW_TILE, rules.sum_columns(head_dim)
    total = torch.randn(2, 3, padded, columns, generator=torch.Generator().manual_seed(rng.randrange(1 << 30)))
    parts = [part for tile in total.flatten(0, 2).split(64) for part in tile.split([64, columns - 64], dim=1)]
    stored = torch.cat([backward.by_thread.fn(part).flatten() for part in parts if part.numel()]).to(device)
    dq = torch.full((2, 3, queries, head_dim), torch.nan, device=device)
    finish_kernel[(-(-queries // 64) * 6,)](
        stored, dq, dq.stride(), 3, queries, padded, 0.5,
        HEAD_DIM=head_dim, WIDTH=padded_width(head_dim), ROWS=64, OVERLAP=False, SUM=columns, BY_THREAD=True,
    )  # fmt: skip
    assert torch.equal(dq.cpu(), 0.5 * total[:, :, :queries, :head_dim])


def test_the_name_hopper_refuses_what_its_kernels_do_not_take(rng: random.Random) -> None:
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled here")
    implementation = ATTENTION.load("hopper")
    assert implementation.dtypes == {"cuda": {"bfloat16", "float16"}}
    with pytest.raises(ValueError, match=r"'hopper' cannot take these inputs: it needs compute capability 9\.0"):
        implementation.function(*draw_inputs(Shape(1, 1, 1, 5, 5, 64), rng), True)


@pytest.mark.gpu
@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize("head_dim", [40, 64, 80, 96, 128, 256])
def test_results_agree_with_the_oracle(head_dim: int, rng: random.Random) -> None:
    for dtype in rules.DTYPES:
        for sizes in ((2, 3, 3, 515, 515), (1, 6, 2, 300, 1111), (2, 4, 1, 1111, 300), (1, 2, 2, 8200, 128)):
            for is_causal in (False, True):
                check(*draw_inputs(Shape(*sizes, head_dim), rng, dtype, "cuda"), is_causal, rng, only_hopper=True)


@pytest.mark.gpu
@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_masks_with_bounds_agree_with_the_oracle(head_dim: int, rng: random.Random) -> None:
    for problem in BOUNDED:
        shapes = [(515, 515)]
        if problem.document_lengths is None:
            shapes += [(300, 1111), (1111, 300)]
        for queries, keys in shapes:
            inputs = draw_inputs(Shape(2, 4, 2, queries, keys, head_dim), rng, torch.bfloat16, "cuda")
            check(*inputs, problem.is_causal, rng, problem=problem, only_hopper=True)


@pytest.mark.gpu
@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_processes_that_share_a_gpu_come_to_their_end(head_dim: int) -> None:
    """A kernel with a barrier that nobody awaited hung when the GPU switched between processes."""
    code = f"""
import torch
from kernels.attention.flash_triton import flash_attention
q, k, v, gradient = (torch.randn(1, 16, 16384, {head_dim}, dtype=torch.bfloat16, device="cuda") for _ in range(4))
inputs = [one.requires_grad_() for one in (q, k, v)]
for is_causal in [True, False] * 40:
    torch.autograd.grad(flash_attention(*inputs, is_causal), inputs, gradient)
torch.cuda.synchronize()
"""
    processes = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(3)]
    try:
        assert [process.wait(timeout=90) for process in processes] == [0, 0, 0]
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.mark.gpu
@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize(("head_dim", "kernel"), [(256, "wide_queries_kernel"), (64, "queries_kernel")])
def test_determinism_takes_two_passes(head_dim: int, kernel: str, deterministic: None, rng: random.Random) -> None:
    problem = Shape(2, 4, 2, 900, 900, head_dim)
    inputs = [one.requires_grad_() for one in draw_inputs(problem, rng, torch.bfloat16, "cuda")]
    gradient = torch.randn_like(inputs[0])
    with launches_seen() as seen:
        first, second = (torch.autograd.grad(flash_attention(*inputs, True), inputs, gradient) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    assert kernel in seen
    assert "backward_kernel" not in seen


@pytest.mark.gpu
@pytest.mark.usefixtures("h200")
def test_shapes_drawn_at_random(rng: random.Random) -> None:
    """A few: most have kernels of their own, which take seconds to compile. `benchmarks.attention_stress` has more."""
    for shape in stress.draw_shapes(8, rng.randrange(1 << 32)):
        assert stress.compare(shape, rng.randrange(1 << 32)).reason is None, shape


@pytest.mark.gpu
@pytest.mark.usefixtures("h200")
def test_heads_behind_rows_and_a_gradient_without_strides(rng: random.Random) -> None:
    q, k, v = (draw(2, 200, 4, 64, rng=rng, dtype=torch.bfloat16, device="cuda").transpose(1, 2) for _ in range(3))
    check(q, k, v, True, rng, only_hopper=True)
    inputs = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
    given = torch.autograd.grad(flash_attention(*inputs, True).sum(), inputs)
    ones = torch.autograd.grad(flash_attention(*inputs, True), inputs, torch.ones_like(q))
    for one, other in zip(given, ones, strict=True):
        torch.testing.assert_close(one, other, atol=2e-2, rtol=2e-2)


@pytest.mark.gpu
@pytest.mark.usefixtures("h200")
def test_a_cuda_graph_computes_anew_when_it_is_replayed(rng: random.Random) -> None:
    """Under capture, and after other calls took the same launch to other addresses."""
    inputs = [one.requires_grad_() for one in draw_inputs(Shape(1, 4, 2, 300, 300, 64), rng, torch.bfloat16, "cuda")]
    gradient = torch.randn_like(inputs[0])

    def step(leaves: list[Tensor]) -> tuple[Tensor, ...]:
        out = flash_attention(*leaves, True, only_hopper=True)
        return (out, *torch.autograd.grad(out, leaves, gradient))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(inputs)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(inputs)
    for _ in range(3):
        fresh = draw_inputs(Shape(1, 4, 2, 300, 300, 64), rng, torch.bfloat16, "cuda")
        with torch.no_grad():
            for one, values in zip(inputs, fresh, strict=True):
                one.copy_(values)
        flash_attention(*fresh, True)
        graph.replay()
        # Other leaves, since autograd warns of those that it met on another stream.
        now = [one.detach().clone().requires_grad_() for one in inputs]
        for given, right in zip(captured, step(now), strict=True):
            torch.testing.assert_close(given, right, atol=1e-2, rtol=1e-2)


@pytest.mark.gpu
@pytest.mark.usefixtures("h200")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")  # torch's own, importing Inductor
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")  # torch's own, of its first graph in a pool
@pytest.mark.parametrize("head_dim", [64, 256])
def test_a_graphed_step_launches_nothing(head_dim: int, rng: random.Random) -> None:
    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attention(2 * q, k, v, True, only_hopper=True) * 3

    compiled = torch.compile(step, mode="reduce-overhead", fullgraph=True)
    problem = Shape(1, 4, 2, 300, 300, head_dim)
    for repetition in range(6):
        inputs = [one.requires_grad_() for one in draw_inputs(problem, rng, torch.bfloat16, "cuda")]
        expected = step(*inputs)
        gradient = torch.randn_like(expected)
        right = torch.autograd.grad(expected, inputs, gradient)
        torch.compiler.cudagraph_mark_step_begin()
        # In the first calls torch warms up and captures.
        with launches_seen() if repetition >= 4 else nullcontext([]) as seen:
            out = compiled(*inputs)
            given = torch.autograd.grad(out, inputs, gradient)
        for one, other in zip((out, *given), (expected, *right), strict=True):
            torch.testing.assert_close(one, other, atol=4e-2, rtol=2e-2)
        assert not seen, "Triton launched a kernel in what should have been a replay"


def forget_all() -> None:
    """Forget the kinds of calls that tests before have made."""
    if native._loaded is not None:
        native._loaded.forget()


@pytest.mark.gpu
@pytest.mark.usefixtures("h200")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")  # torch's own, importing Inductor
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("head_dim", [64, 80, 256])
def test_the_second_call_of_a_kind_goes_without_python(head_dim, compiled, rng, monkeypatch) -> None:
    function = torch.compile(flash_attention, fullgraph=True, dynamic=False) if compiled else flash_attention
    inputs = [
        one.requires_grad_() for one in draw_inputs(Shape(2, 4, 2, 300, 300, head_dim), rng, torch.bfloat16, "cuda")
    ]
    gradient = torch.randn_like(inputs[0])

    def step() -> tuple[Tensor, ...]:
        out = function(*inputs, True)
        return out, *torch.autograd.grad(out, inputs, gradient)

    forget_all()
    first = step()
    assert native._loaded.known() == (1, 1)

    def refuse(*_arguments: Any, **_options: Any) -> None:
        raise AssertionError("Python was asked")

    for module, name in [
        (hopper, "forward"),
        (hopper, "backward"),
        (plans, "forward_launch"),
        (plans, "backward_launches"),
    ]:
        monkeypatch.setattr(module, name, refuse)
    monkeypatch.setattr(Launch, "__call__", refuse)
    second = step()
    assert torch.equal(first[0], second[0])
    for one, other in zip(first[1:], second[1:], strict=True):
        torch.testing.assert_close(one, other, atol=1e-2, rtol=1e-2)
    native._loaded.forget()
    with pytest.raises(AssertionError, match="Python was asked"):
        step()
    monkeypatch.undo()


@pytest.mark.gpu
@pytest.mark.usefixtures("h200")
def test_a_device_that_is_not_the_current_one(rng: random.Random) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    forget_all()
    for _ in range(3):
        inputs = draw_inputs(Shape(1, 2, 2, 300, 300, 64), rng, torch.bfloat16, "cuda:1")
        check(*inputs, True, rng, only_hopper=True)
    assert native._loaded.known() == (1, 1)
    assert torch.cuda.current_device() == 0
