"""Commands that are or start processes."""

import json
import os
import re
import signal
import socket
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from typer.testing import CliRunner

from app.cli.commands import cli
from app.errors import CannotRunHere
from app.server.access import lock_folder, refuse_open_access, refuse_second_server
from app.server.process import reachable
from app.settings import Settings
from app.store.database.engine import open_database
from app.store.queue.lease import with_agreed_lease
from app.store.queue.registration import Registration
from app.store.reading.queries import Reading
from app.store.tokens import Tokens
from tests.app.conftest import TINY
from tests.disks import small_disk
from tests.forked import PLUGINS, PROJECT, ForkedService
from tools.waiting import wait_until

INSECURE = {"FLOPWATCH_INSECURE": "true"}
EVERYWHERE = {"FLOPWATCH_HOST": "0.0.0.0", "FLOPWATCH_PORT": "0"}


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Callable[..., ForkedService]]:
    """Start a server whose start is not what is tested; arguments are environment of the process."""
    with ExitStack() as stack:

        def start(**settings: str) -> ForkedService:
            running = stack.enter_context(ForkedService(tmp_path, {"PYTHONPATH": str(PLUGINS), **settings}))
            running.start_server()
            return running

        yield start


def listening_url(process: subprocess.Popen[str]) -> str:
    for line in process.stdout:
        if found := re.search(r"listening on (http://\S+)", line):
            return found[1]
    raise AssertionError("the server did not start: " + process.communicate()[1])


def stopped_while_followed(server: subprocess.Popen[Any], number: signal.Signals, events: str) -> None:
    """Let the server end by a signal while a client follows a job: the stream ends by itself."""
    stream = {"Accept": "text/event-stream"}
    with httpx.stream("GET", events, headers=stream, trust_env=False) as response:
        lines = response.iter_lines()
        next(lines)
        server.send_signal(number)
        list(lines)
    assert server.wait(60) in (-number, 130)


def test_serve(start: Any, service: Any, tmp_path: Path) -> None:
    """Two servers after each other, on one database, which end quietly. The next command finds them by their data
    folder."""
    data_dir = tmp_path / "data"
    server = start("serve", "--port", "0", "--data-dir", str(data_dir))
    url = listening_url(server)
    assert httpx.get(url + "/readyz", trust_env=False).status_code == 200
    said = json.loads((data_dir / "server.json").read_text())
    assert {"url": url, "pid": server.pid}.items() <= said.items()
    job = httpx.post(url + "/jobs", json={"spec": TINY}, trust_env=False).json()
    environment = {"FLOPWATCH_DATA_DIR": str(data_dir), "FLOPWATCH_PORT": "1"}
    jobs = CliRunner().invoke(cli, ["jobs"], env=environment)
    assert jobs.exit_code == 0, jobs.stderr
    stopped_while_followed(server, signal.SIGTERM, f"{url}/jobs/{job['id']}/events")
    assert "Traceback" not in server.communicate()[1]
    assert not (data_dir / "server.json").exists()
    assert "Cannot talk to http://127.0.0.1:1" in CliRunner().invoke(cli, ["jobs"], env=environment).stderr
    again = service()
    followed = f"{again.url}/jobs/{job['id']}"
    assert httpx.get(followed, trust_env=False).json() == job
    stopped_while_followed(again.server, signal.SIGINT, f"{followed}/events")
    assert "Traceback" not in again.logs()
    with closing(open_database(Settings(data_dir=data_dir))) as database:
        found, _version = Reading(database).job(job["id"])
    assert (found["id"], found["state"]) == (job["id"], "queued")


@pytest.mark.parametrize("command", ["up", "serve"])
def test_a_second_server_of_a_folder_is_refused(service: Any, tmp_path: Path, command: str) -> None:
    first = service()
    folder, left = tmp_path / "data", (tmp_path / "data" / "server.json").read_text()
    again = CliRunner().invoke(cli, [command], env={"FLOPWATCH_PORT": "0", "FLOPWATCH_DATA_DIR": str(folder)})
    said = again.stderr
    assert (again.exit_code, len(said.splitlines())) == (1, 1), said
    assert f"A server runs on {folder} already: {first.url}. " in said
    assert "--data-dir" in said
    assert (folder / "server.json").read_text() == left
    first.server.kill()
    first.server.wait()
    settings = Settings(data_dir=folder)
    refuse_second_server(settings)
    held = lock_folder(settings)
    assert held is not None
    with pytest.raises(CannotRunHere, match="already"):
        refuse_second_server(settings)
    os.close(held)


