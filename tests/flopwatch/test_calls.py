"""What the text of a file tells of whether a job can call what is named in it."""

from collections.abc import Sequence

import pytest

from flopwatch.calls import complaint

MAKER = "def make(device, width=8, *, depth=2):\n    return lambda: 1\n"


@pytest.mark.parametrize(
    ("source", "arguments", "told"),
    [
        (MAKER, ["width", "depth"], None),
        (MAKER, ["widht"], "make(device, width=8, *, depth=2) is called with device, arguments.widht: got an unexp"),
        (MAKER, None, None),
        ("def make(device, width):\n    return lambda: 1\n", [], "missing a required argument: 'width'"),
        ("def make(device, **others):\n    return lambda: 1\n", ["anything"], None),
        ("def make():\n    return lambda: 1\n", [], "too many positional arguments"),
        ("def make(device, x, /):\n    return lambda: 1\n", ["x"], "'x'"),
        ("class make:\n    def __init__(self, device): ...\n", [], "make is a class whose objects cannot be called"),
        ("class make(nn.Module):\n    def forward(self, x): ...\n", [], "make(device); a model is --model"),
        ("def make(**sizes): ...\n", [], "is called with device: too many positional arguments; a model is --model"),
        ("class make:\n    def __call__(self): ...\n", [], None),
        ("class make(Elsewhere): ...\n", [], None),
        ("@wrapped\n" + MAKER, ["seed"], None),
        (MAKER + "make = wrapped(make)\n", ["seed"], None),
        ("if fast:\n    from fast import make\n" + MAKER, ["seed"], None),
        ("from fast import *\n" + MAKER, ["seed"], None),
    ],
)
def test_a_step_that_a_job_could_not_call(source: str, arguments: Sequence[str] | None, told: str | None) -> None:
    said = complaint(source.encode(), "make", "step", arguments)
    assert said is None if told is None else told in str(said)


@pytest.mark.parametrize(
    ("source", "told"),
    [
        (MAKER, "and no device; a step, called with device, is --step"),
        ("class make:\n    def __init__(self, device): ...\n", "a step, called with device, is --step"),
        ("class make(Module):\n    def __init__(self, vocab_size, d_ff, **others): ...\n", None),
        ("class make(Module):\n    def forward(self, x): ...\n", None),
        ("def make(sizes): ...\n", None),
        ("def make(device=None, *, rope_theta, **sizes): ...\n", None),
        ("def make(width, depth): ...\n", None),
    ],
)
def test_a_step_that_is_named_as_a_model_is_told(source: str, told: str | None) -> None:
    said = complaint(source.encode(), "make", "model", [])
    assert said is None if told is None else told in str(said)


def test_arguments_that_an_implementation_does_not_take_are_told() -> None:
    source = b"def mine(q, k, v, is_causal=False, br=32, bc=128): ..."
    assert complaint(source, "mine", "implementation", ["br", "bc"]) is None
    assert "unexpected keyword argument 'bz'" in str(complaint(source, "mine", "implementation", ["bz"]))
    assert complaint(b"def mine(x, weight): ...", "mine", "implementation", []) is None, "an operation of another kind"
    assert complaint(source, "mine", "model", ["bz"]) is None
