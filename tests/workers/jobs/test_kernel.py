"""The runner of `kernel` in this process."""

from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from app.specs.kernel import KernelSpec
from kernels.registry import KERNELS
from tests.workers.reporting import Report, reported
from workers.jobs._linear_plan import Times, sentences
from workers.measure.ceilings import Ceilings
from workers.measure.linear_products import PRODUCTS
from workers.measure.process_settings import settings
from workers.measure.stopwatch import Timing
from workers.model.float8 import LinearLayer
from workers.outcome import Unsupported
from workers.uploaded import BrokenCode

CODE = {"sha256": "a" * 64, "function": "f"}


def run(folder: Path, **fields: Any) -> Report:
    usual = {"rows": [33], "columns": [20], "implementations": ["torch"], "warmup_steps": 1, "measure_steps": 3}
    return reported(KernelSpec(**{**usual, **fields}), folder)


@pytest.fixture
def own(tmp_path: Path, upload) -> Callable[..., Report]:
    """Run a job with a function of one's own, given by its source."""

    def own(source: str, function: str = "mine", field: str = "code", **fields: Any) -> Report:
        return run(tmp_path, device="cpu", **{field: upload(source, function)}, **fields)

    return own


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("kernel", KERNELS.names())
def test_plain_pytorch_is_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernel: str, dtype: str) -> None:
    monkeypatch.setattr("kernels.operations.VOCABULARY", 61)
    report = run(tmp_path, kernel=kernel, dtypes=[dtype], device="cpu")
    assert len({tuple(row["case"].values()) for row in report.rows}) == 1
    for row in report.rows:
        assert row["outcome"] in {"ok", "unknown"}, row


HEADS = 33 * 20 * 64


@pytest.mark.parametrize(
    ("kernel", "forward", "backward"),
    [("weighted_sum", 33 * 20 + 20 + 33, 2 * 33 * 20 + 2 * 20 + 33), ("rope", 2 * HEADS, 2 * HEADS)],
)
def test_bandwidth_counts_what_has_to_be_read_and_written(tmp_path, kernel, forward, backward) -> None:
    cell = run(tmp_path, kernel=kernel, device="cpu").cell()
    numbers = {"forward": forward, "backward": backward}
    whole = sum(numbers.values())
    for phase, name, count in (
        *((name, name, count) for name, count in numbers.items()),
        (None, "forward_backward", whole),
    ):
        expected = 1e-6 * 4 * count / cell[f"{name}_ms", name]["median"]
        assert cell["gb_per_s", phase]["median"] == pytest.approx(expected)
        assert cell["gb_per_s", phase]["n"] == 1


@pytest.mark.parametrize("name", KERNELS.names())
def test_a_backward_pass_reads_inputs_if_gradients_depend_on_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernels.operations.VOCABULARY", 61)
    kernel = KERNELS.load(name)
    grad_out, results = None, []
    for _ in range(2):
        inputs = [torch.randn(shape) for shape in kernel.shapes(3, 5)]
        grad_out = torch.randn_like(kernel.plain(*inputs)) if grad_out is None else grad_out
        results.append(kernel.expected(inputs, grad_out)[1:])
    depend = not all(map(torch.equal, *results))
    assert depend == kernel.reads_inputs_backward


def test_bandwidth_beside_a_copys(tmp_path: Path) -> None:
    device = torch.device("cpu")
    cell = run(tmp_path, device="cpu").cell()
    assert cell["ceiling_percent", None]["median"] is None
    assert "run a job of kind ceiling" in cell["ceiling_percent", None]["reason"]
    Ceilings(Report(tmp_path).ceilings).record(device, {}, 50.0)
    cell = run(tmp_path, device="cpu").cell()
    for phase in ("forward", "backward", None):
        expected = 2 * cell["gb_per_s", phase]["median"]
        assert cell["ceiling_percent", phase]["median"] == pytest.approx(expected)


