"""Matrix products, from the shapes and types that the profiler records."""

import pytest
import torch

from workers.measure.profiling.products import Product, product_of
from workers.measure.profiling.recording import record


@pytest.mark.parametrize(
    ("name", "shapes", "dtypes", "size"),
    [
        ("aten::mm", [[2, 3], [3, 5]], ["float", "float"], "2×3 · 3×5"),
        ("aten::addmm", [[5], [2, 3], [3, 5], []], ["float", "c10::BFloat16", "c10::BFloat16", "Scalar"], "2×3 · 3×5"),
        ("aten::bmm", [[4, 2, 3], [4, 3, 5]], ["c10::Half", "c10::Half"], "4 × (2×3 · 3×5)"),
    ],
)
def test_a_product_has_its_size(name: str, shapes: list[list[int]], dtypes: list[str], size: str) -> None:
    product = product_of(name, shapes, dtypes)
    assert product.size == size


@pytest.mark.parametrize(
    ("name", "shapes", "dtypes"),
    [
        ("aten::add", [[2, 3], [2, 3]], ["float", "float"]),
        ("aten::mm", [], []),
        ("aten::mm", [[2, 3]], ["float"]),
        ("aten::mm", [[2, 3], [4, 5]], ["float", "float"]),
        ("aten::mm", [[2, 3], [3, 5]], ["signed char", "signed char"]),
        ("aten::bmm", [[2, 3], [4, 3, 5]], ["float", "float"]),
    ],
)
def test_what_is_no_product_of_known_numbers_is_none(name: str, shapes: list[list[int]], dtypes: list[str]) -> None:
    assert product_of(name, shapes, dtypes) is None


def test_products_are_noted_without_python_functions() -> None:
    def work() -> None:
        torch.zeros(2, 3) @ torch.zeros(3, 5)

    products = [event.product for event in record(work, on_gpu=False).recording.host if event.product is not None]
    assert products == [Product(1, 2, 3, 5, "fp32", 4)]
    stacks = record(work, on_gpu=False, python=True).recording.host
    assert [event for event in stacks if event.name == "aten::mm"]
    assert not any(event.product for event in stacks)
