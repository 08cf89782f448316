"""What the text of a file tells of whether a job can call what is named in it."""

from collections.abc import Sequence

import pytest

from flopwatch.calls import complaint

MAKER = "def make(device, width=8, *, depth=2):\n    return lambda: 1\n"


@pytest.mark.parametrize(
    ("source", "arguments", "told"),
    [
        (MAKER, ["width", "depth"], None),
        (
            MAKER,
            ["widht"],
            "make(device, widht=): got an unexpected keyword argument 'widht'; did you mean arguments.width",
        ),
        (MAKER, ["seed"], "it takes: width, depth"),
        (MAKER, None, None),
        ("def make(device, width):\n    return lambda: 1\n", [], "missing a required argument: 'width'"),
        ("def make(device, width):\n    return lambda: 1\n", ["width"], None),
        ("def make(device, *, width):\n    return lambda: 1\n", [], "missing a required"),
        ("def make(device, **others):\n    return lambda: 1\n", ["anything"], None),
        ("def make(*everything):\n    return lambda: 1\n", [], None),
        ("def make(device, /):\n    return lambda: 1\n", ["device"], "leave arguments.device out"),
        ("def make():\n    return lambda: 1\n", [], "too many positional arguments; let it take device first"),
        ("def make(*, device):\n    return lambda: 1\n", [], "let it take device first"),
        ("def make(device, **k):\n    return lambda: 1\n", ["device"], "'device'; leave arguments.device out"),
        ("def make(device, x, /):\n    return lambda: 1\n", ["x"], "put x behind the `/`"),
        ("def make(device, x, /, width=1):\n    return lambda: 1\n", [], "put x behind the `/`"),
        ("def make(self, device):\n    return lambda: 1\n", [], "let it take device first"),
        ("def make(batch):\n    return lambda: 1\n", ["batch"], "let it take device first"),
        ("def make(device):\n    return lambda: 1\n", ["batch"], "no other arguments: leave arguments.batch out"),
        (
            "def make(device):\n    def step():\n        return 1\n",
            [],
            "make returns nothing; a step is made by make(device",
        ),
        ("def make(device):\n    while True:\n        yield 1\n", [], None),
        ("async def make(device):\n    return 1\n", [], "asynchronous"),
        ("class make:\n    def __init__(self, device): ...\n", [], "make is a class whose objects cannot be called"),
        ("class make:\n    def __call__(self): ...\n    def __init__(self, device): ...\n", [], None),
        ("class make:\n    def __call__(self): ...\n    def __init__(self): ...\n", [], "too many positional"),
        ("class make:\n    def __call__(self, x): ...\n", [], "missing a required argument: 'x'"),
        ("class make(nn.Module):\n    def forward(self, x): ...\n", [], "objects are called with arguments"),
        ("class make(nn.Module):\n    def forward(self): ...\n", [], None),
        ("class make(Elsewhere): ...\n", [], None),
        ("@wrapped\n" + MAKER, ["seed"], None),
        (MAKER + "make = wrapped(make)\n", ["seed"], None),
        ("if fast:\n    from fast import make\n" + MAKER, ["seed"], None),
        ("from fast import *\n" + MAKER, ["seed"], None),
        ("from elsewhere import make\n", ["seed"], None),
    ],
)
def test_a_step_that_a_job_could_not_call(source: str, arguments: Sequence[str] | None, told: str | None) -> None:
    said = complaint(source.encode(), "make", "step", arguments)
    assert said is None if told is None else told in str(said)


def test_arguments_that_an_implementation_does_not_take_are_told() -> None:
    source = b"def mine(q, k, v, is_causal=False, br=32, bc=128): ..."
    assert complaint(source, "mine", "implementation", ["br", "bc"]) is None
    said = str(complaint(source, "mine", "implementation", ["bz"]))
    assert said.startswith("it is called as mine(q, k, v, is_causal, bz=): got an unexpected keyword argument 'bz'")
    assert "it takes: br, bc; arguments.NAME=VALUE sets one" in said
    assert "let it take q, k, v, is_causal first" in str(
        complaint(b"def mine(q, k, br): ...", "mine", "implementation", ["br"])
    )
    assert complaint(b"def mine(x, weight): ...", "mine", "implementation", []) is None, "an operation of another kind"


def test_an_implementation_is_no_plain_class() -> None:
    plain, function = b"class mine:\n    pass\n", b"class mine(torch.autograd.Function):\n    pass\n"
    assert "is a class" in str(complaint(plain, "mine", "implementation", None))
    assert complaint(function, "mine", "implementation", None) is None
    assert complaint(plain, "mine", "model", None) is None, "a model is a class"