def test_ones_own_kernel_beside_plain_pytorch(own: Callable[..., Report]) -> None:
    source = """
import torch

class Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5)
        ctx.save_for_backward(x, weight, scale)
        return (x * scale * weight).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        x, weight, scale = ctx.saved_tensors
        normal, scaled = x * scale, grad * weight
        inner = (scaled * normal).mean(-1, keepdim=True)
        return scale * (scaled - normal * inner), (grad * normal).sum(0)

def mine(x, weight):
    return Norm.apply(x, weight)

def wrong(x, weight):
    return Norm.apply(x, weight) + 0.1

class Flat(Norm):
    @staticmethod
    def backward(ctx, grad):  # as a kernel that takes the gradient's rows for neighbours in memory
        return Norm.backward(ctx, grad.as_strided(grad.shape, (grad.shape[-1], 1)))

workspaces, turn = [None] * 3, 0

class Kept(Norm):
    @staticmethod
    def forward(ctx, x, weight):  # as a kernel with a few workspaces for what its backward pass needs
        global turn
        ctx.turn = turn = (turn + 1) % 3
        workspaces[turn] = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5)
        return Norm.forward(ctx, x, weight)

    @staticmethod
    def backward(ctx, grad):
        ctx.saved_tensors[2].data.copy_(workspaces[ctx.turn])
        return Norm.backward(ctx, grad)

buffer = {}

def shared(tensor):  # as a kernel with one buffer for each size of its results
    return buffer.setdefault(tensor.shape, tensor).copy_(tensor).detach()

class Gradients(Norm):
    @staticmethod
    def backward(ctx, grad):
        return tuple(map(shared, Norm.backward(ctx, grad)))

def output(x, weight):
    return shared(Norm.apply(x, weight))

class Other:
    pass
"""
    for function in ("mine", "Norm"):
        report = own(source, function, kernel="rms_norm")
        for name in ("torch", f"{function}@mine.py"):
            assert {row["outcome"] for row in report.cell(implementation=name).values()} <= {"ok", "unknown"}
    row = own(source, "wrong", kernel="rms_norm").cell(implementation="wrong@mine.py")["forward_ms", "forward"]
    assert (row["outcome"], row["median"]) == ("wrong", None)
    assert "the output: " in row["reason"]
    row = own(source, "Flat", kernel="rms_norm").cell(implementation="Flat@mine.py")["forward_ms", "forward"]
    assert (row["outcome"], row["reason"][:53]) == ("wrong", "with a gradient of the output that is not contiguous:")
    reason = "with other calls after its forward pass, which overwrite what it keeps or returns: the "
    for function, mode, what in (
        ("Kept", "forward_backward", "gradient of x"),
        ("Gradients", "forward_backward", "gradient of x"),
        ("output", "forward", "output"),
    ):
        cell = own(source, function, kernel="rms_norm", mode=mode).cell(implementation=f"{function}@mine.py")
        row = cell["forward_ms", "forward"]
        assert (row["outcome"], row["reason"].partition(": relative")[0]) == ("wrong", reason + what)
    row = own(source, "mine").cell(implementation="mine@mine.py")["forward_ms", "forward"]
    assert row["reason"] == "the output has the shape (33, 20), not (33,), that of kernel=weighted_sum"
    with pytest.raises(BrokenCode, match="is a class, and rms_norm is a function of its inputs"):
        own(source, "Other", kernel="rms_norm")


@pytest.mark.parametrize(("theta", "outcome"), [(1e4, "ok"), (1.001e4, "wrong")])
def test_angles_in_float32_are_right_at_every_position(own: Callable[..., Report], theta: float, outcome: str) -> None:
    """As in Llama: at position 8192 they are off by 3e-4, and all results together by 3e-5."""
    source = f"""
import torch

def mine(x):
    frequencies = {theta} ** -(torch.arange(0, 64, 2) / 64)
    turn = torch.polar(torch.ones(()), torch.arange(len(x)).unsqueeze(-1) * frequencies).unsqueeze(1)
    return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (32, 2))) * turn).flatten(-2)
"""
    report = own(source, kernel="rope", rows=[8192], columns=[1], implementations=[])
    assert report.cell(implementation="mine@mine.py")["forward_ms", "forward"]["outcome"] == outcome


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("torch.set_num_threads(torch.get_num_threads() + 1)", "threads from"),
        ("torch.set_default_dtype(torch.float64)", "default data type from torch.float32 to torch.float64"),
        ("torch.autograd.set_detect_anomaly(True)", "detection of anomalies from False to True"),
        ("torch.backends.cuda.matmul.fp32_precision = 'tf32'", "float32 products from highest to tf32"),
    ],
)
def test_what_ones_own_kernel_sets_in_this_process_does_not_reach_the_next_case(own, change, words) -> None:
    before = settings()
    source = f"import torch\n\ndef mine(x, w):\n    {change}\n    return (x * w).sum(-1)"
    report = own(source, kernel="weighted_sum", implementations=["torch"], rows=[33])
    assert settings() == before
    assert {row["outcome"] for row in report.rows} <= {"ok", "unknown"}
    (failed,) = [
        check for verdict in report.verdicts.values() for check in verdict["checks"] if check["name"] == "settings"
    ]
    assert not failed["ok"]
    assert words in failed["detail"]


