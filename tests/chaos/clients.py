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

from tests.chaos.evidence import Ledger
from tests.chaos.plan import BATCH, ENDLESS, KIND, Behaviours, batch_of, job_body
from tools.service import FINAL_STATES

UNAVAILABLE = (503, 507)
TIMEOUT_S = 8.0
ANSWER_S = 300.0
"""Seconds for which a request is repeated: longer than two outages, one after the other."""
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

    def __init__(self, url: str, seed: int, ledger: Ledger, behaviours: Behaviours) -> None:
        self.url = url
        self._behaviours = behaviours
        self.ledger = ledger
        self._seed = seed
        self._stopping = threading.Event()
        self._numbers = itertools.count()
        self._sweep_numbers = itertools.count()
        self._done: set[int] = set()
        """Numbers of jobs about whose submission nothing more will be asked or heard."""
        self._known: list[int] = []
        works: list[Callable[[random.Random, Session], None]] = [
            self.submit,
            self.submit,
            self.submit_sweeps,
            self.change,
            self.read,
            self.pause,
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
        if self._stopping.is_set():
            return
        self._stopping.set()
        for thread in self._threads:
            thread.join()
        with Session(self.url, self.ledger) as session:  # a pause whose answer was lost may have come late
            self._resume(session)

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
        """Submit one job, mostly with an Idempotency-Key: until it is answered, and at times once more.

        Some have a unique key, which another job may hold.
        """
        waiting = session.ask("GET", "/jobs", params={"state": "queued", "limit": MOST_WAITING})
        if waiting is None or len(waiting.json()["data"]) >= MOST_WAITING:
            return
        number = next(self._numbers)
        body = job_body(rng, number, self._behaviours)
        if rng.random() < 0.2:
            self._submit_once(session, body)
        else:
            headers = {"Idempotency-Key": f"key of {body['name']}"}
            answer = session.ask_until_answered("POST", "/jobs", json=body, headers=headers)
            if session.tries > 1:  # an earlier try may arrive after the answer to this one, if that refused the job
                with self.ledger.guard:
                    self.ledger.unanswered.add(body["name"])
            accepted = self._take(body, answer, certain=session.tries == 1)
            if accepted and rng.random() < 0.3:
                self._take(body, session.ask("POST", "/jobs", json=body, headers=headers), repeated=True)
        self._done.add(number)

    def _submit_once(self, session: Session, body: Mapping[str, Any]) -> None:
        with self.ledger.guard:
            self.ledger.unanswered.add(body["name"])
        self._take(body, session.ask("POST", "/jobs", json=body))

    def _take(
        self, body: Mapping[str, Any], answer: httpx.Response | None, *, certain: bool = True, repeated: bool = False
    ) -> bool:
        """Note what was answered to a submission; returns True if the job was accepted.

        certain: no other request for this job was sent. repeated: the job was accepted before.
        """
        name = body["name"]
        if answer is None or (repeated and answer.status_code == 410):  # deleted meanwhile
            return False
        if "unique_key" in body and not repeated and is_problem(answer, "key_taken"):
            if certain:
                with self.ledger.guard:
                    self.ledger.refused.add(name)
            return False
        if answer.status_code != 201:
            self.ledger.trouble(f"{name} was answered {answer.status_code}: {answer.text[:300]}")
            return False
        job_id = answer.json()["id"]
        self.ledger.accept(name, job_id)
        self._known.append(job_id)
        return True

    def submit_sweeps(self, rng: random.Random, session: Session) -> None:
        """Submit a small sweep now and then, and look at all of them."""
        if rng.random() < 0.1:
            number = next(self._sweep_numbers)
            body = {
                "base": {"kind": KIND, "number": number},
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
        """Cancel, retry or delete a job, or all that have one label."""
        if not self._known:
            return
        job_id = rng.choice(self._known)
        chosen = rng.random()
        if chosen < 0.3:
            answer = session.ask("POST", f"/jobs/{job_id}/cancel")
            self._expect(answer, {202, 404, 409}, f"cancel of job {job_id}", "cancel")
            return
        if chosen < 0.4:
            batch = {"label": f"batch:{batch_of(rng.choice([*self._done, 0]))}"}
            answer = session.ask("POST", "/jobs/cancel", params=batch)
            self._expect(answer, {202}, f"cancel of jobs with {batch}", "cancel many")
            return
        if chosen < 0.5:
            self._delete_batch(rng, session)
            return
        found = session.ask("GET", f"/jobs/{job_id}")
        if found is None or found.status_code != 200 or found.json()["state"] not in FINAL_STATES:
            return
        if chosen < 0.75:
            self._retry(session, found.json())
        else:
            self._delete(session, job_id)

    def _retry(self, session: Session, job: Mapping[str, Any]) -> None:
        """Retry a job, once: what has no end of its own would run for ever."""
        job_id, behaviour = job["id"], job["labels"]["behaviour"]
        if job["state"] == "succeeded" or behaviour in ENDLESS or job_id in self.ledger.retried:
            return
        with self.ledger.guard:  # before it happens, since the answer may be lost
            self.ledger.retried.add(job_id)
        answer = session.ask("POST", f"/jobs/{job_id}/retry")
        self._expect(answer, {202, 404, 409}, f"retry of job {job_id}", "retry")

    def _delete(self, session: Session, job_id: int) -> None:
        with self.ledger.guard:
            self.ledger.deleted.add(job_id)
            retried = job_id in self.ledger.retried  # it may have been retried only now
        # A deletion that was cut short leaves a part of the job, until it is deleted again.
        answer = session.ask_until_answered("DELETE", f"/jobs/{job_id}")
        self._expect(answer, {204, 404, 409} if retried else {204, 404}, f"delete of job {job_id}", "delete")

    def _delete_batch(self, rng: random.Random, session: Session) -> None:
        """Delete all finished jobs with one label, once it is known which jobs have it."""
        number = rng.choice([*self._done, 0])
        numbers = {one for one in range(number + BATCH) if batch_of(one) == batch_of(number)}
        if not numbers <= self._done:
            return
        with self.ledger.guard:
            for one in numbers:
                self.ledger.deleted |= self.ledger.accepted.get(f"job {one}", set())
        batch = {"label": f"batch:{batch_of(number)}"}
        answer = session.ask_until_answered("DELETE", "/jobs", params=batch)
        self._expect(answer, {200}, f"delete of jobs with {batch}", "delete many")

    def pause(self, rng: random.Random, session: Session) -> None:
        """Pause the kind of all jobs for a moment, and look if one begins all the same."""
        if self._stopping.wait(rng.uniform(0.5, 2.0)):
            return
        paused = session.ask("PUT", "/queue/paused", json={"kinds": rng.choice([[KIND], "all"])})
        self._expect(paused, {200}, "a pause")
        before = None if paused is None else self._running(session)
        if before is not None:
            time.sleep(rng.uniform(0.1, 0.5))
            self.ledger.saw_paused(before, self._running(session) or set())
        self._resume(session)

    def _running(self, session: Session) -> set[tuple[int, int]] | None:
        """The attempts that run, by job and number; None if nobody tells."""
        answer = session.ask("GET", "/jobs", params={"state": "running", "limit": 500})
        return None if answer is None else {(job["id"], job["attempt"]) for job in answer.json()["data"]}

    def _resume(self, session: Session) -> None:
        answer = session.ask_until_answered("PUT", "/queue/paused", json={"kinds": []})
        self._expect(answer, {200}, "the end of a pause", "pause and resume")

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

    def _expect(self, answer: httpx.Response | None, statuses: set[int], what: str, act: str | None = None) -> None:
        """Note an answer that the client may not get, or an act that it got done."""
        if act is not None and answer is not None and answer.is_success:
            with self.ledger.guard:
                self.ledger.acts[act] += 1
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
        self.tries = 0
        """Number of requests that the last answer took."""

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
        """The answer, however often it takes to ask; None after ANSWER_S."""
        deadline = time.monotonic() + ANSWER_S
        self.tries = 0
        while time.monotonic() < deadline:
            self.tries += 1
            answer = self.ask(method, path, **options)
            if answer is not None:
                return answer
            time.sleep(PAUSE_S)
        self._ledger.trouble(f"{method} {path} was not answered for {ANSWER_S:g} s")
        return None


def is_problem(answer: httpx.Response, code: str) -> bool:
    return "problem+json" in answer.headers.get("Content-Type", "") and answer.json().get("code") == code
