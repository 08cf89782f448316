"""The clients of a chaos run: some submit, some change, some read, some misbehave. Each is a thread of its own.

A client that gets no answer, or 503 or 507, asks again. Any other answer that it may not get goes into the ledger.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

import httpx

from tools.chaos.evidence import Ledger
from tools.chaos.plan import job_body
from tools.service import FINAL_STATES

UNAVAILABLE = (503, 507)
TIMEOUT_S = 8.0
PAUSE_S = 0.1
GONE_PAUSE_S = 0.2
MOST_WAITING = 8
"""Submitters pause while so many jobs wait, so that the run ends soon after its faults."""
SOCKETS = 30
"""Connections that one slow client keeps open."""
SWEEP_CELLS = 6
PAGES = ("/ui", "/ui/workers", "/jobs", "/sweeps", "/workers", "/tables?kind=hostile", "/metrics", "/readyz")
OF_A_JOB = ("", "/events", "/logs", "/attempts", "/measurements", "/tables", "/artifacts", "/units")


class Clients:
    """The threads; use it as a context. `settle` lets them finish what they have begun."""

    def __init__(self, url: str, seed: int, ledger: Ledger) -> None:
        self.url = url
        self.ledger = ledger
        self._seed = seed
        self._stopping = threading.Event()
        self._numbers = itertools.count()
        self._known: list[int] = []
        works: list[Callable[[random.Random, Session], None]] = [
            self.submit,
            self.submit,
            self.submit_sweeps,
            self.change,
            self.read,
        ]
        self._threads = [
            threading.Thread(target=self._run, args=(work, index), name=f"client-{index}")
            for index, work in enumerate(works)
        ]
        self._threads.append(threading.Thread(target=self._run_slow, name="slow-client"))

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self.settle()

    def settle(self) -> None:
        """Let the clients end. A submission that can be repeated safely is repeated until it is answered."""
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def _run(self, work: Callable[[random.Random, Session], None], index: int) -> None:
        rng = random.Random(f"client {index} {self._seed}")
        with Session(self.url, self.ledger) as session:
            while not self._stopping.is_set():
                try:
                    work(rng, session)
                except Exception as error:  # noqa: BLE001 - a client that has ended would hide all that follows
                    self.ledger.trouble(f"a client failed: {error!r}")
                time.sleep(PAUSE_S * rng.random())

    def submit(self, rng: random.Random, session: Session) -> None:
        """Submit one job, mostly with an Idempotency-Key: until it is answered, and at times once more."""
        waiting = session.ask("GET", "/jobs", params={"state": "queued", "limit": MOST_WAITING})
        if waiting is None or len(waiting.json()["data"]) >= MOST_WAITING:
            return
        body = job_body(rng, next(self._numbers))
        if rng.random() < 0.2:
            self._submit_once(session, body)
            return
        headers = {"Idempotency-Key": f"key of {body['name']}"}
        answer = session.ask_until_answered("POST", "/jobs", json=body, headers=headers)
        self._take(body["name"], answer)
        if answer is not None and rng.random() < 0.3:
            self._take(body["name"], session.ask("POST", "/jobs", json=body, headers=headers), repeated=True)

    def _submit_once(self, session: Session, body: Mapping[str, Any]) -> None:
        with self.ledger.guard:
            self.ledger.unanswered.add(body["name"])
        answer = session.ask("POST", "/jobs", json=body)
        self._take(body["name"], answer)

    def _take(self, name: str, answer: httpx.Response | None, *, repeated: bool = False) -> None:
        if answer is None or (repeated and answer.status_code == 410):  # deleted meanwhile
            return
        if answer.status_code != 201:
            self.ledger.trouble(f"{name} was answered {answer.status_code}: {answer.text[:300]}")
            return
        job_id = answer.json()["id"]
        self.ledger.accept(name, job_id)
        self._known.append(job_id)

    def submit_sweeps(self, rng: random.Random, session: Session) -> None:
        """Submit a small sweep now and then, and look at all of them."""
        if rng.random() < 0.1:
            number = next(self._numbers)
            body = {
                "base": {"kind": "hostile", "number": number},
                "grid": {"seconds": [0.0, 0.01, 0.02], "start": ["fork", "exec"]},
                "name": f"sweep {number}",
            }
            headers = {"Idempotency-Key": body["name"]}
            answer = session.ask_until_answered("POST", "/sweeps", json=body, headers=headers)
            if answer is not None and answer.status_code == 201:
                self.ledger.sweeps[answer.json()["id"]] = SWEEP_CELLS
            elif answer is not None:
                self.ledger.trouble(f"{body['name']} was answered {answer.status_code}: {answer.text[:300]}")
        sweeps = session.ask("GET", "/sweeps")
        if sweeps is not None and sweeps.status_code == 200:
            for sweep in sweeps.json()["data"]:
                if sum(sweep["counts"].values()) != SWEEP_CELLS:
                    self.ledger.trouble(f"sweep {sweep['id']} has counts {sweep['counts']} of {SWEEP_CELLS} jobs")
        time.sleep(0.2)

    def change(self, rng: random.Random, session: Session) -> None:
        """Cancel or delete a job."""
        if not self._known:
            return
        job_id = rng.choice(self._known)
        if rng.random() < 0.5:
            answer = session.ask("POST", f"/jobs/{job_id}/cancel")
            self._expect(answer, {202, 404, 409}, f"cancel of job {job_id}")
            return
        job = session.ask("GET", f"/jobs/{job_id}")
        if job is None or job.status_code != 200 or job.json()["state"] not in FINAL_STATES:
            return
        with self.ledger.guard:  # before it happens, since the answer may be lost
            self.ledger.deleted.add(job_id)
        # A deletion that was cut short leaves a part of the job, until it is deleted again.
        answer = session.ask_until_answered("DELETE", f"/jobs/{job_id}")
        self._expect(answer, {204, 404}, f"delete of job {job_id}")

    def read(self, rng: random.Random, session: Session) -> None:
        """Read a page, and all of a job."""
        self._expect(session.ask("GET", rng.choice(PAGES)), {200}, "a page")
        if not self._known:
            return
        job_id = rng.choice(self._known)
        answer = session.ask("GET", f"/jobs/{job_id}{rng.choice(OF_A_JOB)}")
        self._expect(answer, {200, 404}, f"job {job_id}")
        self._expect(session.ask("GET", f"/ui/jobs/{job_id}"), {200, 404}, f"page of job {job_id}")
        job = session.ask("GET", f"/jobs/{job_id}")
        if job is not None and job.status_code == 200 and job.json()["state"] in FINAL_STATES:
            self.ledger.saw_final(job.json())

    def _expect(self, answer: httpx.Response | None, statuses: set[int], what: str) -> None:
        if answer is not None and answer.status_code not in statuses:
            self.ledger.trouble(f"{what} was answered {answer.status_code}: {answer.text[:300]}")

    def _run_slow(self) -> None:
        """Open connections and hardly read or write: streams, downloads, halves of requests."""
        rng = random.Random(f"slow {self._seed}")
        place = urlsplit(self.url)
        host = f"{place.hostname}:{place.port}"
        open_ones: list[socket.socket] = []
        while not self._stopping.is_set():
            job_id = rng.choice(self._known) if self._known else 1
            wanted = rng.choice(
                [
                    f"GET /jobs/{job_id}/events HTTP/1.1\r\nHost: {host}\r\nAccept: text/event-stream\r\n\r\n",
                    f"GET /jobs/{job_id}/artifacts/sparse.bin HTTP/1.1\r\nHost: {host}\r\n\r\n",
                    f"GET /jobs/{job_id}/logs HTTP/1.1\r\nHost: {host}\r\n\r\n",
                    f"GET /jobs?limit=500 HTTP/1.1\r\nHost: {host}\r\n\r\n" * 20,
                    f"POST /jobs HTTP/1.1\r\nHost: {host}\r\nContent-Length: 1000\r\n\r\n{{",
                    f"GET /jobs HTTP/1.1\r\nHost: {host}\r\nX-Endless: ",
                    "\x16\x03\x01\x02\x00 this is no HTTP\r\n\r\n",
                ]
            )
            with contextlib.suppress(OSError):
                one = socket.create_connection((place.hostname, place.port), timeout=1.0)
                one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                one.sendall(wanted.encode())
                one.setblocking(False)
                open_ones.append(one)
            for one in rng.sample(open_ones, min(5, len(open_ones))):
                with contextlib.suppress(OSError):
                    one.recv(1)
            if len(open_ones) > SOCKETS:
                open_ones.pop(rng.randrange(len(open_ones))).close()
            time.sleep(PAUSE_S)
        for one in open_ones:
            one.close()


class Session:
    """One thread's HTTP client; counts answers, and notes those that nobody may get."""

    def __init__(self, url: str, ledger: Ledger) -> None:
        self._client = httpx.Client(base_url=url, timeout=TIMEOUT_S, trust_env=False, verify=False)
        self._ledger = ledger

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_exception: object) -> None:
        self._client.close()

    def ask(self, method: str, path: str, **options: Any) -> httpx.Response | None:
        """The answer; None without one, or if the server says that it cannot answer now."""
        try:
            answer = self._client.request(method, path, **options)
        except httpx.TransportError:
            self._ledger.answered(0)
            time.sleep(GONE_PAUSE_S)
            return None
        self._ledger.answered(answer.status_code)
        if answer.status_code >= 500:
            if answer.status_code not in UNAVAILABLE:
                self._ledger.trouble(f"{method} {path} was answered {answer.status_code}: {answer.text[:300]}")
            return None
        return answer

    def ask_until_answered(self, method: str, path: str, **options: Any) -> httpx.Response | None:
        """The answer, however often it takes to ask; None after a minute."""
        deadline = time.monotonic() + 60.0
        while time.monotonic() < deadline:
            answer = self.ask(method, path, **options)
            if answer is not None:
                return answer
            time.sleep(PAUSE_S)
        self._ledger.trouble(f"{method} {path} was not answered for a minute")
        return None
