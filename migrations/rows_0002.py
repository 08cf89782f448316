"""Plain functions that turn values of revision 0001's rows into those of 0002; no SQL.

This module is frozen: nobody can mend rows that were migrated. So it keeps its own copy of the rules by which specs had
identities when the revision was written (app/specs), and imports nothing of them.

It carries unreadable values (broken JSON, a missing field, an unknown kind) as they are. The case key then begins with
"?", followed by a hash of the text: rows of one such case still belong together, and match no other rows.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

KEY_CHARACTERS = 20
SHAPE = ("d_model", "d_ff", "num_layers", "num_heads")
MODEL_SIZES = {
    "tiny": (128, 512, 2, 4),
    "small": (768, 3072, 12, 12),
    "medium": (1024, 4096, 24, 16),
    "large": (1280, 5120, 36, 20),
    "xl": (1600, 6400, 48, 25),
    "2.7b": (2560, 10240, 32, 32),
}
GRIDS = {
    "attention": {
        "implementations": "implementation",
        "dtypes": "dtype",
        "causal": "causal",
        "head_dims": "head_dim",
        "sequence_lengths": "sequence_length",
    },
    "kernel": {"implementations": "implementation", "dtypes": "dtype", "rows": "rows", "columns": "columns"},
    "ceiling": {"dtypes": "dtype"},
}
"""Each kind's list fields that lists and tables show, with their coordinates."""
CELL = {
    "attention": (
        *("implementation", "dtype", "causal", "head_dim", "sequence_length", "br", "bc"),
        *("batch_size", "num_heads", "autotune", "mode", "warmup_steps"),
    ),
    "kernel": ("implementation", "dtype", "rows", "columns", "kernel", "mode", "warmup_steps"),
}
"""Coordinates that make a cell's identity. Old cases had them all."""
NOT_TUNED = frozenset(
    {"compiled", "cpu_blocked", "cpu_flash", "cpu_fused", "cpu_naive", "eager", "flex", "tiled"}
    | {"sdpa_cudnn", "sdpa_efficient", "sdpa_flash", "sdpa_math"}
)
"""Implementations of attention on which `autotune` had no effect."""
OWN_MATRIX_SIZES = {
    "cpu": {"fp32": 2048, "tf32": 2048, "bf16": 1024, "fp16": 512},
    "cuda": dict.fromkeys(("fp32", "tf32", "bf16", "fp16"), 8192),
}
"""Sizes that `matrix_size: null` means, by type of device and data type."""
NOT_OF_THE_CASE = ("device", "replicate")
"""Coordinates that old cases had. They stand beside the case now."""

VERDICTS = ("valid", "suspect", "invalid")
"""Verdicts from best to worst."""
INVALIDATING = ("recompiles", "eager_fallback")
"""Failed checks that made a verdict `invalid`, unless there was no warm-up. Every other one made it `suspect`."""

UNREADABLE = (KeyError, TypeError, ValueError, AttributeError, IndexError)
"""Errors that reading a malformed row raises."""


@dataclass(frozen=True)
class OldJob:
    """A finished or unfinished job of 0001. Columns that could not be read as JSON are None."""

    id: int
    kind: str
    state: str
    spec: dict[str, Any] | None
    progress: dict[str, Any] | None
    error: dict[str, Any] | None
    environment: dict[str, Any] | None
    validity: dict[str, Any] | None
    recorded: bool
    """True if its last attempt ended in an orderly way, so that its results were recorded."""


@dataclass(frozen=True)
class NewCase:
    """The new form of one distinct `case` of a job's measurements."""

    case: str
    """The case as JSON, or the old text if that could not be read."""
    unit_index: int
    case_key: str
    device_key: str
    whole: str | None
    """The old phase of rates of the mode's whole work."""


def read_json(text: Any) -> Any:
    """Return the value of a JSON column; None for null and for a text that is not JSON."""
    if not isinstance(text, str):
        return None
    try:
        return json.loads(text)
    except ValueError:
        return None


def read_object(text: Any) -> dict[str, Any] | None:
    """Return what read_json does, but None for every value that is not an object."""
    value = read_json(text)
    return value if isinstance(value, dict) else None