def test_what_an_operation_does_not_have_is_unsupported(tmp_path: Path) -> None:
    report = run(tmp_path, kernel="swiglu", implementations=["torch", "liger"], device="cpu")
    assert report.cell(implementation="torch")["forward_ms", "forward"]["outcome"] == "ok"
    row = report.cell(implementation="liger")["forward_ms", "forward"]
    assert (row["outcome"], row["reason"]) == ("unsupported", "swiglu 'liger' does not run on cpu, only on cuda")
    row = run(tmp_path, kernel="swiglu", implementations=["triton"], device="cpu").cell()["forward_ms", "forward"]
    reason = "swiglu has no implementation 'triton'; it has torch, compiled, liger"
    assert (row["outcome"], row["reason"]) == ("unsupported", reason)
    with pytest.raises(Unsupported, match="no implementation 'tritn'; it has torch, compiled, triton, liger; did you"):
        run(tmp_path, kernel="rms_norm", implementations=["torch", "tritn"], device="cpu")
    with pytest.raises(Unsupported, match="unknown kernel 'gelu'; known are linear_cross_entropy, rms_norm, ro"):
        run(tmp_path, kernel="gelu", device="cpu")


def test_modules_of_other_operations_are_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of another package may end the process."""
    names = KERNELS.names()
    monkeypatch.setattr(KERNELS, "names", lambda: pytest.fail(f"of {names}"))
    monkeypatch.setattr("kernels.compiling.compiled", lambda function: function)  # it takes seconds
    report = run(tmp_path, kernel="rms_norm", implementations=["torch", "compiled"], mode="forward", device="cpu")
    assert report.cell(implementation="torch")["forward_ms", "forward"]["outcome"] == "ok"


def test_a_plan_has_each_linear_layer_of_a_model_in_bf16_and_in_each_recipe(tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    sizes = {"d_model": 32, "d_ff": 48, "num_layers": 3, "num_heads": 2, "vocab_size": 40}
    report = run(tmp_path, kernel="linear", model=sizes, batch_size=2, context_length=16, device="cpu")
    rows = {(row["layer"], row["precision"]): row for row in report.table_rows("linears")}
    precisions = ["bf16", "tensorwise", "rowwise", "rowwise_with_gw_hp"]
    assert [key[1] for key in rows][:4] == precisions
    w2, head = rows["layers.*.ffn.w2", "rowwise"], rows["lm_head", "rowwise"]
    assert [w2[name] for name in ("layers", "tokens", "in_features", "out_features")] == [3, 32, 48, 32]
    products = [w2[f"{name}_ms"] for name in ("forward", "grad_input", "grad_weight")]
    assert w2["casts_ms"] == pytest.approx(max(0.0, w2["whole_ms"] - sum(products)))
    assert head["whole_ms"] is None, "40 words are no multiple of 16"
    medians = {row["metric"]: row["median"] for row in report.rows}
    for name in precisions:
        of_precision = {layer: row for (layer, at), row in rows.items() if at == name}
        whole = [
            row["layers"] * (row["whole_ms"] or rows[layer, "bf16"]["whole_ms"]) for layer, row in of_precision.items()
        ]
        assert medians[f"{name}_ms"] == pytest.approx(sum(whole))
    assert medians["planned_rowwise_ms"] is None
    assert "on a GPU" in report.table_rows("plan")[-1]["plan"]


STEP = """
import torch
from torch.utils.checkpoint import checkpoint


