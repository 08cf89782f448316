"""What makes cases equal: every field of every kind changes the case's key, or is named as one that does not."""

import functools
import hashlib
import json
import random
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from app.specs import KINDS, Case, SpecBase, in_lists, spec_adapter
from app.specs._base import flat
from app.specs._code import CodeSpec
from app.specs.attention import BLOCK_SIZES
from app.specs.benchmark import BenchmarkSpec
from flopwatch.text.cases import case_text

PLAIN_KINDS = sorted(kind for kind, spec in KINDS.items() if not spec.holds_specs)

CODE = {"sha256": "0" * 64, "function": "mine"}
NARROW = {"precision": "bf16", "parameter_dtype": "bf16"}
TRAINING: list[dict[str, Any]] = [
    {"mode": "train_step", "compile": True, "activation_checkpointing": True},
    {"mode": "generate"},
    NARROW,
    {"precision": "fp8"},
    {"mode": "train_step", "optimizer": "torch_fused_adamw", "device": "cuda"},
    {"model": {"d_model": 128, "d_ff": 512, "num_layers": 2, "num_heads": 4}},
    {"step_code": CODE},
]
CONTEXTS: dict[str, list[dict[str, Any]]] = {
    "benchmark": [*TRAINING, {"mode": "generate", "temperature": 1.0, "model": {"size": "tiny", "vocab_size": 50_257}}],
    "profile": TRAINING,
    "ddp": [
        {},
        {"compile": True, "activation_checkpointing": True},
        {**NARROW, "strategy": "torch_fsdp"},
        {"strategy": "fsdp"},
        {"precision": "fp8"},
        {"strategy": "flat", "optimizer": "torch_fused_adamw", "backend": "nccl"},
        {"strategy": "none"},
        {"step_code": CODE},
        {"model": {"d_model": 128, "d_ff": 512, "num_layers": 2, "num_heads": 4}},
    ],
    "attention": [
        {},
        {"implementations": ["cpu_flash"], "dtypes": ["fp32"]},
        {"implementations": ["triton"]},
        {"causal": [False]},
        {"num_heads": 4, "sequence_lengths": [64]},
        {"query_length": 2, "window": 3, "causal": [False]},
        {"device": "cpu"},
        {"code": CODE, "implementations": []},
    ],
    "mixed_precision": [{}, {"model": {"d_model": 128, "d_ff": 512, "num_layers": 2, "num_heads": 4}}],
    "estimate": [
        {},
        {"architecture": "feed_forward_stack"},
        {"architecture": "attention"},
        {"precision": "bf16", "parameter_dtype": "bf16"},
        {"model": {"d_model": 128, "d_ff": 512, "num_layers": 2, "num_heads": 4}},
    ],
    "memory": [
        {"mode": "train_step", "compile": True, "activation_checkpointing": True},
        NARROW,
        {"precision": "fp8"},
        {"model": {"d_model": 128, "d_ff": 512, "num_layers": 2, "num_heads": 4}},
        {"step_code": CODE},
    ],
    "kernel": [{}, {"kernel": "linear", "model": {"size": "small"}}, {"kernel": "linear", "step_code": CODE}],
}
"""Specs in which, between them, every field of a kind has an effect. Of other kinds, each field always has one."""

OTHER_VALUES = {
    "model.name": ["other_model"],
    "model.size": ["xl"],
    "model.d_model": [256],
    "model.document_lengths": [[128, 128], [32, 32]],
    "document_lengths": [[60, 4]],
    "attention": ["flex", "fused"],
    "kernel": ["rms_norm"],
    "sharded_activation_fraction": [0.25],
    "implementations": [["tiled"], ["torch"]],
    "device": ["cpu", "cuda"],
    "ncu": [{"set": "full"}],
    "snapshot_steps": [[10, 20]],
    "br": [[16]],
    "bc": [[16]],
    "code": [CODE],
    "attention_code": [CODE],
    "step_code": [CODE, {**CODE, "function": "other"}],
    "script_code": [CODE],
    "arguments": [{"batch_size": 8}, "--batch-size 8"],
    "fp8_filter": [["all"]],
    "model": [{"size": "tiny"}],
}
"""Where the schema alone does not give another valid value."""


def validated(fields: Mapping[str, Any]) -> SpecBase:
    return spec_adapter.validate_json(json.dumps(fields))


