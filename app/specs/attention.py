"""`attention`: compares implementations of attention over sizes and data types."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from app.presets import ATTENTION_PRESETS
from app.specs._base import (
    Cell,
    Device,
    DocumentLengths,
    KeyHeads,
    Name,
    Named,
    Seed,
    SpecBase,
    WarmupSteps,
    Window,
    check_documents,
    check_number_of_cells,
    field_error,
    masks_with_effect,
)
from app.specs._code import Arguments, CodeSpec, ImplementationsSpec, Uploaded, coordinates, names
from app.specs._identity import Scalar

BLOCK_SIZES = {"cpu_flash": {"br": 32, "bc": 128}, "cpu_blocked": {"br": 32}}
"""Block sizes that each implementation takes, with the library's own sizes, which apply if the spec gives none. A case
contains the number itself, so that its key still means the same work if the library's own size changes. They stand
here, not in what workers register, since the server derives a case from its spec alone."""

BlockSize = Annotated[int, Field(ge=1, le=65_536)]


@dataclass(frozen=True)
class AttentionCell(Cell):
    """One implementation at one size. A block size is None where the implementation takes none."""

    implementation: str
    dtype: str
    causal: bool
    head_dim: int
    sequence_length: int
    br: int | None = None
    bc: int | None = None
    query_length: int | None = None
    """None: as many queries as keys."""
    threads: int | None = None
    """None: as many as the process has."""

    @property
    def title(self) -> str:
        blocks = [f"{name} {size}" for name, size in (("br", self.br), ("bc", self.bc)) if size is not None]
        if self.threads is not None:
            blocks.append(f"{self.threads} thread{'s' if self.threads > 1 else ''}")
        queries = [] if self.query_length is None else [f"query length {self.query_length}"]
        sizes = [*queries, f"length {self.sequence_length}", f"head dimension {self.head_dim}"]
        return ", ".join([self.implementation, self.dtype, *sizes, "causal" if self.causal else "not causal", *blocks])


class AttentionSpec(ImplementationsSpec):
    """Time attention alone: every implementation at every size, checked against one oracle."""

    kind: Literal["attention"] = "attention"
    implementations: list[Annotated[Name, Named("attention")]] = Field(default=["eager", "sdpa_flash"], max_length=100)
    """Attention implementations, as workers register them; empty with `code`: none beside it."""
    code: Annotated[CodeSpec | None, Uploaded("attention")] = None
    """A function of your own, measured and checked beside them: (q, k, v, is_causal) → output, each of the shape
    (batch, heads, sequence, head_dim). It may have arguments window, softcap, scale, bottom_right and document_ends.
    Only workers started with --allow-code run it."""
    arguments: Arguments = Field(default={})
    """With `code`: further arguments of the function, by name, such as its block sizes."""
    head_dims: list[Annotated[int, Field(ge=1, le=1024)]] = Field(default=[64], min_length=1, max_length=100)
    """Head dimensions."""
    sequence_lengths: list[Annotated[int, Field(ge=1, le=1_048_576)]] = Field(
        default=[256, 1024], min_length=1, max_length=100
    )
    """Sequence lengths in tokens: of keys, and of queries where `query_length` is null."""
    query_length: int | None = Field(default=None, ge=1, le=1_048_576)
    """Queries of each sequence, in tokens; 1 is decoding with a cache. Null: as many as there are keys."""
    dtypes: list[Literal["fp32", "tf32", "bf16", "fp16"]] = Field(default=["bf16"], min_length=1, max_length=4)
    """Data types of the inputs; `tf32` is fp32 inputs whose products may be rounded to tf32 (a GPU format)."""
    causal: list[bool] = Field(default=[True], min_length=1, max_length=2)
    """True: query i sees only keys 0 … i."""
    batch_size: int = Field(default=8, ge=1, le=65_536)
    """Sequences."""
    num_heads: int = Field(default=1, ge=1, le=1024)
    """Attention heads."""
    num_kv_heads: KeyHeads = None
    """Heads of keys and values, each shared by as many query heads; divides num_heads. Null: as many as query heads."""
    window: Window = None
    """Keys that a query sees back, its own position included, and as many forth where `causal` is false. Null: all, as
    where it is not shorter than the sequence."""
    document_lengths: DocumentLengths = None
    """Lengths of the documents that are packed into each sequence, together the sequence length: a query sees its own
    document only. Null: one document."""
    softcap: float | None = Field(default=None, gt=0, le=1e9)
    """Scaled scores s become softcap · tanh(s / softcap). Null: they stay."""
    scale: float | None = Field(default=None, gt=0, le=1e9)
    """Factor of the scores. Null: 1 / √head_dim."""
    bottom_right: bool = False
    """With `query_length`, align a causal mask or a window with the last query and the last key, as in decoding with a
    cache; false: with the first ones."""
    br: list[BlockSize] | None = Field(default=None, min_length=1, max_length=100)
    """Queries per tile, for `cpu_flash`; block size of the products of `cpu_blocked`; null: the library's own."""
    bc: list[BlockSize] | None = Field(default=None, min_length=1, max_length=100)
    """Keys per tile, for `cpu_flash`; null: the library's own."""
    threads: list[Annotated[int, Field(ge=1, le=1024)]] | None = Field(default=None, min_length=1, max_length=100)
    """Threads that compute, on a CPU; null: as many as torch takes there."""
    mode: Literal["forward", "forward_backward"] = "forward_backward"
    """`forward` keeps no gradients; `forward_backward` times each pass, and both."""
    warmup_steps: WarmupSteps = None
    """Calls of each pass before measuring starts; null: until their times are steady, at least 5."""
    measure_steps: int = Field(default=20, ge=1, le=10_000)
    """Calls of each pass measured."""
    do_bench: bool = False
    """On a GPU, also time the mode's whole work with triton.testing.do_bench, for 10 s after 1 s: the stopwatch of
    CS336's leaderboard."""
    profile: bool = False
    """After its times, run each cell once more under torch's profiler (table `profile`), and on a CPU also count cache
    misses and lines from DRAM."""
    device: Device = "auto"
    """`auto` takes a GPU where the worker has one."""
    seed: Seed = 0
    """Seed of the random inputs."""

    unmeasured: ClassVar[frozenset[str]] = SpecBase.unmeasured | {"profile", "do_bench"}
    presets: ClassVar[dict[str, dict[str, Any]]] = ATTENTION_PRESETS
    added: ClassVar[dict[str, Scalar]] = {"bottom_right": False}
    gone: ClassVar[Mapping[str, Scalar]] = {"autotune": False}
    axes: ClassVar[dict[str, str]] = {
        "implementations": "implementation",
        "dtypes": "dtype",
        "causal": "causal",
        "head_dims": "head_dim",
        "sequence_lengths": "sequence_length",
        "br": "br",
        "bc": "bc",
        "threads": "threads",
    }
    labels: ClassVar[dict[str, tuple[str, ...]]] = {"implementation": names("code")}
    table_rows: ClassVar[tuple[str, ...]] = (
        "implementation", "dtype", "causal", "head_dim", "sequence_length", "query_length",
    )  # fmt: skip
    first_tables: ClassVar[tuple[str, ...]] = ("accessor", "profile")
    first_columns: ClassVar[dict[str, tuple[str, ...]]] = {
        "profile": (
            *("implementation", "sequence_length", "threads", "pass", "name"),
            *("self_ms", "total_ms", "share_percent", "calls", "memory_mib", "self_memory_mib"),
        ),
    }
    metric_notes: ClassVar[Mapping[frozenset[str], str]] = {
        frozenset(
            {"tflops", "backward_tflops"}
        ): "TFLOP/s: the backward pass counts as 2 forward passes. Where others count 2.5, because the scores are "
        "computed again, their rates are 7/6 of these for both passes, and 5/4 for the backward pass."
    }
    table_columns: ClassVar[tuple[str, ...]] = (
        "forward_ms", "backward_ms", "forward_backward_ms", "do_bench_ms", "host_us", "tflops", "peak_memory_mib",
    )  # fmt: skip

    @model_validator(mode="after")
    def _lists_make_sense(self) -> Self:
        if self.arguments and self.code is None:
            raise field_error("arguments", "are those of a function of your own: give code, or leave them out")
        if self.threads is not None and self.device != "cpu":
            raise field_error("threads", "are those of a CPU: set device to cpu, or leave them out")
        if self.device == "cpu" and self.do_bench:
            raise field_error(
                "do_bench", "triton.testing.do_bench times GPUs only: leave it out, or choose device cuda"
            )
        if self.device == "cpu" and "tf32" in self.dtypes:
            raise field_error("dtypes", "tf32 is a GPU format: leave it out, or choose device cuda")
        if self.query_length is not None and True in self.causal and not self.bottom_right:
            raise field_error(
                "query_length",
                "the causal mask begins at the first key, so that the last keys of a longer sequence would be hidden "
                "from these queries: set causal to [false], or bottom_right to true",
            )
        if self.num_kv_heads is not None and self.num_heads % self.num_kv_heads:
            raise field_error("num_kv_heads", f"must divide num_heads ({self.num_heads}): choose one that does")
        for length in self.sequence_lengths:
            check_documents(self.document_lengths, "document_lengths", length, "a sequence length")
        if self.document_lengths is not None and self.query_length is not None:
            raise field_error("document_lengths", "have as many queries as keys: leave them out, or query_length")
        check_number_of_cells(self, "implementations")
        return self

    def cells(self) -> list[AttentionCell]:
        """Return the cells in the order they run: cells that share an oracle are neighbours, the longest come last."""
        sizes = itertools.product(self.dtypes, self.causal, self.head_dims, sorted(self.sequence_lengths))
        return [
            AttentionCell(
                *(name, dtype, causal, head_dim, length, br, bc),
                query_length=None if self.query_length == length else self.query_length,
                threads=threads,
            )
            for (dtype, causal, head_dim, length), name in itertools.product(sizes, self.names())
            for br, bc, threads in itertools.product(*self._block_sizes(name), self._numbers_of_threads())
        ]

    def number_of_cells(self) -> int:
        sizes = len(self.dtypes) * len(self.causal) * len(self.head_dims) * len(self.sequence_lengths)
        blocks = sum(len(br) * len(bc) for br, bc in map(self._block_sizes, self.names()))
        return sizes * blocks * len(self._numbers_of_threads())

    def _numbers_of_threads(self) -> Sequence[int | None]:
        return [None] if self.threads is None else self.threads

    def _block_sizes(self, implementation: str) -> tuple[Sequence[int | None], Sequence[int | None]]:
        own = BLOCK_SIZES.get(implementation, {})
        br = [None] if "br" not in own else self.br or [own["br"]]
        bc = [None] if "bc" not in own else self.bc or [own["bc"]]
        return br, bc

    def normalised(self, identity: dict[str, Scalar]) -> tuple[dict[str, Scalar], dict[str, Scalar]]:
        """Set fields without effect to null: `code` for all implementations but that code, and fields of the problem at
        which it is the same as without."""
        name = identity.get("implementation")
        if identity.get("query_length") == identity.get("sequence_length"):
            identity = {**identity, "query_length": None}
        if self.num_kv_heads == self.num_heads:
            identity = {**identity, "num_kv_heads": None}
        window, documents = self.masks(int(identity["sequence_length"] or 0))
        identity = {**identity, "window": window}
        if documents is None:
            identity = {**identity, "document_lengths": None}
        if identity["query_length"] is None or (window is None and not identity.get("causal")):
            identity = {**identity, "bottom_right": None}
        identity = coordinates(identity, "code", self.code if self.is_code(name) else None)
        if not self.is_code(name):
            identity |= dict.fromkeys(name for name in identity if name.startswith("arguments."))
        return identity, {}

    def masks(self, sequence_length: int) -> tuple[int | None, list[int] | None]:
        """Return the window and the documents, None where they hide nothing."""
        return masks_with_effect(self.window, self.document_lengths, max(sequence_length, self.query_length or 0))
