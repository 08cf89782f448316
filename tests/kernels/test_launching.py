"""Launches that leave out Triton's own steps hand its launcher the same arguments. No kernel runs here."""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton
from triton.backends.nvidia import driver as nvidia
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels import launching
from kernels.launching import Address, Launch, Window
from kernels.versions import KNOWN_VERSIONS

known_triton = pytest.mark.skipif(
    not triton.__version__.startswith(KNOWN_VERSIONS), reason="launches go through Triton with this version of it"
)
META = {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [1, 64], "fp4_padded": False}
BASE = 1 << 20
SHAPE, STRIDES = (4, 64), (64, 1)


class At:
    """A tensor of a device that is not here."""

    device, dtype = torch.device("cuda", 0), torch.bfloat16

    def __init__(self, address: int) -> None:
        self.address = address

    def data_ptr(self) -> int:
        return self.address

    def element_size(self) -> int:
        return 2

    def view(self, _length: int) -> At:
        return self

    def __getitem__(self, rest: slice) -> At:
        return At(self.address + 2 * rest.start)


IN_ONE_LIST = hasattr(nvidia, "annotate_arguments")
"""From Triton 3.7 on the launcher takes a kernel's arguments in one list."""


class Kernel:
    """As much of a compiled kernel as launching needs: Triton's own launcher, over a recorder in place of its C."""

    arg_names = ("source", "target", "strides", "number", "WIDTH")

    def __init__(self, metas: list[Any]) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.through_triton = 0
        signature = {0: "tensordesc<bf16[1, 64]>", 1: "*bf16", 2: ("i64", "i32"), 3: "i32", 4: "constexpr"}
        self.run = SimpleNamespace(
            launch=nvidia.wrap_handle_tensordesc(lambda *arguments: self.calls.append(arguments), signature, metas),
            launch_cooperative_grid=False, launch_pdl=False, global_scratch_size=0, profile_scratch_size=0,
        )  # fmt: skip
        if IN_ONE_LIST:
            self.run.arg_annotations, self.run.kernel_signature = ["annotated"], b"signature"
        self.function, self.packed_metadata = 11, (4, 1, 1024)
        self.metadata = SimpleNamespace(tensordesc_meta=metas)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(source: Any, target: At, strides: Any, number: int, **options: int) -> Kernel:
            self.through_triton += 1
            stream = torch._C._cuda_getCurrentRawStream(0)
            head = (*grid, 1, 1, stream, self.function, False, False)
            scratch = hooks = (None, None)
            metadata = (self.packed_metadata, None)
            arguments = (source, target, strides, number, options["WIDTH"])
            if IN_ONE_LIST:
                described = (self.run.arg_annotations, self.run.kernel_signature)
                self.run.launch(*head, *metadata, *hooks, *scratch, *described, arguments)
            else:
                self.run.launch(*head, *scratch, *metadata, *hooks, *arguments)
            return self

        return launch


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The descriptors that the driver was asked to encode."""
    made: list[tuple[Any, ...]] = []

    def fill(*arguments: Any) -> tuple[Any, ...]:
        made.append(arguments)
        return ("descriptor", arguments[0])

    name = "fill_tma_descriptor_tiled" if IN_ONE_LIST else "fill_tma_descriptor"
    active = SimpleNamespace(utils=SimpleNamespace(**{name: fill}))
    monkeypatch.setattr(triton.runtime.driver, "_active", active)
    monkeypatch.setattr(triton.runtime.driver, "set_active", lambda _driver: None)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _device: 7, raising=False)
    monkeypatch.setattr(launching, "make_context_current", lambda _device: None)
    monkeypatch.setattr(TensorDescriptor, "__post_init__", lambda _self: None)
    return made


def a_launch(kernel: Kernel) -> Launch:
    window = Window.of(0, SHAPE, STRIDES, (1, 64), offset=128)
    arguments = (window, Address(1, 256), STRIDES, 5)
    return Launch(kernel, 3, arguments, {"WIDTH": 64, "num_warps": 4})


def plain(call: tuple[Any, ...]) -> list[Any]:
    """What a launcher got, with the kernel's arguments behind the rest, and addresses in place of tensors."""
    flat = [*call[:-1], *call[-1]] if IN_ONE_LIST else call
    return [one.data_ptr() if isinstance(one, At) else one for one in flat]


@known_triton
def test_the_launcher_gets_what_triton_would_hand_it(encoded: list[Any]) -> None:
    kernel = Kernel([META])
    launch = a_launch(kernel)
    for _ in range(2):
        launch((At(BASE), At(2 * BASE)))
    assert kernel.through_triton == 1
    by_triton, direct = kernel.calls
    assert plain(by_triton) == plain(direct)
    assert encoded[0] == encoded[1], "the descriptors are the same, too"
    assert ("descriptor", BASE + 2 * 128) in plain(direct)
    assert 2 * BASE + 2 * 256 in plain(direct)


@known_triton
def test_returning_addresses_are_encoded_once(encoded: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "_expanded", functools.lru_cache(maxsize=4)(launching._expanded.__wrapped__))
    kernel = Kernel([META])
    launch = a_launch(kernel)
    launch((At(BASE), At(BASE)))
    for _ in range(3):
        for step in range(4):
            launch((At(BASE + 16 * step), At(BASE)))
    assert len(encoded) == 1 + 4
    for step in range(100):
        launch((At(BASE + 16 * step), At(BASE)))
    assert launching._expanded.cache_info().currsize == 4
    assert [call for call in kernel.calls if ("descriptor", BASE + 256 + 16 * 99) in plain(call)]


@known_triton
def test_threads_share_a_launch(encoded: list[Any]) -> None:
    kernel = Kernel([META])
    launch = a_launch(kernel)
    launch((At(BASE), At(BASE)))
    places = [BASE + 16 * step for step in range(64)] * 4
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda place: launch((At(place), At(place))), places))
    assert kernel.through_triton == 1
    for call in kernel.calls[1:]:
        (place,) = (one[1] for one in plain(call) if isinstance(one, tuple) and one[0] == "descriptor")
        assert place + 256 in plain(call), "an address and its descriptor belong together"


@pytest.mark.parametrize("why", ["odd address", "hooks", "version", "scratch", "no descriptors"])
def test_other_calls_go_through_triton(why: str, encoded: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel([META])
    if why == "version":
        monkeypatch.setattr(launching, "is_verified", lambda: False)
    if why == "scratch":
        kernel.run.global_scratch_size = 64
    if why == "no descriptors":
        kernel.metadata.tensordesc_meta = []
    launch = a_launch(kernel)
    launch((At(BASE), At(BASE)))
    if why == "hooks":
        monkeypatch.setattr(triton.knobs.runtime.launch_enter_hook, "calls", [print])
    launch((At(BASE + 8 * (why == "odd address")), At(BASE)))
    assert kernel.through_triton == 2


@known_triton
def test_an_odd_launcher_is_asked_once(encoded: list[Any]) -> None:
    kernel = Kernel([META])
    launch = a_launch(kernel)
    launch((At(BASE), At(BASE)))
    asked = []

    def refuse(*_arguments: Any) -> None:
        asked.append(1)
        raise TypeError("function takes exactly 3 arguments")

    launch._direct._raw = refuse
    for _ in range(2):
        launch((At(BASE), At(BASE)))
    assert len(asked) == 1
    assert kernel.through_triton == 3