def keys(spec: SpecBase) -> list[str]:
    return [case.key for case in spec.cases()]


def leaves(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Dotted paths of all fields, those of models inside models too."""
    for name, info in model.model_fields.items():
        inner = info.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from leaves(inner, f"{prefix}{name}.")
        else:
            yield prefix + name


def schema_at(schema: dict[str, Any], path: str) -> dict[str, Any]:
    place = schema
    for part in path.split("."):
        if "$ref" in place:
            place = schema["$defs"][place["$ref"].rpartition("/")[2]]
        place = place["properties"][part]
    return place


def other_values(schema: dict[str, Any], path: str, value: Any) -> list[Any]:
    """Values of the field other than `value`, of which at least one should be valid with the other fields."""
    if path in OTHER_VALUES:
        return [other for other in OTHER_VALUES[path] if other != value]
    variants = schema_at(schema, path)
    found: list[Any] = []
    for place in variants.get("anyOf", [variants]):
        if place.get("type") == "array":
            items = place["items"]
            singles = items.get("enum", [False, True] if items.get("type") == "boolean" else [16, 32])
            found += [[single] for single in singles]
        elif "enum" in place:
            found += place["enum"]
        elif place.get("type") == "boolean":
            found += [False, True]
        elif place.get("type") in ("integer", "number"):
            lowest = place.get("minimum", place.get("exclusiveMinimum", 0))
            found += [lowest + 1, lowest + 2]
        elif place.get("type") == "null":
            found.append(None)
    return [other for other in found if json.dumps(other) != json.dumps(value)]


def with_value(fields: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    changed: dict[str, Any] = json.loads(json.dumps(fields))
    *parents, last = path.split(".")
    inside = changed
    for parent in parents:
        inside = inside.setdefault(parent, {})
    inside[last] = value
    return changed


@functools.cache
def schema_of(kind: str) -> dict[str, Any]:
    return KINDS[kind].model_json_schema()


def changed_specs(kind: str, path: str) -> Iterator[tuple[SpecBase, SpecBase]]:
    """Pairs of valid specs that differ in this field alone."""
    schema = schema_of(kind)
    for context in CONTEXTS.get(kind, [{}]):
        fields = {"kind": kind, **context}
        spec = validated(fields)
        value: Any = spec
        for part in path.split("."):
            value = getattr(value, part)
        for other in other_values(schema, path, value):
            try:
                yield spec, validated(with_value(fields, path, other))
            except ValidationError:
                continue
        if "const" in schema_at(schema, path):  # one value today, others tomorrow
            yield spec, spec.model_copy(update={path: "another"})


def told(spec: SpecBase) -> str:
    return case_text(in_lists(spec))


def fields_of(kind: str) -> list[str]:
    return [path for path in leaves(KINDS[kind]) if path != "kind"]


@pytest.mark.parametrize("kind", PLAIN_KINDS)
def test_every_field_changes_the_work_or_is_listed(kind: str) -> None:
    for path in fields_of(kind):
        pairs = list(changed_specs(kind, path))
        assert pairs, f"{path}: no other valid value was found: add one to OTHER_VALUES"
        changes = [keys(spec) != keys(changed) for spec, changed in pairs]
        if path in KINDS[kind].unmeasured:
            assert not any(changes), path
        else:
            assert any(changes), f"{path}: two jobs that do other work would have equal keys"


@pytest.mark.parametrize("kind", PLAIN_KINDS)
def test_lists_tell_jobs_apart(kind: str) -> None:
    for path in fields_of(kind):
        for spec, changed in changed_specs(kind, path):
            is_alike = keys(spec) == keys(changed) and path not in KINDS[kind].unmeasured - {"device"}
            assert told(spec) != told(changed) or is_alike, (path, told(spec))


def with_default(spec: SpecBase, path: str) -> SpecBase | None:
    """The spec with one field as by default; None if that is not valid."""
    default: Any = spec.example()
    for part in path.split("."):
        default = getattr(default, part)
    try:
        return validated(with_value(spec.model_dump(mode="json"), path, default))
    except ValidationError:
        return None


@pytest.mark.parametrize("kind", PLAIN_KINDS)
def test_a_field_without_effect_changes_no_case(kind: str) -> None:
    for path in fields_of(kind):
        for _, changed in changed_specs(kind, path):
            if path in changed.without_effect():
                usual = with_default(changed, path)
                assert usual is None or keys(usual) == keys(changed), path


OF_TRAINING = {
    "optimizer": "torch_adamw", "gradient_clip_norm": 1.0, "master_weights": True, "activation_checkpointing": True,
}  # fmt: skip
SAMPLING = {"new_tokens": 8, "temperature": 1.0, "top_k": 8}


@pytest.mark.parametrize(
    ("fields", "idle"),
    [
        ({"kind": "benchmark", "checkpoint_layers": 2, "checkpoint_scope": "selective"}, 2),
        ({"kind": "benchmark", "mode": "forward", **SAMPLING, **OF_TRAINING, "compile_scope": "model"}, 8),
        ({"kind": "benchmark", "mode": "train_step", **SAMPLING, "checkpoint_blocks": 2}, 4),
        ({"kind": "benchmark", "mode": "generate", **OF_TRAINING}, 4),
        ({"kind": "benchmark", "model": {"size": "tiny", "vocab_size": 100}, "batch_size": 2, "seed": 3}, 0),
        ({"kind": "ddp", "strategy": "flat", "bucket_size_mb": 1}, 1),
        ({"kind": "attention", "implementations": ["eager"], "br": [16]}, 1),
        ({"kind": "attention", "implementations": ["eager", "cpu_flash"], "br": [16]}, 0),
        ({"kind": "attention", "num_heads": 4, "num_kv_heads": 4, "bottom_right": True}, 2),
        ({"kind": "benchmark", "model": {"size": "small", "num_kv_heads": 12}}, 1),
        ({"kind": "mixed_precision", "audits": [], "autocasts": ["fp16"], "batch_size": 2}, 2),
        ({"kind": "benchmark", "activation_checkpointing": True, "checkpoint_layers": 0, "checkpoint_blocks": 2}, 1),
        ({"kind": "ddp", "new_tokens": 8, "trace_max_mib": 9}, 2),
        ({"kind": "estimate", "architecture": "attention", "model": {"size": "tiny", "rope_theta": 5.0}}, 2),
        ({"kind": "estimate", "attention_layer": {"num_heads": 8, "causal": True}}, 2),
        ({"kind": "estimate", "mode": "forward", "activation_checkpointing": True, "optimizer": "torch_adamw"}, 2),
        ({"kind": "estimate", **NARROW, "architecture": "feed_forward_stack", "master_weights": True}, 0),
        ({"kind": "estimate", "architecture": "attention", "mesh": {"fsdp": 2}, "optimizer": "torch_adamw"}, 2),
    ],
    ids=str,
)
def test_fields_without_effect_are_told(fields: dict[str, Any], idle: int) -> None:
    given = [name for name in flat(fields) if name != "kind"]
    assert set(validated(fields).without_effect()) == set(given[len(given) - idle :])


def test_where_code_comes_from_is_no_field_of_people() -> None:
    code = {"sha256": 64 * "a", "function": "f", "revision": {"label": "main", "dirty": True}}
    assert validated({"kind": "benchmark", "step_code": code}).without_effect() == []


def test_a_field_without_effect_names_its_side() -> None:
    sides = {"baseline": {"kind": "benchmark", "new_tokens": 8}, "candidate": {"kind": "benchmark"}}
    assert validated({"kind": "compare", **sides}).without_effect() == ["baseline.new_tokens"]


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_cases_are_flat_and_tell_themselves_apart(kind: str) -> None:
    cases = KINDS[kind].example().cases()
    assert len({case.key for case in cases}) == len(cases)
    for case in cases:
        assert all(value is None or isinstance(value, str | int | float) for value in case.coordinates.values())
        assert json.loads(json.dumps(case.coordinates)) == case.coordinates


class TestModels:
    def test_a_whole_number_is_the_same_written_with_a_point(self) -> None:
        specs = [validated({"kind": "benchmark", "gradient_clip_norm": norm}) for norm in (1, 1.0)]
        assert specs[0].case().key == specs[1].case().key

    def test_a_new_training_field_keeps_old_keys(self) -> None:
        """Keys that were stored then."""
        for fields, key in (
            ({"activation_checkpointing": True}, "cbeea7972a0ca9ca85ee"),
            ({"kind": "ddp", "strategy": "torch_fsdp", "compile": True}, "bc9eb7718a7274b1f10e"),
        ):
            assert validated({"kind": "benchmark", **fields}).case().key == key

    def test_all_blocks_may_be_counted_or_left_out(self) -> None:
        small = {"kind": "benchmark", "activation_checkpointing": True}
        assert validated(small).case().key == validated({**small, "checkpoint_layers": 12}).case().key


class TestGrids:
    @pytest.mark.parametrize("kind", [kind for kind in PLAIN_KINDS if KINDS[kind].axes])
    def test_a_cell_has_the_case_of_a_job_with_that_cell_alone(self, kind: str, rng: random.Random) -> None:
        lists = {
            "attention": {"implementations": ["eager", "cpu_flash", "cpu_blocked"], "br": [16, 32], "bc": [8, 64]},
            "kernel": {"rows": [8, 16], "columns": [4, 32]},
            "ceiling": {"matrix_size": 64},
            "collective": {"size_mb": [0.5, 1], "dtypes": ["fp32", "bf16"]},
            "mixed_precision": {"additions": 10},
        }.get(kind, {})
        spec = validated({"kind": kind, **lists})
        fields = spec.model_dump(mode="json")
        cells = list(spec.cells())
        for cell in rng.sample(cells, min(len(cells), 12)):
            coordinates = cell.coordinates()
            single = {f: [coordinates[n]] if coordinates[n] is not None else fields[f] for f, n in spec.axes.items()}
            found = [case for case in validated({**fields, **single}).cases() if case.key == spec.case(cell).key]
            assert [case.coordinates for case in found] == [spec.case(cell).coordinates]

    @pytest.mark.parametrize("name", sorted(BLOCK_SIZES))
    def test_default_block_sizes_may_be_spelled_out(self, name: str) -> None:
        plain = {"kind": "attention", "implementations": [name], "sequence_lengths": [64]}
        (own,) = validated(plain).cases()
        (spelled,) = validated({**plain, **{axis: [size] for axis, size in BLOCK_SIZES[name].items()}}).cases()
        assert (own.key, own.coordinates) == (spelled.key, spelled.coordinates)
        assert BLOCK_SIZES[name].items() <= own.coordinates.items()

    def test_a_copy_has_no_matrices_and_a_product_nothing_to_copy(self) -> None:
        copy, product = validated({"kind": "ceiling", "dtypes": ["fp32"]}).cases()
        sized_copy, same_product = validated({"kind": "ceiling", "dtypes": ["fp32"], "copy_mib": 1}).cases()
        same_copy, sized_product = validated({"kind": "ceiling", "dtypes": ["fp32"], "matrix_size": 64}).cases()
        assert copy.key == same_copy.key != sized_copy.key
        assert product.key == same_product.key != sized_product.key

    def test_the_order_of_a_list_changes_no_case(self) -> None:
        grid = {"kind": "kernel", "rows": [8, 16], "columns": [4, 32]}
        assert set(keys(validated(grid))) == set(keys(validated({**grid, "rows": [16, 8], "columns": [32, 4]})))


def test_true_is_not_one() -> None:
    """Python takes them for equal, and JSON does not."""
    at_default, at_true = (Case("k", {"size": 8, "count": count}, added={"count": 1}) for count in (1, True))
    assert at_default.key == Case("k", {"size": 8}).key != at_true.key


def test_the_hash_is_of_sorted_plain_json() -> None:
    case = Case("kind", {"b": 1.5, "a": "ü", "c": None, "d": True})
    assert case.canonical == '["kind",{"a":"\\u00fc","b":1.5,"d":true}]'
    assert (case.key, len(case.key)) == (Case("kind", {"d": True, "a": "ü", "b": 1.5}).key, 20)
    assert case.key != Case("other", case.identity).key
    with pytest.raises(ValueError, match="Out of range"):
        _ = Case("kind", {"a": float("nan")}).key


# Results of all versions meet by these keys, and rows that are stored cannot be mended: a key that changes here cuts
# users off from everything that they have measured. A new field of a kind goes into the class's `added`, with the
# default that it came with, and these stay.
GOLDEN = {
    "attention": "1a283e9398f4c2a98d17",
    "benchmark": "2314970cbc53b41b3573",
    "ceiling": "405ca23d0d3abc8a0fa9",
    "collective": "9f7772b215aab4ffde71",
    "compare": "f6b44352378eb0e8d913",
    "ddp": "375f0c8c8622aa2d7e63",
    "diagnosis": "4b6701a7423fcea8e13b",
    "estimate": "ccb8f0132d021d5a03b7",
    "kernel": "605fbd18498c1e7e7ec3",
    "memory": "c77fab7ef6cd97ff1313",
    "mixed_precision": "bf2ae7e3b978032b951c",
    "profile": "934e86c8acabb6733da7",
    "script": "4ce298a68d1ec28f516e",
}
"""A hash of the keys of each kind's example. A new kind's is added here."""


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_keys_of_examples_never_change(kind: str) -> None:
    found = keys(KINDS[kind].example())
    hashed = hashlib.sha256(" ".join(found).encode()).hexdigest()[:20]
    assert hashed == GOLDEN.get(kind), f"a new kind: add {hashed!r} to GOLDEN"


def test_an_edited_file_is_the_same_case() -> None:
    """Its hash and where it comes from are a version; another file, or another function, is another case."""

    def key(**changes: Any) -> str:
        return BenchmarkSpec(attention_code=CodeSpec(**{**CODE, "file": "a.py", **changes})).case().key

    assert key() == key(sha256="1" * 64) == key(revision={"label": "main", "dirty": True})
    assert len({key(), key(function="other"), key(file="b.py"), key(file=None)}) == 4


def test_fields_of_the_model_have_no_effect_beside_a_step_of_ones_own() -> None:
    spec = BenchmarkSpec(step_code=CodeSpec(**CODE), arguments={"batch_size": 8}, context_length=128, mode="forward")
    assert spec.without_effect() == ["context_length", "mode"]
    used = {name for name, value in spec.case().identity.items() if value is not None}
    assert used == {"step_code.function", "arguments.batch_size", "precision", "pacing"}
    assert spec.title("context 128") == f"{spec.label()}, batch_size 8"


@pytest.mark.parametrize(
    ("kind", "fields", "words"),
    [
        ("benchmark", {"arguments": {"lr": 1}}, "choose step_code"),
        ("benchmark", {"step_code": CODE, "arguments": {"device": "cpu"}}, "the function gets the job's device"),
        ("benchmark", {"step_code": CODE, "arguments": {"no name": 1}}, "pattern"),
        ("benchmark", {"step_code": CODE, "arguments": {"lr": None}}, "valid"),
        ("benchmark", {"step_code": CODE, "code": CODE}, "make the model there, and leave this out"),
        ("benchmark", {"step_code": CODE, "compile": True}, "call torch.compile there, and leave this out"),
        ("profile", {"step_code": CODE, "phases": ["forward"]}, "leave it out"),
        ("ddp", {"step_code": CODE, "strategy": "flat"}, "does its own parallelism"),
    ],
)
def test_what_does_not_go_with_a_step_of_ones_own_is_refused(kind: str, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        validated({"kind": kind, **fields})


def test_a_step_of_ones_own_needs_no_strategy_of_ddp() -> None:
    spec = validated({"kind": "ddp", "step_code": CODE})
    assert spec.model_dump()["strategy"] == "none"
    case = spec.case()
    assert spec.summary()["strategy"] is case.coordinates["strategy"] is None, "it averages gradients itself"
    assert case.identity["strategy"] == "none", "as in keys of earlier results"
    assert validated(spec.model_dump(mode="json")) == spec


SIZES = {"size_mb"}
"""Axes of numbers that need not be whole."""


@pytest.mark.parametrize("kind", [kind for kind in PLAIN_KINDS if KINDS[kind].axes])
def test_a_job_without_results_has_the_coordinates_of_its_cases(kind: str) -> None:
    """In value and type: 1.0 beside 1 would be another row of a table, and another column of a heat map."""
    example = json.loads(KINDS[kind].example().model_dump_json())
    for at in range(3):
        fields = {name: values[at : at + 1] or values[:1] for name in KINDS[kind].axes if (values := example.get(name))}
        written = {name: [float(value) for value in values] for name, values in fields.items() if name in SIZES}
        for given in (fields, {**fields, **written}):
            spec = spec_adapter.validate_json(json.dumps({**example, **given}))
            overview = spec.overview()
            for case in spec.cases():
                for name, value in case.coordinates.items():
                    if name in KINDS[kind].axes.values() and value is not None:
                        assert (name, overview[name], type(overview[name])) == (name, value, type(value))