def test_serve_says_why_it_cannot(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for command in ("serve", "up"):
            said = refusal(tmp_path, command, FLOPWATCH_PORT=str(port))
            assert f"port {port}: " in said
            assert "address already in use" in said
            assert "--port" in said
    for command in ("serve", "up"):
        assert "cannot assign requested address" in refusal(tmp_path, command, FLOPWATCH_HOST="192.0.2.1", **INSECURE)
        result = CliRunner().invoke(cli, [command, "--port", "99999"], env={"FLOPWATCH_DATA_DIR": str(tmp_path)})
        assert result.exit_code == 2
        assert "65535" in result.stderr


@pytest.mark.parametrize(
    ("listens", "reached"),
    [
        ("http://0.0.0.0:8000", "http://127.0.0.1:8000"),
        ("http://[::]:8000", "http://[::1]:8000"),
        ("http://10.0.0.5:8000", "http://10.0.0.5:8000"),
    ],
)
def test_the_address_is_one_that_clients_reach(listens: str, reached: str) -> None:
    assert reachable(listens) == reached


def test_backup_while_running(service: Any, tmp_path: Path) -> None:
    url = service().url
    jobs = [httpx.post(url + "/jobs", json={"spec": TINY}, trust_env=False).json()["id"] for _ in range(20)]
    copy = tmp_path / "copy.sqlite3"
    environment = {"FLOPWATCH_DATA_DIR": str(tmp_path / "data")}
    backup = CliRunner().invoke(cli, ["backup", str(copy)], env=environment)
    assert backup.exit_code == 0, backup.stderr
    assert "artifacts" in backup.stdout
    database = sqlite3.connect(copy)
    assert [row[0] for row in database.execute("select id from job order by id")] == jobs
    assert database.execute("pragma integrity_check").fetchone() == ("ok",)
    database.close()
    again = CliRunner().invoke(cli, ["backup", str(copy)], env=environment)
    assert "never overwritten" in again.stderr
    assert again.exit_code == 2


def test_backup_to_a_full_disk_says_so(tmp_path: Path) -> None:
    open_database(Settings(data_dir=tmp_path / "data")).close()
    with small_disk(tmp_path / "small", "size=64k") as small:
        full = CliRunner().invoke(
            cli, ["backup", str(small / "copy")], env={"FLOPWATCH_DATA_DIR": str(tmp_path / "data")}
        )
        assert (full.exit_code, list(small.iterdir())) == (1, [])
    assert full.stderr.endswith("database or disk is full\n")


@pytest.mark.parametrize("wrong", ["source", "target"])
def test_backup_says_why_it_cannot_and_leaves_nothing(tmp_path: Path, wrong: str) -> None:
    data_dir = tmp_path / "data"
    if wrong == "target":
        open_database(Settings(data_dir=data_dir)).close()
    copy = tmp_path / ("none" if wrong == "target" else "") / "copy.sqlite3"
    backup = CliRunner().invoke(cli, ["backup", str(copy)], env={"FLOPWATCH_DATA_DIR": str(data_dir)})
    assert backup.exit_code == 1
    assert backup.stderr.startswith("error: ")
    assert len(backup.stderr.splitlines()) == 1
    assert not copy.exists()
    assert data_dir.exists() == (wrong == "target")


@pytest.mark.parametrize(
    ("command", "wrong", "error"),
    [
        ("up", {"FLOPWATCH_LEASE_S": "-1"}, "FLOPWATCH_LEASE_S: Input should be greater than 0"),
        ("serve", {"FLOPWATCH_LEASE_S": "-1"}, "FLOPWATCH_LEASE_S: Input should be greater than 0"),
        ("serve", {"FLOPWATCH_DATABASE_URL": "nonsense"}, "FLOPWATCH_DATABASE_URL"),
        ("jobs", {"FLOPWATCH_PORT": "many"}, "FLOPWATCH_PORT: 'many' is no number of a port"),
    ],
)
def test_an_invalid_setting_is_named(tmp_path: Path, command: str, wrong: dict[str, str], error: str) -> None:
    printed = refusal(tmp_path, command, **wrong, FLOPWATCH_API_TOKEN="secret")
    assert error in printed
    assert "secret" not in printed


def test_a_process_with_another_lease_does_not_start(start: Any, tmp_path: Path) -> None:
    data = {"FLOPWATCH_DATA_DIR": str(tmp_path / "data"), "FLOPWATCH_PORT": "0"}

    with closing(open_database(Settings(data_dir=tmp_path / "data"))) as database:
        with_agreed_lease(database, Settings())
        Registration(database).register_worker("other-host-1", "other-host", 1, [], [], [], {})
    for command in ("serve", "up"):
        result = CliRunner().invoke(cli, [command], env={**data, "FLOPWATCH_LEASE_S": "3"})
        assert result.exit_code == 1
        for words in ("FLOPWATCH_LEASE_S is 3", "30 seconds", "stop other-host-1 first"):
            assert words in result.stderr
        assert len(result.stderr.splitlines()) == 1
    worker = start("worker", **data, FLOPWATCH_LEASE_S="3")
    _, err = worker.communicate(timeout=60)
    assert worker.returncode == 1
    assert "stop other-host-1 first" in err
    assert "Traceback" not in err


def refusal(tmp_path: Path, command: str, **settings: str) -> str:
    """Return the one line that a command prints that does not start; it must leave no files."""
    environment = {"FLOPWATCH_DATA_DIR": str(tmp_path / "data"), "FLOPWATCH_PORT": "0", **settings}
    result = CliRunner().invoke(cli, [command], env=environment)
    assert (result.exit_code, len(result.stderr.splitlines())) == (1, 1)
    assert not (tmp_path / "data").exists()
    return result.stderr


@pytest.mark.parametrize("command", ["up", "serve", "jobs"])
@pytest.mark.parametrize("token", ["", " ", "token\n"])
def test_an_empty_token_is_refused(tmp_path: Path, command: str, token: str) -> None:
    assert "FLOPWATCH_API_TOKEN: " in refusal(tmp_path, command, FLOPWATCH_API_TOKEN=token)


@pytest.mark.parametrize("command", ["up", "serve"])
@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "gpu-box"])
def test_an_open_server_needs_a_token_or_insecure(tmp_path: Path, command: str, host: str) -> None:
    said = refusal(tmp_path, command, FLOPWATCH_HOST=host)
    assert "FLOPWATCH_API_TOKEN" in said
    assert "--insecure" in said