def key(kind: str, identity: Mapping[str, Any]) -> str:
    """Return the case key: a hash of the kind and the identity without its nulls."""
    kept = {name: value for name, value in identity.items() if value is not None}
    canonical = json.dumps([kind, kept], sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()[:KEY_CHARACTERS]


def unread_key(text: str) -> str:
    """Return the key of a case whose identity is unknown."""
    return "?" + hashlib.sha256(text.encode()).hexdigest()[: KEY_CHARACTERS - 1]


def new_spec(job: OldJob) -> dict[str, Any] | None:
    """Return the spec that means now what the old one meant; None if nothing changes."""
    if job.kind == "benchmark" and job.spec is not None and job.spec.get("compile") is True:
        return {**job.spec, "compile_scope": "model"}
    return None


def shape(model: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return d_model, d_ff, num_layers and num_heads of a model's spec."""
    return MODEL_SIZES[model["size"]] if model["size"] is not None else tuple(model[name] for name in SHAPE)


def label(sizes: tuple[Any, ...]) -> str:
    """Return the name that tables give a model of these sizes."""
    known = next((name for name, preset in MODEL_SIZES.items() if preset == sizes), None)
    return known or "d{}-f{}-l{}-h{}".format(*sizes)


def benchmark_case(spec: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return labels and identity of a benchmark."""
    model, mode = spec["model"], spec["mode"]
    sizes = shape(model)
    identity = {
        "model.name": model["name"],
        **{f"model.{name}": size for name, size in zip(SHAPE, sizes, strict=True)},
        "model.vocab_size": model["vocab_size"],
        "model.rope_theta": model["rope_theta"],
        **{name: spec[name] for name in ("batch_size", "context_length", "mode", "precision")},
        "parameter_dtype": "fp32",
        "compile": spec["compile"],
        "compile_scope": "model" if spec["compile"] else None,
        "cuda_graph": False,
        "attention": spec["attention"],
        "activation_checkpointing": (
            spec["activation_checkpointing"] if mode in ("forward_backward", "train_step") else None
        ),
        "optimizer": spec["optimizer"] if mode == "train_step" else None,
        "gradient_clip_norm": spec["gradient_clip_norm"] if mode == "train_step" else None,
        "new_tokens": spec["new_tokens"] if mode == "generate" else None,
        "warmup_steps": spec["warmup_steps"],
    }
    return {"model": label(sizes)}, identity


def ceiling_identity(job: OldJob, case: Mapping[str, Any]) -> dict[str, Any]:
    """Return the identity of a copy, which has no data type, or of a product. A device's own size is null.

    On a CPU, the old version found a product's own size by measuring, so the size varied from job to job. It becomes
    null only if it equals the size that the device has today.
    """
    spec, copies = job.spec or {}, case["operation"] == "copy"
    size = spec["matrix_size"]
    if size is None and not copies and case["matrix_size"] != _own_matrix_size(job, case["dtype"]):
        size = case["matrix_size"]
    return {
        "operation": case["operation"],
        "dtype": None if copies else case["dtype"],
        "matrix_size": None if copies else size,
        "copy_mib": spec["copy_mib"] if copies else None,
        "warmup_steps": spec["warmup_steps"],
    }


def _own_matrix_size(job: OldJob, dtype: str) -> int | None:
    try:
        return OWN_MATRIX_SIZES[(job.environment or {})["device"]["type"]][dtype]
    except UNREADABLE:
        return None


def new_case(job: OldJob, text: str) -> NewCase:
    """Return the new form of a measurement's case. `text` is the old case's JSON."""
    old = read_object(text)
    if old is None:
        return NewCase(text, 0, unread_key(text), "unknown", "step" if job.kind == "benchmark" else None)
    rest = {name: value for name, value in old.items() if name not in NOT_OF_THE_CASE}
    try:
        coordinates, case_key = _identified(job, rest)
    except UNREADABLE:
        coordinates, case_key = rest, unread_key(json.dumps([job.kind, rest], sort_keys=True))
    index = old.get("replicate")
    return NewCase(
        case=json.dumps(coordinates),
        unit_index=index if type(index) is int else 0,
        case_key=case_key,
        device_key=device_key(job, old.get("device")),
        whole="step" if job.kind == "benchmark" else old.get("mode"),
    )


def _identified(job: OldJob, case: dict[str, Any]) -> tuple[dict[str, Any], str]:
    if job.kind in CELL:
        identity = {name: case[name] for name in CELL[job.kind]}
        if job.kind == "attention" and identity["implementation"] in NOT_TUNED:
            identity["autotune"] = None
        untuned = identity.get("autotune") is False  # the key leaves this value out
        return identity, key(job.kind, {**identity, "autotune": None} if untuned else identity)
    if job.spec is None:
        raise ValueError("without its spec, the identity is not known")
    if job.kind == "benchmark":
        labels, identity = benchmark_case(job.spec)
        return {**labels, **identity}, key(job.kind, identity)
    if job.kind == "ceiling":
        identity = ceiling_identity(job, case)
        # No other column keeps the size that the device was given when the spec chose none.
        sizes = {name: case[name] for name in ("matrix_size", "copy_mib")}
        return {**identity, **sizes}, key(job.kind, identity)
    raise ValueError(f"there was no kind {job.kind!r}")


def device_key(job: OldJob, name: Any) -> str:
    """Return the device key: "1x <GPU>", or "<threads>x <processor>"; "?x <name>" if the threads are unknown."""
    if not isinstance(name, str):
        return "unknown"
    environment = job.environment or {}
    try:
        if environment["device"]["type"] != "cpu":
            return f"1x {name}"
        return f"{int(environment['threads']['intra_op'])}x {name}"
    except UNREADABLE:
        return f"?x {name}"


def summary(job: OldJob) -> dict[str, Any]:
    """Return the part of a job's spec that lists show."""
    try:
        spec = job.spec or {}
        if job.kind == "benchmark":
            return {"model": label(shape(spec["model"])), "context_length": spec["context_length"]}
        shown = {"kernel": spec["kernel"]} if job.kind == "kernel" else {}
        return {**shown, **{name: _listed(spec[field]) for field, name in _shown(job.kind)}}
    except UNREADABLE:
        return {}


def _shown(kind: str) -> Iterable[tuple[str, str]]:
    return GRIDS[kind].items()


def _listed(values: Sequence[Any]) -> Any:
    return values[0] if len(values) == 1 else "/".join(str(value) for value in values)


def new_phase(metric: str, whole: str, phase: str) -> str:
    """Return SQL for the new phase, from the names of columns. A rate of the whole work has no phase any more."""
    without = ", ".join(f"'{name}'" for name in (*SINGLE, *MEMORY))
    rates = ", ".join(f"'{name}'" for name in RATES)
    return (
        f"CASE WHEN {metric} IN ({without}) THEN NULL"
        f" WHEN {metric} IN ({rates}) AND {phase} = {whole} THEN NULL ELSE {phase} END"
    )


RATES = ("tokens_per_s", "tflops", "mfu", "ceiling_percent", "gb_per_s")
MEMORY = ("peak_memory_mib", "memory_before_backward_mib", "intermediates_mib", "working_memory_mib")
SINGLE = ("output_error", "gradient_error")
"""Metrics that a case has once, under any phase."""


def new_units(job: OldJob, cases: Sequence[NewCase]) -> list[dict[str, Any]]:
    """Return the units of an attempt of the job, as far as it left anything, as rows of the table `unit`.

    If the job did not succeed, it ended in the last of these units.
    """
    if not job.recorded:
        return []
    last = _last_unit(job, cases)
    units = []
    for index in range(last + 1):
        ended_here = index == last and job.state != "succeeded"
        error = job.error or {}
        units.append(
            {
                "unit_index": index,
                "title": title(job, index),
                "outcome": str(error.get("code") or job.state) if ended_here else "succeeded",
                "reason": str(error["detail"]) if ended_here and error.get("detail") else None,
                "environment": job.environment if index == 0 else None,
                "validity": unit_validity(job, index, [case for case in cases if case.unit_index == index]),
            }
        )
    return units


def _last_unit(job: OldJob, cases: Sequence[NewCase]) -> int:
    """Return the index of the last unit that ran; -1 for none."""
    count = _count(job)
    progress = job.progress or {}
    done, total = progress.get("done"), progress.get("total")
    started = type(done) is int and type(total) is int and total > 0
    if job.state == "succeeded":
        return count - 1
    # The job's progress counted its units' steps one unit after the other; each unit had equally many steps.
    reached = min(count - 1, done * count // total) if started else -1  # type: ignore[operator]
    measured = max((case.unit_index for case in cases), default=0 if job.environment is not None else -1)
    return max(reached, measured)


def _count(job: OldJob) -> int:
    replicates = (job.spec or {}).get("replicates", 1)
    return replicates if type(replicates) is int and replicates > 0 else 1


def title(job: OldJob, index: int) -> str:
    """Return the title that the runner gave the unit."""
    try:
        spec = job.spec or {}
        if job.kind == "benchmark":
            model = spec["model"]
            name = model["size"] or label(shape(model))
            count = _count(job)
            which = f", replicate {index + 1} of {count}" if count > 1 else ""
            return f"{name}, context {spec['context_length']}{which}"
    except UNREADABLE:
        pass
    return "copy and matrix product" if job.kind == "ceiling" else "all cells" if job.kind in CELL else job.kind


def unit_validity(job: OldJob, index: int, cases: Sequence[NewCase]) -> dict[str, Any] | None:
    """Return the verdict on a unit, from the job's checks that name it; None if no check does."""
    try:
        checks = (job.validity or {})["checks"]
        if _count(job) > 1:
            checks = [check for check in checks if check["unit"] == title(job, index)]
        if not checks:
            return None
        found = [{name: check[name] for name in ("name", "ok", "detail")} for check in checks]
        verdict = _verdict(job, checks) if _count(job) > 1 else (job.validity or {})["verdict"]
    except UNREADABLE:
        return None
    return {"verdict": verdict, **counted(verdict, len({case.case_key for case in cases})), "checks": found}


def _verdict(job: OldJob, checks: Sequence[Mapping[str, Any]]) -> str:
    failed = {check["name"] for check in checks if not check["ok"]}
    if not failed:
        return "valid"
    without_warmup = (job.spec or {}).get("warmup_steps") == 0
    invalid = {name for name in failed if name in INVALIDATING} - ({"recompiles"} if without_warmup else set())
    return "invalid" if invalid else "suspect"


def counted(verdict: str, cases: int) -> dict[str, Any]:
    """Return the number of cases with each verdict, if it is known: a bad verdict on many cases was not each case's."""
    known = cases == 1 or (cases > 1 and verdict == "valid")
    return {"counts": {verdict: cases}} if known else {}


def job_validity(job: OldJob, units: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the job's verdict with its counts; None if nothing changes."""
    if job.validity is None or not units:
        return None
    found: dict[str, int] = {}
    for unit in units:
        for verdict, number in ((unit["validity"] or {}).get("counts") or {}).items():
            found[verdict] = found.get(verdict, 0) + number
    if not found or any(unit["validity"] is not None and "counts" not in unit["validity"] for unit in units):
        return None
    counts = {verdict: found[verdict] for verdict in VERDICTS if verdict in found}
    return {"verdict": job.validity.get("verdict"), "counts": counts, "checks": job.validity.get("checks", [])}


class Grid:
    """A sweep's grid. It finds the point of each job of the sweep."""

    def __init__(self, grid: Mapping[str, Sequence[Any]]) -> None:
        self._values = {path: list(values) for path, values in grid.items()}
        self._plain = {
            path: {_plain(value): index for index, value in enumerate(values)} for path, values in self._values.items()
        }

    def point(self, spec: Mapping[str, Any]) -> dict[str, int] | None:
        """Return the index of the spec's value on each path; None if one of them is unknown."""
        found = {}
        for path in self._values:
            try:
                value: Any = spec
                for part in path.split("."):
                    value = value[part]
            except UNREADABLE:
                return None
            index = self._index(path, value)
            if index is None:
                return None
            found[path] = index
        return found

    def _index(self, path: str, value: Any) -> int | None:
        if (index := self._plain[path].get(_plain(value))) is not None:
            return index
        # Validation has filled in the fields that an object of the grid left out.
        fitting = [index for index, part in enumerate(self._values[path]) if _contains(value, part)]
        return fitting[0] if len(fitting) == 1 else None


def _plain(value: Any) -> str:
    """Return a value as text: equal for 500 and 500.0 (validation turns one into the other), but not for 1 and true."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value, sort_keys=True)


def _contains(whole: Any, part: Any) -> bool:
    if isinstance(whole, dict) and isinstance(part, dict):
        return all(name in whole and _contains(whole[name], value) for name, value in part.items())
    if isinstance(whole, list) and isinstance(part, list):
        return len(whole) == len(part) and all(map(_contains, whole, part))
    return _plain(whole) == _plain(part)
