"""Completions for the Tab key, requested as bash and zsh do."""

from collections.abc import Callable
from typing import Any

import pytest
from typer.testing import CliRunner

from app.cli.commands import cli

Offer = Callable[..., list[str]]


@pytest.fixture
def offered(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Offer:
    """Press Tab at the end of a line, in bash, where "=" is a word of its own."""
    monkeypatch.setenv("FLOPWATCH_DATA_DIR", str(tmp_path))
    monkeypatch.setenv("FLOPWATCH_URL", "http://127.0.0.1:1")

    def press(line: str, **environment: str) -> list[str]:
        words = ["flopwatch", *line.replace("=", " = ").split(" ")]
        words = [word for word in words[:-1] if word] + words[-1:]
        if line.endswith("="):
            words = words[:-1]
        asked = {
            "_FLOPWATCH_COMPLETE": "complete_bash",
            "COMP_WORDS": " ".join(words),
            "COMP_CWORD": str(len(words) - 1),
        }
        return CliRunner().invoke(cli, [], prog_name="flopwatch", env={**asked, **environment}).stdout.split()

    return press


@pytest.mark.parametrize("command", ["submit", "jobs --kind"])
def test_kinds(offered: Offer, command: str) -> None:
    assert offered(f"{command} be") == ["benchmark"]
    assert {"attention", "benchmark", "compare"} <= set(offered(f"{command} "))


@pytest.mark.parametrize(
    ("line", "offer"),
    [
        ("run benchmark prec", ["precision="]),
        ("sweep benchmark model.s", ["model.size="]),
        ("submit benchmark model.size=tiny precision=b", ["bf16"]),
        ("submit benchmark compile=", ["true", "false"]),
        ("sweep benchmark precision=bf16,fp", ["bf16,fp32", "bf16,fp16", "bf16,fp8"]),
        ("submit compare candidate.prec", ["candidate.precision="]),
        ("submit attention --preset lea", ["leaderboard"]),
        ("submit nothing x", []),
        ("jobs --state q", ["queued"]),
        ("show ", []),
    ],
)
def test_fields_values_and_presets_without_a_server(offered: Offer, line: str, offer: list[str]) -> None:
    assert offered(line) == offer


def test_zsh_keeps_the_key_with_its_value(offered: Offer) -> None:
    asked = {"_FLOPWATCH_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": "flopwatch submit benchmark precision=bf"}
    assert '"precision=bf16"' in offered("", **asked)[-1]


def test_files_of_a_job(offered: Offer, site: Any) -> None:
    job = site.run(artifacts=[site.stored(b"content")])
    assert offered(f"download {job} t", FLOPWATCH_URL=site.url) == ["trace.json.gz"]


def test_ids_and_names_of_the_server(offered: Offer, site: Any) -> None:
    site.worker.register()
    job = site.submit()
    sweep = site.http.post("/sweeps", json={"base": {"kind": "benchmark"}, "grid": {"seed": [1, 2]}}).json()
    here = {"FLOPWATCH_URL": site.url}
    assert str(job["id"]) in offered("show ", **here)
    assert offered("table --sweep ", **here) == [str(sweep["id"])]
    assert offered(f"rerun {job['id']} batch", **here) == ["batch_size="]
    assert offered("submit benchmark attention=", **here) == ["eager"], "what workers have registered"
