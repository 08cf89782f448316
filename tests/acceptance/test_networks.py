"""A server and two workers, each on a host with a network of its own, with PostgreSQL and an object store on two more.
Cables are pulled while a sweep runs: of the store, a worker, and the database."""

import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import psutil
import pytest

from tests.acceptance.conftest import environment
from tests.acceptance.sabotage import (
    attempt_states,
    fails_without,
    get,
    open_gate,
    other_host,
    plain_kind,
    started,
    wait_for_start,
    wait_for_state,
    worker_id,
)
from tests.forked import ForkedService, forkserver
from tests.networks import Host, hosts
from tests.object_stores import PlainBucket, serving_objects
from tests.postgres import Server, running_server
from tools.service import Service
from tools.waiting import wait_until

pytestmark = [pytest.mark.acceptance, pytest.mark.long]

LEASE_S = 3.0
REQUEST_S = 3
"""Seconds after which a request to a store that is gone fails; users' wait for ten times as long."""
BACK_S = 3.0
"""How long a worker without a database may try to upload a file: it must not."""
FILE_MIB = 24
"""Uploaded in three parts."""
AMID_UPLOAD = 6 << 20
"""Bytes of a file that have arrived when the cable is pulled."""
WAITS = "its files wait"
"""What a worker logs when it could not store a file."""
TIDY = """
from app.settings import Settings
from app.store.database.engine import open_existing
from app.store.files.opening import open_files
settings = Settings.from_environment()
database = open_existing(settings)
open_files(settings, database).remove_unreferenced(database, 0.0)
database.close()
"""
"""What a server does every 15 minutes, at once."""


@dataclass(frozen=True)
class Lab:
    """Hosts, of which the test's process is one more, with PostgreSQL and an object store on two of them."""

    server: Host
    workers: Sequence[Host]
    store: Host
    store_port: int
    database: Host
    postgres: Server


@dataclass(frozen=True)
class Site:
    """A service of which nothing runs yet, and where its data are."""

    service: Service
    lab: Lab
    bucket: PlainBucket
    database: str
    folder: Path

    def objects(self) -> list[str]:
        """The names of objects with a row."""
        return [name for [name] in self.lab.postgres.execute("SELECT name FROM stored_object", self.database)]

    def environment_on(self, host: Host) -> dict[str, str]:
        folder = self.folder.parent / host.name
        return {"ON_HOST": host.name, **other_host(folder), "FLOPWATCH_DATA_DIR": str(folder / "data")}


