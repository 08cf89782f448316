"""The Python client: its examples, its errors, its frames, its files, and the time it waits."""

import doctest
import json
import os
import re
import struct
import subprocess
import sys
import zlib
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from flopwatch import (
    ClientError,
    DownloadFailed,
    Flopwatch,
    InvalidArgument,
    Job,
    JobFailed,
    Refused,
    Unreachable,
    WaitTimeout,
    address,
    client,
    connection,
)
from flopwatch.own_code import OwnCode
from tests.builders import measured

ROOT = Path(__file__).parents[2]
TINY = {"kind": "benchmark", "model": {"size": "tiny"}}
EXAMPLES = [it for m in (client, connection) for it in doctest.DocTestFinder(recurse=True).find(m) if it.examples]


@pytest.fixture
def flopwatch(site: Any) -> Iterator[Flopwatch]:
    with Flopwatch(site.url) as connected:
        yield connected


def done(site: Any, flopwatch: Flopwatch, state: str = "succeeded", **results: Any) -> dict[str, Any]:
    """A job that a worker has just finished."""
    job = flopwatch.submit({**TINY, "context_length": 8}, labels={"made": "up"}, priority=50)
    site.worker.finish(site.worker.claim_job(job["id"]), state, log="a line of output\n", **results)
    return flopwatch.job(job)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda found: found.name.removeprefix("app."))
def test_examples_run(example, site, flopwatch, measured, tmp_path, monkeypatch, obedient_later) -> None:
    monkeypatch.setenv("FLOPWATCH_URL", site.url)
    measurements = [measured("forward_ms", 1.25, model="tiny", context_length=8)]
    job = done(site, flopwatch, measurements=measurements, artifacts=[site.stored(b"trace")])
    obedient_later()
    monkeypatch.setattr(client, "POLL_S", 0.02)
    example.globs = {**vars(connection), **vars(client), "flopwatch": flopwatch, "job": job, "folder": tmp_path / "f"}
    if "sweep" in "".join(step.source for step in example.examples):
        example.globs["sweep"] = flopwatch.wait_for_sweep(flopwatch.sweep(TINY, {"seed": [1, 2, 3]}))
    told: list[str] = []
    result = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(example, out=told.append)
    assert result.failed == 0, "".join(told)


