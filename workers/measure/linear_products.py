"""The work of one linear layer in bf16 or FP8, to time: each of its three products alone, and both passes as a whole.

What the whole takes beyond its products are casts: largest values, scaling, rounding, and copies that transpose a
factor, as FP8 products need (their first factor is stored by rows, the second by columns).
"""

import torch
from torch import Tensor, nn

from kernels.device_clock import Workload
from workers.model import float8
from workers.model.precision import PARAMETER_DTYPES

PRODUCTS = ("forward", "grad_input", "grad_weight")
BF16 = "bf16"


def product_works(rows: int, inner: int, columns: int, recipe: str, device: torch.device) -> dict[str, Workload]:
    """Return the products of a layer, x (rows, inner) to (rows, columns), by name; their factors are cast already.
    `recipe`: one of `workers.model.float8.RECIPES`, or BF16."""
    x, weight, grad = (
        torch.randn(*shape, device=device).to(torch.bfloat16)
        for shape in ((rows, inner), (columns, inner), (rows, columns))
    )
    factors = {"forward": (x, weight.t()), "grad_input": (grad, weight), "grad_weight": (grad.t(), x)}
    wide = torch.float8_e5m2 if recipe == "tensorwise" else torch.float8_e4m3fn
    works: dict[str, Workload] = {}
    for name, (a, b) in factors.items():
        if recipe == BF16 or (name == "grad_weight" and recipe == "rowwise_with_gw_hp"):
            works[name] = lambda a=a, b=b: torch.mm(a, b)  # type: ignore[misc]
            continue
        left = a.contiguous().to(torch.float8_e4m3fn if name == "forward" else wide)
        right = b.t().contiguous().to(torch.float8_e4m3fn).t()
        works[name] = scaled_product(left, right, by_row=recipe != "tensorwise", fast=name == "forward")
    return works


def scaled_product(left: Tensor, right: Tensor, *, by_row: bool, fast: bool) -> Workload:
    """Return an FP8 product with scales of 1, (rows, inner) stored by rows times (inner, columns) stored by columns. A
    CPU emulates it. `by_row`: a scale for each row of `left` and each column of `right`; else one for each factor.
    `fast`: sum in the tensor core's own precision, as torchao does in the forward pass only."""
    if left.device.type == "cpu":
        return lambda: torch.mm(left.float(), right.float()).bfloat16()
    shapes = ((len(left), 1), (1, right.shape[1])) if by_row else ((), ())
    a, b = (torch.ones(shape, device=left.device) for shape in shapes)
    return lambda: torch._scaled_mm(left, right, a, b, out_dtype=torch.bfloat16, use_fast_accum=fast)


class _Readers(nn.Module):
    """Equal layers of one input, (rows, inner) to (rows, columns) each, maybe between two elementwise operations."""

    def __init__(self, readers: int, inner: int, columns: int, dtype: torch.dtype, *, between: bool) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(inner, columns, bias=False, dtype=dtype) for _ in range(readers))
        self.beside = nn.SiLU() if between else nn.Identity()

    def forward(self, x: Tensor) -> list[Tensor]:
        x = self.beside(x)
        return [self.beside(linear(x)) for linear in self.linears]


def whole_work(
    rows: int,
    inner: int,
    columns: int,
    recipe: str,
    parameter_dtype: str,
    device: torch.device,
    *,
    readers: int,
    between: bool,
) -> Workload:
    """Return both passes of equal layers as a model has them: under autocast, and on a GPU compiled. Raises NoFloat8:
    torchao is missing. `readers`: layers, which read one input. `between`: between two elementwise operations, with
    which the compiler fuses casts, as in a model."""
    with device:
        model = _Readers(readers, inner, columns, PARAMETER_DTYPES[parameter_dtype], between=between)
    weights = list(model.parameters())
    if recipe != BF16:
        layers = float8.linear_layers(model, rows, recipe, ["all"])
        float8.convert(model, layers, recipe, emulate=device.type == "cpu")
    call = torch.compile(model, dynamic=False) if device.type == "cuda" else model
    x = torch.randn(rows, inner, device=device, dtype=torch.bfloat16, requires_grad=True)
    grads = [torch.randn(rows, columns, device=device, dtype=torch.bfloat16) for _ in weights]

    def both_passes() -> object:
        with torch.autocast(device.type, torch.bfloat16):
            outs = call(x)
        return torch.autograd.grad(outs, (x, *weights), grads)

    return both_passes