class OnHosts(ForkedService):
    """Its processes run on the hosts that $ON_HOST names."""

    hosts: Mapping[str, Host]

    def launch(self, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> Any:
        host = self.hosts[environment["ON_HOST"]]
        return forkserver().start(["-m", *arguments], environment, log, before=host.statements)


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    forkserver()  # it is reached through this machine's own network
    with ExitStack() as stack:
        server, first, second, database, store = stack.enter_context(
            hosts("server", "first", "second", "database", "store")
        )
        with database.entered():
            postgres = stack.enter_context(running_server(f"listen_addresses={database.address}"))
        with store.entered():
            port = stack.enter_context(serving_objects(store.address))
        yield Lab(server, (first, second), store, port, database, postgres)


@pytest.fixture
def site(lab: Lab, tmp_path: Path, misbehave_folder: Path) -> Iterator[Site]:
    bucket = PlainBucket(tmp_path.name.replace("_", "-"), f"{lab.store.address}:{lab.store_port}")
    bucket.request("PUT")
    name = lab.postgres.copy()
    settings = {
        **environment(tmp_path),
        **bucket.environment(),
        "FLOPWATCH_HOST": lab.server.address,
        "FLOPWATCH_INSECURE": "true",
        "FLOPWATCH_LEASE_S": str(LEASE_S),
        "FLOPWATCH_DATABASE_URL": f"postgresql+psycopg://flopwatch@{lab.database.address}/{name}",
        "FLOPWATCH_ARTIFACTS_URL": bucket.url,
        "OBJECT_REQUEST_S": str(REQUEST_S),
    }
    service = OnHosts(tmp_path / "service", settings)
    service.hosts = {host.name: host for host in (lab.server, *lab.workers)}
    with service:
        yield Site(service, lab, bucket, name, misbehave_folder)
        print(service.logs()[-20_000:])


def test_every_job_ends_once_and_every_file_has_its_row(site: Site) -> None:
    """Amid an upload pull the cables of the store and, for two leases, of the other worker; when that is back, the
    database's."""
    lab, service, folder = site.lab, site.service, site.folder
    far, near = lab.workers
    service.environment.update(plain_kind())
    client = service.start_server(ON_HOST=lab.server.name)
    first, second = service.start_workers(*(site.environment_on(host) for host in (far, near)))
    assert sorted(worker["hostname"] for worker in get(client, "/workers")) == ["first", "second"]
    base = {"kind": "plain", "behaviour": "gated", "file_mib": FILE_MIB}
    answer = client.post("/sweeps", json={"base": base, "grid": {"number": [0, 1, 2, 3]}}).raise_for_status()
    wait_for_start(folder, 2)
    jobs = {job["id"]: job["worker_id"] for job in get(client, f"/jobs?sweep={answer.json()['id']}")}
    [lost], [uploaded] = ([job for job in jobs if jobs[job] == worker_id(client, one.pid)] for one in (first, second))

    arrived = lab.store.received_bytes()
    open_gate(folder, unit_of(folder, second.pid))
    wait_until(lambda: lab.store.received_bytes() - arrived > AMID_UPLOAD, what="half of a file", poll_s=0.001)
    lab.store.pull()
    far.pull()
    pulled_at = time.monotonic()
    wait_until(lambda: WAITS in service.logs() or attempt_states(client, uploaded) != ["running"], what=WAITS)
    wait_until(lambda: attempt_states(client, lost)[0] == "lost", what="the other job's attempt to be lost")
    lab.store.plug()
    wait_for_start(folder, 3)  # the second worker has stored its file, and taken the lost job
    wait_until(lambda: time.monotonic() - pulled_at > 2 * LEASE_S, what="two leases")
    # The other worker is back, and its unit ends, before it can hear that the job is no longer its own.
    lab.database.pull()
    far.plug()
    arrived = lab.store.received_bytes()
    open_gate(folder, unit_of(folder, first.pid))
    with suppress(TimeoutError):
        wait_until(lambda: lab.store.received_bytes() - arrived > FILE_MIB << 20, "a stray", BACK_S)
    lab.database.plug()
    wait_for_start(folder, 4)  # it has, and has taken another job
    open_gate(folder)
    for job in jobs:
        wait_for_state(client, job, "succeeded")
    assert attempt_states(client, lost) == ["lost", "succeeded"]
    wrong = what_is_wrong(site, client, list(jobs))
    assert not wrong, " ".join(wrong)
    assert WAITS in service.logs(), "no upload was cut"


def test_control_of_the_pulled_cables(site: Site) -> None:
    missing = fails_without(
        site.service, "row_before_upload", "errors_of_uploads", match="(?s)a row without its file.*files without a row"
    )
    with missing, patch.dict(globals(), BACK_S=20.0):
        test_every_job_ends_once_and_every_file_has_its_row(site)


def unit_of(folder: Path, worker: int) -> int:
    """The pid of the unit that the worker with this pid runs."""
    below = {process.pid for process in psutil.Process(worker).children(recursive=True)}
    [unit] = [pid for [pid] in started(folder) if pid in below]
    return unit


def what_is_wrong(site: Site, client: httpx.Client, jobs: Sequence[int]) -> list[str]:
    """Jobs that did not end once, files without a row, and rows without a file."""
    wrong = []
    for job in jobs:
        if (ends := [event["type"] for event in get(client, f"/jobs/{job}/events")].count("done")) != 1:
            wrong.append(f"job {job} ended {ends} times")
        [artifact] = get(client, f"/jobs/{job}/artifacts")
        content = client.get(artifact["url"], follow_redirects=True)
        if content.status_code != 200 or hashlib.sha256(content.content).hexdigest() != artifact["sha256"]:
            wrong.append(f"job {job}: a row without its file ({content.status_code})")
    stored = {name.rpartition("/")[2] for name in site.bucket.names()}
    if strays := stored - set(site.objects()):
        wrong.append(f"files without a row: {strays}")
    log, before = site.folder / "tidy", site.lab.server.statements
    assert forkserver().start(["-c", TIDY], site.service.environment, log, before=before).wait(60) == 0, log.read_text()
    kept = {name.rpartition("/")[2] for name in site.bucket.names()}
    if (len(kept), kept) != (len(jobs), set(site.objects())):
        wrong.append(f"after removal there are the files {kept}, and rows of {site.objects()}")
    return wrong
