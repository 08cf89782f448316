"""Completions for the Tab key, requested as bash and zsh do."""

from __future__ import annotations

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
        result = CliRunner().invoke(cli, [], prog_name="flopwatch", env={**asked, **environment})
        return result.stdout.split()

    return press


@pytest.mark.parametrize("command", ["submit", "sweep", "run", "jobs --kind", "specs", "pause --kind", "cancel --kind"])
def test_kinds(offered: Offer, command: str) -> None:
    assert offered(f"{command} be") == ["benchmark"]
    assert {"attention", "benchmark", "compare"} <= set(offered(f"{command} "))


@pytest.mark.parametrize(
    ("line", "offer"),
    [
        ("submit benchmark context", ["context_length="]),
        ("run benchmark prec", ["precision="]),
        ("sweep benchmark model.s", ["model.size="]),
        ("submit benchmark model.size=", ["tiny", "small", "medium", "large", "xl", "2.7b", "8b"]),
        ("submit benchmark model.size=t", ["tiny"]),
        ("submit benchmark model.size=tiny precision=b", ["bf16"]),
        ("submit benchmark compile=", ["true", "false"]),
        ("submit benchmark seed=", []),
        ("sweep benchmark precision=bf16,fp", ["bf16,fp32", "bf16,fp16", "bf16,fp8"]),
        ("submit attention dtypes=bf16,fp3", ["bf16,fp32"]),
        ("submit compare candidate.prec", ["candidate.precision="]),
        ("submit benchmark --preset x", ["xl"]),
        ("submit attention --preset lea", ["leaderboard"]),
        ("submit nothing x", []),
        ("show ", []),
    ],
)
def test_fields_values_and_presets(offered: Offer, line: str, offer: list[str]) -> None:
    assert offered(line) == offer


def test_zsh_keeps_the_key_with_its_value(offered: Offer) -> None:
    asked = {"_FLOPWATCH_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": "flopwatch submit benchmark precision=bf"}
    assert '"precision=bf16"' in offered("", **asked)[-1]