def test_tokens_in_the_database_close_a_server(tmp_path: Path, service: Any) -> None:
    with closing(open_database(Settings(data_dir=tmp_path / "data"))) as database:
        refused = CliRunner().invoke(cli, ["serve"], env={**EVERYWHERE, "FLOPWATCH_DATA_DIR": str(tmp_path / "data")})
        assert (refused.exit_code, "Without a token" in refused.stderr) == (1, True)
        Tokens(database).create("ada", "admin", None)
    port = service(**EVERYWHERE).url.rpartition(":")[2]
    assert httpx.get(f"http://127.0.0.1:{port}/jobs", trust_env=False).status_code == 401


def test_open_access_when_that_is_meant(service: Any) -> None:
    port = service(FLOPWATCH_HOST="0.0.0.0", **INSECURE).url.rpartition(":")[2]
    assert httpx.get(f"http://127.0.0.1:{port}/jobs", trust_env=False).status_code == 200


def test_a_token_of_the_settings_closes_a_server() -> None:
    refuse_open_access(Settings(host="0.0.0.0", api_token="secret"), None)


def all_of(up: subprocess.Popen[str]) -> list[psutil.Process]:
    """`up` and what it has started."""
    processes = [psutil.Process(up.pid), *psutil.Process(up.pid).children(recursive=True)]
    assert len(processes) >= 3
    return processes


def missing_file_message(processes: list[psutil.Process], url: str) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=20)
    with pytest.raises(httpx.TransportError):
        httpx.get(url + "/healthz", trust_env=False)
    return alive == []


@pytest.mark.long
def test_nothing_outlives_an_up_that_is_killed(start: Any, tmp_path: Path) -> None:
    up = start("up", "--port", "0", FLOPWATCH_DATA_DIR=tmp_path, FLOPWATCH_GRACE_S="2", WARM_PARENT="empty")
    url = listening_url(up)
    wait_until(lambda: httpx.get(url + "/workers", trust_env=False).json()["data"], "the worker", 60)
    processes = all_of(up)
    up.kill()
    assert up.wait(40) == -signal.SIGKILL
    assert missing_file_message(processes, url)


def modes_below(folder: Path) -> dict[Path, int]:
    """Permissions of a folder and all below it, without what is removed meanwhile."""
    found = {}
    for parent, _folders, files in os.walk(folder):  # passes over folders that have gone
        for name in (".", *files):
            with suppress(FileNotFoundError):
                found[Path(parent, name)] = Path(parent, name).stat().st_mode
    return found