class Twice(torch.nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def make_step(device, rows=16):
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(32, 48), "b": torch.nn.Linear(48, 32), "no": Twice(32, 32)})
    model.to(device)

    @torch.compile
    def forward(x):
        return model["no"](model["b"](model["a"](x)))

    def step():
        x = torch.randn(2, rows // 2, 32, device=device)
        with torch.no_grad():
            forward(x)
        for _ in range(3):
            (checkpoint(forward, x, use_reentrant=False).sum() + model["b"](model["a"](x[:1])).sum()).backward()

    return step
"""


def test_a_plan_of_ones_own_step_has_the_layers_of_its_forward_pass(own) -> None:
    """With the tokens of each call; without those of passes that keep no gradients or repeat a checkpoint."""
    pytest.importorskip("torchao")
    report = own(STEP, "make_step", "step_code", kernel="linear", recipes=["rowwise"], arguments={"rows": 32})
    names = ("layer", "layers", "tokens", "in_features", "out_features")
    rows = report.table_rows("linears", precision="rowwise")
    assert {tuple(row[name] for name in names) for row in rows} == {
        *(("a", 3, 32, 32, 48), ("a", 3, 16, 32, 48), ("b", 3, 32, 48, 32), ("b", 3, 16, 48, 32))
    }
    assert report.rows[0]["case"]["model"] == "make_step@mine.py"


def test_a_layer_pays_if_the_intervals_do_not_overlap() -> None:
    plain, close, far = (Times({}, 2.0, one) for one in ((1.8, 2.2), (1.7, 1.85), (1.2, 1.6)))
    assert not close.pays(plain)
    assert far.pays(plain)


def test_operations_beside_a_layer_take_none_of_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bf16 a layer takes 2 ms, and 3 between others; a recipe 2.5 between them."""
    pytest.importorskip("torchao")
    known = {("bf16", False): 2.0, ("bf16", True): 3.0, ("rowwise", True): 2.5}
    name = "workers.jobs._linear_plan"
    monkeypatch.setattr(f"{name}.whole_work", lambda *sizes, readers, between: readers * known[sizes[3], between])
    monkeypatch.setattr(f"{name}.product_works", lambda *_: dict.fromkeys(PRODUCTS, 0.5))
    timed = lambda _, work, **options: Timing(array("d", [work] * 3), None, 1, None, host_bound=False)  # noqa: E731
    monkeypatch.setattr("workers.measure.stopwatch.HostStopwatch.time", timed)
    sizes = {"d_model": 32, "d_ff": 32, "num_layers": 1, "num_heads": 1, "vocab_size": 32}
    report = run(tmp_path, kernel="linear", model=sizes, recipes=["rowwise"], context_length=16, device="cpu")
    found = {
        row["precision"]: (row["whole_ms"], row["casts_ms"], row["speedup"]) for row in report.table_rows("linears")
    }
    assert found == {"bf16": (2.0, 0.5, 1.0), "rowwise": (1.5, 0.0, 2.0 / 1.5)}


def test_a_plan_knows_which_layers_read_one_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchao")
    found: list[LinearLayer] = []
    times = {"bf16": Times(dict.fromkeys(PRODUCTS, 1.0), 3.0, (3.0, 3.0))}
    monkeypatch.setattr("workers.jobs._linear_plan._times", lambda _spec, layer, *_: found.append(layer) or times)
    sizes = {"d_model": 32, "d_ff": 48, "num_layers": 2, "num_heads": 2, "vocab_size": 64}
    run(tmp_path, kernel="linear", model=sizes, recipes=["rowwise"], context_length=16, device="cpu")
    readers = {layer.name.rpartition(".")[2]: layer.readers for layer in found}
    assert readers == {"q_proj": 3, "output_proj": 1, "w1": 2, "w2": 1, "lm_head": 1}


def test_a_plan_names_the_filter_or_says_why_there_is_none() -> None:
    sums = {"bf16_ms": 4.0, "rowwise_ms": 5.0, "planned_rowwise_ms": 3.0}
    gpu = torch.device("cuda")
    assert (
        "fp8_filter=layers.*.a,layers.*.b, 1 ms"
        in sentences(sums, {"rowwise": ["layers.*.a", "layers.*.b"]}, gpu, allowed=True)[-1]
    )
    assert "no layer is shown to pay" in sentences(sums, {"rowwise": []}, gpu, allowed=True)[-1]
    assert "multiples of 16" in sentences(sums, {"rowwise": []}, gpu, allowed=False)[-1]


def test_a_plan_on_a_device_without_fp8_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.jobs._linear_plan.why_no_precision", lambda device, precision: f"no {precision}")
    report = run(tmp_path, kernel="linear", model={"size": "tiny"}, device="cpu")
    assert {row["reason"] for row in report.rows} == {"kernel linear: no fp8"}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model": {"size": "tiny"}}, "is for kernel linear"),
        ({"step_code": CODE}, "is for kernel linear"),
        ({"kernel": "linear"}, "give model.size, or step_code"),
        ({"kernel": "linear", "model": {"size": "tiny"}, "step_code": CODE}, "give model.size, or step_code"),
        ({"kernel": "linear", "model": {"size": "tiny"}, "arguments": {"rows": 1}}, "choose step_code"),
        ({"kernel": "linear", "model": {"size": "tiny"}, "recipes": ["rowwise", "rowwise"]}, "there twice"),
    ],
)
def test_what_no_plan_has_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        KernelSpec(**fields)