def test_the_program_in_the_documents_runs(site, monkeypatch, tmp_path, obedient, capsys) -> None:
    """It runs against a server whose worker plays: what it asks for is right."""
    monkeypatch.setenv("FLOPWATCH_URL", site.url)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(client, "POLL_S", 0.02)
    page = ROOT / "docs" / "python-client.md"
    (program,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    exec(compile(program, page, "exec"), {})
    assert "forward_ms" in capsys.readouterr().out


class TestChecks:
    """Jobs against a baseline."""

    def test_no_jobs_are_refused_in_words(self, site: Any, flopwatch: Flopwatch, measured: Any) -> None:
        job = done(site, flopwatch, measurements=[measured("step_ms", 1.0, model="tiny")])
        flopwatch.set_baseline("checks", job=job)
        with pytest.raises(ClientError, match="There is no job to check: name some, or leave them out to run those"):
            flopwatch.check("checks", [])

    def test_labels_of_the_former_run_are_not_copied(self, site, flopwatch, measured, obedient_later) -> None:
        job = done(site, flopwatch, measurements=[measured("forward_ms", 1.0, model="tiny")])
        assert job["labels"] == {"made": "up"}
        flopwatch.set_baseline("checks", job=job)
        obedient_later()
        (again,) = flopwatch.check("checks", labels={"commit": "abc"})["jobs"]
        assert flopwatch.job(again)["labels"] == {"check": "checks", "commit": "abc"}
        (again,) = flopwatch.check("checks", labels={"check": "nightly"})["jobs"]
        assert flopwatch.job(again)["labels"] == {"check": "nightly"}, "the user's own stays"


class TestErrors:
    def test_a_refusal_has_the_servers_problem(self, flopwatch: Flopwatch) -> None:
        with pytest.raises(Refused) as caught:
            flopwatch.submit({**TINY, "context_lenght": 8, "batch_size": 0})
        refused = caught.value
        assert (refused.type, refused.code, refused.status) == (
            "urn:flopwatch:problem:invalid_request", "invalid_request", 422,
        )  # fmt: skip
        assert {error.pointer for error in refused.errors} == {"/spec/context_lenght", "/spec/batch_size"}
        assert (refused.pointer, refused.cure) == (refused.errors[0].pointer, refused.errors[0].detail)
        assert "did you mean context_length?" in str(refused)

    def test_a_problem_without_fields(self, flopwatch: Flopwatch) -> None:
        with pytest.raises(Refused) as caught:
            flopwatch.job(999_999)
        assert (caught.value.status, caught.value.pointer, caught.value.code) == (404, None, "not_found")
        assert caught.value.cure == "There is no job 999999."

    @pytest.mark.parametrize(
        ("url", "words"),
        [
            ("http://127.0.0.1:1", "flopwatch up"),
            ("127.0.0.1:1", r"Write http://127\.0\.0\.1:1 or https"),
            *((senseless, None) for senseless in ("no url", "ftp://127.0.0.1", "http://[::1")),
        ],
    )
    def test_no_server_at_the_address(self, url: str, words: str | None) -> None:
        with pytest.raises(Unreachable, match=words) as caught, Flopwatch(url) as nobody:
            nobody.list_jobs()
        assert ".." not in str(caught.value)

    @pytest.mark.parametrize(("folder", "lacks"), [("", "has no server's address"), ("missing", "missing is no")])
    def test_a_folder_that_knows_no_server_is_named(self, folder: str, lacks: str, tmp_path: Path, monkeypatch) -> None:
        monkeypatch.setenv("FLOPWATCH_PORT", "1")
        with pytest.raises(Unreachable, match=lacks), Flopwatch(data_dir=tmp_path / folder) as nobody:
            nobody.list_jobs()


class TestWaiting:
    def test_no_time_out_is_shorter_than_the_wait(self, flopwatch: Flopwatch, monkeypatch: pytest.MonkeyPatch) -> None:
        sent: list[httpx.Request] = []

        def send(request: httpx.Request, **_: Any) -> Any:
            sent.append(request)
            raise httpx.ConnectError("not sent")

        monkeypatch.setattr(flopwatch._http, "send", send)
        with pytest.raises(Unreachable):
            flopwatch.submit(TINY, wait_s=600)
        assert sent[0].headers["Prefer"] == "wait=60"
        assert sent[0].extensions["timeout"]["read"] > 60
        assert connection.READ_TIMEOUT_S > 60

    def test_progress_and_failure(self, flopwatch: Flopwatch, obedient: None) -> None:
        shown: list[tuple[int, int, str]] = []
        job = flopwatch.submit(TINY, name="fails")
        with pytest.raises(JobFailed, match="It broke") as caught:
            flopwatch.wait(job, show=lambda *progress: shown.append(progress))
        assert (1, 2, "measuring") in shown
        assert (caught.value.job["state"], caught.value.problem["code"]) == ("failed", "failed")
        assert flopwatch.wait(job["id"], check=False)["state"] == "failed"

    def test_it_ends_in_time(self, flopwatch: Flopwatch) -> None:
        job = flopwatch.submit({**TINY, "device": "cuda"})
        with pytest.raises(WaitTimeout, match=f"Job {job['id']} was not done after 0.2 s; it keeps running"):
            flopwatch.wait(job, timeout_s=0.2)
        with pytest.raises(TimeoutError):
            flopwatch.wait_for_sweep(flopwatch.sweep({**TINY, "device": "cuda"}, {"seed": [1]}), timeout_s=0.01)
        assert flopwatch.cancel(job)["state"] == "cancelled"

    def test_the_reason_why_a_job_or_a_sweep_waits_is_shown(self, flopwatch: Flopwatch) -> None:
        shown: list[str] = []

        def show(_done: int, _total: int, message: str) -> None:
            shown.append(message)

        job = flopwatch.submit(TINY)
        with pytest.raises(WaitTimeout):
            flopwatch.wait(job, timeout_s=0.2, show=show)
        assert shown == ["queued", f"job {job['id']} waits: {job['waiting']}"]
        sweep = flopwatch.sweep(TINY, {"seed": [1, 2]})
        with pytest.raises(WaitTimeout):
            flopwatch.wait_for_sweep(sweep, timeout_s=0.01, show=show)
        assert shown[-1] == f"0 running, 0 failed; waits: {job['waiting']}"
        flopwatch.cancel(job)
        flopwatch.cancel_sweep(sweep)

    def test_progress_is_a_bar_on_a_terminal_only(self, capsys, monkeypatch) -> None:
        with client.progress_bar() as show:
            show(1, 2, "measuring")
        assert capsys.readouterr() == ("", "")
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
        monkeypatch.setenv("TERM", "xterm")
        with client.progress_bar() as show:
            show(1, 2, "cell \x1b]0;title\x07")
        printed = capsys.readouterr().err
        assert "1/2" in printed
        assert "\x1b]0;" not in printed
        assert r"\x1b]0;title\x07" in printed


class TestSubmitting:
    def test_submit_wait_and_all_others_give_a_job(self, flopwatch: Flopwatch) -> None:
        job = flopwatch.submit(TINY, idempotency_key="typed")
        assert (job.id, job.kind, job.state, job.error, job.verdict) == (job["id"], "benchmark", "queued", None, None)
        assert (job.replayed, flopwatch.submit(TINY, idempotency_key="typed").replayed) == (False, True)
        flopwatch.cancel(job)
        ended = flopwatch.wait(job, check=False)
        assert (type(ended), ended.state, (ended.error or {})["code"]) == (Job, "cancelled", "cancelled")
        assert {type(one) for one in (flopwatch.job(job), flopwatch.rerun(job), job)} == {Job}

    def test_its_text_names_the_server_and_no_token(self, flopwatch: Flopwatch) -> None:
        assert repr(flopwatch) == f"Flopwatch('{flopwatch.url}')"

    def test_a_rerun_has_the_options_of_the_job_but_its_key(self, flopwatch: Flopwatch) -> None:
        named: Any = {"name": "n", "labels": {"a": "b"}, "priority": 3}
        job = flopwatch.submit(TINY, **named, timeout_s="none", max_attempts=4, unique_key="client key")
        again = flopwatch.rerun(job, seed=7)
        assert (again["timeout_s"], again["max_attempts"], again["unique_key"]) == (None, 4, None)
        assert {name: again[name] for name in named} == named
        assert {**again["spec"], "seed": 0} == job["spec"]
        with pytest.raises(ClientError, match="seed is no object"):
            flopwatch.rerun(job, {"seed.x": 1})
        for one in (job, again):
            flopwatch.cancel(one)


class TestFrames:
    def test_measurements_of_all_pages(self, site, flopwatch, measured, monkeypatch) -> None:
        rows = [measured("forward_ms", 1.0 + n, context_length=n) for n in range(1, 6)]
        rows.append(measured("forward_ms", None, "oom", context_length=6))
        job = done(site, flopwatch, measurements=rows)
        monkeypatch.setattr("app.api.results.MAX_MEASUREMENTS", 2)
        monkeypatch.setattr("app.store.reading.queries.MAX_MEASUREMENTS", 2)
        assert flopwatch.get(f"/jobs/{job['id']}/measurements")["next"] is not None
        frame = flopwatch.measurements(job)
        assert (frame["context_length"].tolist(), frame["context_length"].dtype) == ([1, 2, 3, 4, 5, 6], "Int64")
        assert (frame["mean"].dtype, frame["mean"].isna().tolist()) == ("float64", [False] * 5 + [True])
        assert (frame["n"].isna().tolist(), frame["outcome"].tolist()) == ([False] * 5 + [True], ["ok"] * 5 + ["oom"])

    def test_samples(self, site: Any, flopwatch: Flopwatch, measured: Any) -> None:
        one = replace(
            measured("forward_ms", 1.5, context_length=8), n=2, samples=zlib.compress(struct.pack("<2d", 1.0, 2.0))
        )
        frame = flopwatch.measurements(done(site, flopwatch, measurements=[one]), samples=True)
        assert frame["samples"].tolist() == [[1.0, 2.0]]

    def test_no_list_is_cut_unless_asked(self, flopwatch: Flopwatch) -> None:
        sweep = flopwatch.sweep(TINY, {"seed": list(range(51))})
        assert len(flopwatch.jobs(sweep=sweep)) == len(flopwatch.list_jobs(sweep=sweep)) == 51
        assert len(flopwatch.jobs(sweep=sweep, limit=50)) == 50
        flopwatch.cancel_sweep(sweep)

    def test_ids_of_a_frame_name_jobs(self, site: Any, flopwatch: Flopwatch, measured: Any) -> None:
        job = done(site, flopwatch, measurements=[measured("step_ms", 1.5, context_length=8)])
        found = flopwatch.jobs(state="succeeded").index[0]
        assert flopwatch.job(found)["id"] == flopwatch.wait(found)["id"] == job["id"]
        for ids in (found, [found], flopwatch.jobs(state="succeeded").index.to_numpy()[:1]):
            assert len(flopwatch.table(job=ids)) == 1
        assert len(flopwatch.table(job=found, where={"context_length": range(8, 10)})) == 1
        with pytest.raises(Refused, match="'nose' is none of"):
            flopwatch.compare(found, done(site, flopwatch), metrics="nose")
        for nothing in ({"job": []}, {"sweep": []}, {"kind": []}, {"job": found, "where": {"context_length": []}}):
            with pytest.raises(InvalidArgument, match="An empty list chooses nothing"):
                flopwatch.table(**nothing)
        asked = {"metrics": ["step_ms"], "fail_above_percent": 5.0}
        assert flopwatch.compare(found, [found], **asked).attrs["gate"]["metrics"] == ["step_ms"]
        with pytest.raises(Refused, match="limit"):
            flopwatch.compare(found, [found], limit=0)

    def test_tables_that_units_reported(self, site: Any, flopwatch: Flopwatch, reported: Any) -> None:
        table = reported("kernels forward", [["a", 2.0], ["b", None], ["c", 5.5]], kernel="string", total_ms="number")
        job = done(site, flopwatch, tables=[table])
        assert [one["name"] for one in flopwatch.list_tables(job)] == ["kernels forward"]
        frame = flopwatch.job_table(job, "kernels forward", sort="-total_ms")
        assert (frame["kernel"].tolist(), frame.attrs["units"]) == (["c", "a", "b"], {"total_ms": "ms"})
        assert len(flopwatch.job_table(job, "kernels forward", limit=2)) == 2


class TestDownloads:
    def test_a_folder_of_its_own_and_nothing_overwritten(self, site, flopwatch, tmp_path, monkeypatch) -> None:
        job = done(site, flopwatch, artifacts=[site.stored(name.encode(), name) for name in "ab"])
        (tmp_path / "here").mkdir()
        monkeypatch.chdir(tmp_path / "here")
        folder = Path(f"job-{job['id']}")
        assert flopwatch.download(job, "b") == [folder / "b"]
        before = (folder / "b").stat()
        assert flopwatch.download(job) == [folder / "a", folder / "b"]
        after = (folder / "b").stat()  # the download has read it, which changes the time of access
        assert (after.st_ino, after.st_ctime_ns) == (before.st_ino, before.st_ctime_ns), "what is there stays"
        (folder / "b").write_text("mine")
        (folder / "a").unlink()
        with pytest.raises(DownloadFailed, match="not overwritten"):
            flopwatch.download(job)
        assert [path.name for path in folder.iterdir()] == ["b"], "noticed before anything is written"
        assert (folder / "b").read_text() == "mine"
        with pytest.raises(InvalidArgument, match=r"b/below/a: Not a directory: choose another folder"):
            flopwatch.download(job, to=folder / "b" / "below")
        with pytest.raises(DownloadFailed, match=r"^/proc/a: "):
            flopwatch.download(job, "a", to="/proc")

    def test_a_file_that_comes_up_meanwhile(self, tmp_path: Path) -> None:
        partial, target = tmp_path / "partial", tmp_path / "target"
        partial.touch()
        target.write_text("mine")
        with pytest.raises(DownloadFailed, match="by now"):
            connection._move(partial, target)
        assert target.read_text() == "mine"
        partial.write_text("downloaded")
        target.unlink()
        connection._move(partial, target)
        assert target.read_text() == "downloaded"


class TestAddress:
    @pytest.fixture(autouse=True)
    def _no_settings(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        for name in [name for name in os.environ if name.startswith("FLOPWATCH_")]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("FLOPWATCH_DATA_DIR", str(tmp_path))

    @staticmethod
    def url(*arguments: Any, **options: Any) -> str:
        with Flopwatch(*arguments, **options) as connected:
            return connected.url

    def test_where_the_server_is(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        assert self.url() == "http://127.0.0.1:8000"
        monkeypatch.setenv("FLOPWATCH_HOST", "::")
        monkeypatch.setenv("FLOPWATCH_PORT", "9")
        assert self.url() == "http://[::1]:9"
        address.leave(tmp_path, "http://127.0.0.1:10")
        assert self.url() == "http://127.0.0.1:10"
        monkeypatch.setenv("FLOPWATCH_URL", "http://elsewhere:11/")
        assert self.url() == "http://elsewhere:11"
        assert self.url(data_dir=tmp_path) == "http://127.0.0.1:10", "a folder that is given"
        assert self.url("http://said:12/") == "http://said:12"

    @pytest.mark.parametrize(
        ("url", "proxies", "loaded"),
        [
            ("http://127.0.0.1:1", {}, False),
            ("https://127.0.0.1:1", {}, True),
            ("http://127.0.0.1:1", {"http_proxy": "https://127.0.0.1:2"}, False),
            ("http://elsewhere:1", {"http_proxy": "https://127.0.0.1:2"}, True),
        ],
    )
    def test_certificates_are_checked_wherever_there_are_any(self, url, proxies, loaded, monkeypatch) -> None:
        for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
            monkeypatch.delenv(name)
        for name, value in proxies.items():
            monkeypatch.setenv(name, value)
        given: list[Any] = []
        real = httpx.Client
        monkeypatch.setattr(httpx, "Client", lambda **options: given.append(options["verify"]) or real())
        self.url(url)
        assert given == [loaded]

    def test_a_proxy_that_cannot_be_asked_is_told(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("all_proxy", "socks://127.0.0.1:1/")  # as GNOME sets it
        with pytest.raises(
            ClientError, match=r"proxy URL.*\(all_proxy, http_proxy or https_proxy in the environment\)"
        ):
            Flopwatch("http://elsewhere:1")

    def test_an_address_without_a_server_names_its_file(self, tmp_path: Path) -> None:
        address.leave(tmp_path, "http://127.0.0.1:1")
        with pytest.raises(Unreachable, match=re.escape(str(tmp_path / "server.json"))), Flopwatch() as nobody:
            nobody.list_jobs()

    @pytest.mark.parametrize("content", ["", "[]", '{"url": 5}', '{"url": "file:///"}'])
    def test_a_file_that_says_nothing(self, tmp_path: Path, content: str) -> None:
        (tmp_path / address.FILE).write_text(content)
        assert self.url() == "http://127.0.0.1:8000"

    def test_a_server_removes_its_own_only(self, tmp_path: Path) -> None:
        address.leave(tmp_path, "http://127.0.0.1:10")
        (tmp_path / address.FILE).write_text(json.dumps({"url": "http://127.0.0.1:11", "pid": os.getpid() + 1}))
        address.remove(tmp_path)
        assert self.url() == "http://127.0.0.1:11"
        address.leave(tmp_path, "http://127.0.0.1:12")
        address.remove(tmp_path)
        assert self.url() == "http://127.0.0.1:8000"
        address.remove(tmp_path)


def test_the_client_is_imported_without_pandas() -> None:
    code = "import sys, flopwatch.client; print(*{'pandas', 'pydantic', 'fastapi', 'sqlalchemy'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert found.stdout == "\n"


@pytest.mark.parametrize("what", ["job", "sweep"])
@pytest.mark.parametrize(
    ("away", "answer"),
    [(2, None), (connection.MAX_RECONNECTS + 1, None), (2, 502), (connection.MAX_RECONNECTS + 1, 429)],
)
def test_waiting_outlasts_a_restart_of_the_server(flopwatch, monkeypatch, what, away, answer) -> None:
    """The stream is resumed; so is every other request, also if a proxy answers, or there were too many."""
    monkeypatch.setattr(connection, "RECONNECT_S", 0.001)
    sweep = flopwatch.sweep(TINY, {"seed": [1]})
    job = flopwatch.jobs_of_sweep(sweep)[0]
    flopwatch.cancel(job)
    send, refused = flopwatch._http.send, []

    def restarting(request: httpx.Request, **options: Any) -> httpx.Response:
        if (answer or not request.url.path.endswith("/events")) and len(refused) < away:
            refused.append(request.url.path)
            if answer:
                return httpx.Response(answer, html="<h1>refused</h1>", request=request)
            raise httpx.ConnectError("[Errno 111] Connection refused", request=request)
        return send(request, **options)

    monkeypatch.setattr(flopwatch._http, "send", restarting)
    kept = f"What was submitted is kept: `flopwatch {'show' if what == 'job' else 'sweeps'} "
    with pytest.raises(Unreachable, match=kept) if away > connection.MAX_RECONNECTS else nullcontext():
        flopwatch.wait(job, check=False) if what == "job" else flopwatch.wait_for_sweep(sweep)
    assert len(refused) == away


def test_an_unknown_option_is_refused(flopwatch: Flopwatch) -> None:
    with pytest.raises(TypeError, match="no option 'colums'; there are job, sweep"):
        flopwatch.table(colums=["step_ms"])  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="no option 'name'; there are state, kind"):
        flopwatch.delete_jobs(name="mine")  # type: ignore[call-arg]


@pytest.mark.parametrize("token", ["", " secret"])
def test_a_token_that_no_server_takes_is_refused_unprinted(monkeypatch: pytest.MonkeyPatch, token: str) -> None:
    monkeypatch.setenv("FLOPWATCH_API_TOKEN", token)
    with pytest.raises(ClientError, match="FLOPWATCH_API_TOKEN: is empty, or begins") as refused:
        Flopwatch("http://127.0.0.1:1")
    assert "secret" not in str(refused.value)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "size.py").write_text("SIZE = 7\n")
    (folder / "train.py").write_text("import size\n\n\ndef make_step(device):\n    return print\n")
    return folder


def test_the_folder_of_ones_code_goes_along_with_a_sweep(fresh_site: Any, project: Path) -> None:
    named = f"{project / 'train.py'}:make_step"
    with Flopwatch(fresh_site.url) as server:
        sweep = server.sweep({"kind": "benchmark"}, {"seed": [1, 2]}, step=named, code=project)
        specs = [job["spec"] for job in server.jobs_of_sweep(sweep)]
    assert {spec["step_code"]["sha256"] for spec in specs} == {OwnCode.read(named, project).sha256}


def test_versions_with_the_same_code_are_not_compared(fresh_site: Any, project: Path) -> None:
    (project / "old").mkdir()
    old, named = project / "old", "train.py:make_step"
    (old / "train.py").write_text((project / "train.py").read_text())
    with Flopwatch(fresh_site.url) as server, pytest.raises(ClientError, match="have the same code"):
        server.versus(str(old), str(project), {"kind": "benchmark"}, step=named)


def test_what_a_job_could_not_run_is_refused_before_the_upload(fresh_site: Any, project: Path) -> None:
    named, benchmark = f"{project / 'train.py'}:make_step", {"kind": "benchmark"}

    def files() -> int:
        with fresh_site.services.database.read() as connection:
            return int(connection.exec_driver_sql("select count(*) from code_file").scalar_one())

    with Flopwatch(fresh_site.url) as server:
        with pytest.raises(ClientError, match=rf"imports 'size' of the folder {project}.*: --code {project}$"):
            server.sweep(benchmark, {"seed": [1, 2]}, step=named)
        versions = project / "train.py", project / "size.py"
        versions[1].write_text("make_step = print\n")
        with pytest.raises(ClientError, match=r"train\.py imports 'size' of .*: name folders or revisions$"):
            server.versus(*map(str, versions), benchmark, step=named)
        (project / "train.py").write_text("def make_step(device, width):\n    return print\n")
        with pytest.raises(ClientError, match="missing a required argument: 'width'"):
            server.submit(benchmark, step=named)
        with pytest.raises(ClientError, match=r"called with device, arguments\.widht: missing"):
            server.sweep(benchmark, {"arguments.widht": [1, 2]}, step=named)
        with pytest.raises(ClientError, match="missing a required argument: 'width'"):
            server.rerun(server.submit(benchmark), step=named)
        assert files() == 0
        assert server.sweep(benchmark, {"arguments.width": [1, 2]}, step=named)["counts"]["queued"] == 2
        assert files() == 1, "the control"
        wide = {**benchmark, "arguments": {"width": 1}}
        compared = {"kind": "compare", "baseline": wide, "candidate": wide}
        with pytest.raises(ClientError, match="'depth'"):
            server.sweep(compared, {"candidate.arguments.depth": [1, 2]}, step=named)


def test_a_check_tells_the_progress_of_the_jobs_that_it_waits_for(fresh_site: Any) -> None:
    first = fresh_site.run(measurements=[measured("step_ms", 1.0, model="tiny")])
    shown: list[tuple[int, int, str]] = []

    def show(*progress: Any) -> None:
        """Plays the worker, as soon as the job is seen in the queue."""
        shown.append(progress)
        if len(shown) == 1:
            claim = fresh_site.worker.claim()
            fresh_site.worker.report(claim, "progress", done=3, total=16, message="candidate, replicate 2 of 8")
            fresh_site.worker.finish(claim, measurements=[measured("step_ms", 1.0, model="tiny")])

    with Flopwatch(fresh_site.url) as server:
        server.set_baseline("main", job=first)
        checked = server.check("main", show=show)
    assert (3, 16, f"job {checked['jobs'][0]}: candidate, replicate 2 of 8") in shown