def test_up_hides_the_token_and_hurries_at_a_second_signal(start: Any, tmp_path: Path) -> None:
    environment = {
        "PYTHONPATH": os.pathsep.join([str(PLUGINS / "plain_kind"), str(PROJECT), str(PLUGINS)]),
        "MISBEHAVE_FOLDER": tmp_path,
        "TMPDIR": tmp_path,
        "WARM_PARENT": "empty",
    }
    settings = {"FLOPWATCH_DATA_DIR": tmp_path / "data", "FLOPWATCH_GRACE_S": "300", "FLOPWATCH_API_TOKEN": "hunter2"}
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as `nohup` does
    up = start("up", "--port", "0", **settings, **environment)
    signal.signal(signal.SIGHUP, before)
    url = listening_url(up)
    ignored = Path(f"/proc/{up.pid}/status").read_text().partition("SigIgn:")[2].split()[0]
    assert int(ignored, 16) & 1, "the end of its terminal does not end it"
    with httpx.Client(base_url=url, headers={"Authorization": "Bearer hunter2"}, trust_env=False) as client:
        curious, gated = (
            client.post("/jobs", json={"spec": {"kind": "plain", "behaviour": behaviour}}).raise_for_status().json()
            for behaviour in ("curious", "gated")
        )
        wait_until((tmp_path / "started").exists, "the second job's start", 90)
        assert client.get(f"/jobs/{curious['id']}").json()["state"] == "succeeded"
        found = json.loads((tmp_path / "variables").read_text().splitlines()[0])
        assert f"MISBEHAVE_FOLDER={tmp_path}" in found
        # Its parents up to the worker are among those that it looked at.
        assert f"FLOPWATCH_DATA_DIR={tmp_path / 'data'}" in found
        assert not [text for text in found if "hunter2" in text]
        # And nobody else reads what server, worker and job have written.
        modes = modes_below(tmp_path / "data")
        assert len(modes) > 5
        assert not {path: oct(mode) for path, mode in modes.items() if mode & 0o077}
        processes = all_of(up)
        up.send_signal(signal.SIGTERM)
        wait_until(lambda: client.get("/workers").json()["data"][0]["state"] == "draining", "draining", 30)
    up.send_signal(signal.SIGTERM)
    assert up.wait(60) == 0
    assert missing_file_message(processes, url)
    with closing(open_database(Settings(data_dir=tmp_path / "data"))) as database:
        job, _version = Reading(database).job(gated["id"])
    assert (job["state"], job["attempt"]) == ("queued", 0)


@pytest.mark.long
def test_up_ends_when_a_child_does(start: Any, tmp_path: Path) -> None:
    settings = {"FLOPWATCH_DATA_DIR": tmp_path, "FLOPWATCH_DATADIR": tmp_path, "FLOPWATCH_GRACE_S": "2"}
    up = start("up", "--port", "0", **settings, WARM_PARENT="empty")
    assert httpx.get(listening_url(up) + "/healthz", trust_env=False).status_code == 200

    def server() -> psutil.Process | None:
        children = psutil.Process(up.pid).children()
        return next((child for child in children if "serve" in child.cmdline()), None)

    wait_until(server, "the server's process").kill()
    _, err = up.communicate(timeout=40)
    assert up.returncode == 1
    assert "the server was killed by signal 9 (Killed)" in err
    misspelt = "warning: FLOPWATCH_DATADIR is no setting, and nothing reads it: did you mean FLOPWATCH_DATA_DIR?"
    assert err.count(misspelt) == 1, "not once more by each process that `up` starts"


def test_worker_and_run_keep_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A service manager's signals, or a profiler, must reach the worker itself. `run` hands it the whole spec."""
    spec = {"kind": "benchmark", "model": {"size": "tiny"}}
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    deeper = {"kind": "benchmark", "model": {"size": "tiny", "num_layers": 1}, "batch_size": 4}
    monkeypatch.chdir(tmp_path)
    replaced = []

    def execute(_path: str, words: list[str]) -> None:
        own = words[words.index("workers") + 1 :]
        replaced.append([json.loads(Path(word).read_text()) if word.startswith("/dev/fd/") else word for word in own])
        raise SystemExit

    monkeypatch.setattr(os, "execv", execute)
    for arguments, expected in [
        (["worker"], ["agent"]),
        (["run", "spec.json", "seed=7"], ["run", {**spec, "seed": 7}, "--output", "."]),
        (["run", "-", "--json", "--output", "x"], ["run", spec, "--output", "x", "--json"]),
        (["run", "benchmark", "--preset", "tiny", "model.num_layers=1"], ["run", deeper, "--output", "."]),
    ]:
        CliRunner().invoke(cli, arguments, input=json.dumps(spec))
        assert replaced.pop() == expected


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["benchmark", "context_lenght=8"], "/context_lenght: Unknown field; did you mean context_length?"),
        (["-"], "/kind: kind is missing; known kinds: attention, benchmark"),
        (["none.json"], "none.json: No such file"),
        (["compare", "baseline.kind=benchmark", "baseline.sed=1"], "/baseline/sed: Unknown field; did you mean seed?"),
    ],
)
def test_run_explains_a_wrong_spec_as_the_server_does(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(cli, ["run", *arguments], input="{}", env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert words in result.stderr
