"""Tables of commands on a terminal, and in a pipe."""

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from typing import Any

import pytest
from rich.cells import cell_len

from app.cli import layout

from .conftest import environment

HASH = "0123456789abcdef" * 4
KERNEL = f"void at::native::vectorized_elementwise_kernel<4, {'at::native::Functor<float>, ' * 20}>(int)"


SEPARATOR = "\x1e"
RUN = f"""
import sys
from app.cli.commands import cli
for command in {{commands!r}}:
    cli(command, standalone_mode=False)
    sys.stdout.write({SEPARATOR!r})
"""


@pytest.fixture
def on_terminal(site: Any) -> Callable[..., list[str]]:
    """Run commands, one after the other, on a terminal of 80 columns; returns what each shows there."""

    def run(*commands: tuple[str, ...]) -> list[str]:
        ours, terminals = pty.openpty()
        fcntl.ioctl(terminals, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 80, 0, 0))
        settings = {name: value for name, value in environment(FLOPWATCH_URL=site.url).items() if name != "COLUMNS"}
        process = subprocess.Popen(
            [sys.executable, "-c", RUN.format(commands=commands)],
            env=settings,
            stdout=terminals,
            stderr=subprocess.PIPE,
        )
        os.close(terminals)
        shown = b""
        try:
            while part := os.read(ours, 65536):
                shown += part
        except OSError:
            pass  # the end of a terminal
        finally:
            os.close(ours)
        _, errors = process.communicate(timeout=30)
        assert process.returncode == 0, errors.decode()
        return shown.decode().replace("\r\n", "\n").split(SEPARATOR)[:-1]

    return run


@pytest.fixture
def results(site: Any, measured: Any, reported: Any) -> tuple[str, str, str, str]:
    """The ids of two profiles and two benchmarks."""
    labels = {"run": "of a cell that is long enough to be wrapped", "by": "layout"}
    columns = {"name": "string", "class": "string", "total_ms": "number", "calls": "number"}
    ids = []
    for factor in (1.0, 1.5):
        claim = site.worker.claim_job(site.submit(priority=90, labels={**labels, "code": HASH, "f": str(factor)})["id"])
        kernels = [[KERNEL, "matmul", 2.0 * factor, 4.0], ["softmax", "softmax", 1.0, 1.0]]
        table = reported("kernels-forward", kernels, **columns)
        site.worker.finish(claim, measurements=[measured("step_ms", 1.0)], tables=[table])
        ids.append(str(claim.job_id))
    for factor in (1.0, 1.5):
        claim = site.worker.claim_job(site.submit(priority=90, labels=labels, name="a job with a name " * 5)["id"])
        rows = [
            measured(metric, factor * value, unit_index=unit, model="tiny", context_length=length)
            for metric in ("forward_ms", "backward_ms", "optimizer_ms", "step_ms", "tokens_per_s", "peak_memory_mib")
            for length in (256, 512)
            for unit, value in enumerate((100.0, 101.5, 99.25, 100.75))
        ]
        site.worker.finish(claim, measurements=rows)
        ids.append(str(claim.job_id))
    return tuple(ids)


def test_every_table_fits_a_terminal_of_80_columns(site, flopwatch, on_terminal, results) -> None:
    site.worker.register()
    flopwatch("sweep", "benchmark", "model.size=tiny", "seed=1,2", "--name", "of a grid " * 10)
    flopwatch("sweep", "benchmark", "model.size=tiny", "context_length=8,16", "batch_size=1,2", "precision=fp32,bf16")
    profile, other_profile, one, other = results
    assert flopwatch("baseline", "set", "kept", one).returncode == 0
    commands = [
        ("jobs",),
        ("table", "--job", one, "--job", other, "--columns", "all"),
        ("table", "--job", profile, "--name", "kernels-forward"),
        ("compare", one, other),
        ("compare", profile, other_profile),
        ("specs",),
        ("specs", "benchmark"),
        ("specs", "attention"),
        ("specs", "compare"),
        ("sweeps",),
        ("workers",),
        ("baseline", "list"),
        ("baseline", "show", "kept"),
    ]
    widest = {}
    for command, shown in zip(commands, on_terminal(*commands), strict=True):
        assert shown.strip()
        widest[" ".join(command)] = max(map(len, shown.splitlines()))
    assert {command: width for command, width in widest.items() if width > 80} == {}


@pytest.fixture
def _of_60(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")


@pytest.mark.usefixtures("_of_60")
class TestTable:
    def test_columns_that_do_not_fit_follow_with_the_rows_keys(self) -> None:
        head = ["model", "length", *(f"metric_{n}" for n in range(6))]
        rows = [["tiny", length, *(f"{length}.{n:09}" for n in range(6))] for length in ("8", "16")]
        first, second, third, *rest = layout.table(head, rows, rights={1, 2}).split("\n\n")
        assert (first, rest) == ("model: tiny", [])
        assert second.splitlines()[0].split()[0] == third.splitlines()[0].split()[0] == "length"
        texts = {text for part in (second, third) for line in part.splitlines()[-2:] for text in line.split()}
        assert texts == {text for row in rows for text in row[1:]}

    def test_long_texts_are_wrapped_between_words(self) -> None:
        text = layout.table(["id", "what"], [["1", "some words " * 20], ["2", "one"]])
        assert max(map(len, text.splitlines())) <= 60
        assert " ".join(text.split()).count("some words") == 20

    @pytest.mark.parametrize("columns", [60, 40, 24, 16])
    def test_nothing_is_cropped(self, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("COLUMNS", str(columns))
        rows = [[f"forward_ms_of_the_largest_{at}", f"1.234{at}"] for at in range(2)]
        text = layout.table(["metric", "median"], rows, rights={1})
        assert max(map(len, text.splitlines())) <= columns
        assert {number for _, number in rows} < {*text.split()}
        names = [word for word in text.split() if word not in ("metric", "median", *(number for _, number in rows))]
        assert "".join(names) == "".join(name for name, _ in rows)

    def test_many_columns_that_identify_the_rows(self) -> None:
        """Six columns of 16 characters, which together identify the rows: they follow in parts."""
        rows = [[f"{at:04}{'x' * 8}{(number >> at) % 2:04}" for at in range(6)] for number in range(64)]
        text = layout.table([*"abcdef"], rows)
        assert max(map(len, text.splitlines())) <= 60
        assert set(text.split()) == {*"abcdef", *(value for row in rows for value in row)}

    def test_wide_characters_take_two_cells(self) -> None:
        rows = [[number, *(3 * ["模型" * 5])] for number in "12"]
        text = layout.table(["id", "name", "labels", "note"], [*rows, ["3", "a", "b", "c"]])
        assert max(map(cell_len, text.splitlines())) <= 60
        assert text.count("模型" * 5) == 6, "none is broken"

    def test_no_row(self) -> None:
        assert layout.table(["a", "b"], []).split() == ["a", "b"]
