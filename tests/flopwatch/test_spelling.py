"""The commands that equal a request give the same request."""

import json
import shlex
from typing import Any

import pytest

from app.cli.arguments import list_fields, parse_spec, parse_sweep
from app.presets import DEMO_SWEEPS
from app.specs import KINDS
from flopwatch.spelling import command, curl, sweep_fields

ATTENTION = {
    "kind": "attention",
    "implementations": ["eager", "tiled"],
    "head_dims": [64],
    "causal": [True, False],
    "warmup_steps": None,
}
MODEL = {"kind": "benchmark", "model": {"size": "2.7b", "d_model": 512}, "compile": False, "gradient_clip_norm": 0.5}


@pytest.mark.parametrize("spec", [ATTENTION, MODEL], ids=lambda spec: spec["kind"])
def test_the_command_of_a_job_is_read_as_its_spec(spec: dict[str, Any]) -> None:
    program, verb, kind, *pairs = shlex.split(command({"spec": spec}))
    assert (program, verb) == ("flopwatch", "submit")
    assert parse_spec(kind, pairs, lists=list_fields(KINDS[kind].model_json_schema())) == spec


@pytest.mark.parametrize(
    ("base", "grid"),
    [
        *((demo["base"], demo["grid"]) for demo in DEMO_SWEEPS.values()),
        (ATTENTION | {"head_dims": [16, 32]}, {"sequence_lengths": [[64], [128, 256]], "batch_size": [1, 2]}),
    ],
)
def test_the_command_of_a_sweep_is_read_as_its_base_and_grid(base: dict[str, Any], grid: dict[str, Any]) -> None:
    lists = list_fields(KINDS[base["kind"]].model_json_schema())
    assert parse_sweep(base["kind"], sweep_fields(base, grid), lists=lists) == (base, grid)


FILE = {"sha256": "0" * 64, "function": "make", "file": "my_train.py", "revision": None}


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"kind": "ddp", "step_code": FILE, "arguments": {"rows": 3}}, "ddp arguments.rows=3 --step my_train.py:make"),
        ({"kind": "benchmark", "code": FILE}, "benchmark --model my_train.py:make"),
        ({"kind": "benchmark", "attention_code": FILE}, "benchmark --implementation my_train.py:make"),
        ({"kind": "kernel", "code": FILE}, "kernel --implementation my_train.py:make"),
        (
            {"kind": "compare", "baseline": {"kind": "ddp"}, "candidate": {"kind": "ddp", "code": FILE}},
            "compare baseline.kind=ddp candidate.kind=ddp --model my_train.py:make",
        ),
    ],
)
def test_a_file_is_sent_by_its_option(spec: dict[str, Any], words: str) -> None:
    assert command({"spec": spec}) == f"flopwatch submit {words}"


def test_a_script_is_sent_by_run_script() -> None:
    spec = {"kind": "script", "script_code": FILE, "arguments": "--name 'a b'", "device": "cpu"}
    assert command({"spec": spec, "priority": 1}) == (
        "flopwatch run-script my_train.py --device=cpu --priority=1 -- --name 'a b'"
    )


def test_options_and_quotes() -> None:
    body = {"spec": {"kind": "benchmark"}, "name": "a b", "labels": {"k": "it's"}, "priority": -3, "timeout_s": 60}
    words = shlex.split(command(body))
    assert words[3:] == ["--name", "a b", "--label", "k=it's", "--priority=-3", "--timeout-s", "60"]
    program, flag, text, url = shlex.split(curl(body, "http://host:8000/"))
    assert (program, flag, url) == ("curl", "--json", "http://host:8000/jobs")
    assert json.loads(text) == body
