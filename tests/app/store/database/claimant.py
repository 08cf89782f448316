"""The worker processes of test_processes.py: they claim and finish until nothing is left; prints the ids each ran.

    python claimant.py URL NUMBER [--sabotage]

With --sabotage there is no write lock, no transaction and no condition on the job's state: what the test must notice.
Then all have chosen their first job before anybody takes one, however late some of them come.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import sys
import time
from typing import Any

from sqlalchemy import bindparam, update

from app.store import tables
from app.store.database import locking, sqlite
from app.store.database.engine import Database
from app.store.queue import claims, transitions
from app.store.queue.transitions import Queue
from app.store.records import Finish, Offer

PAUSE_S = 0.002


def hesitate() -> None:
    """Wait between choosing a job and taking it, as long with sabotage as without."""
    choose = claims.next_job

    def slowly(*arguments: Any) -> Any:
        chosen = choose(*arguments)
        if CHOOSING:
            CHOOSING.pop().wait(60)
        time.sleep(PAUSE_S)
        return chosen

    vars(transitions)["next_job"] = slowly


def sabotage() -> None:
    locking.WriteLock.hold = lambda self, timeout_s: contextlib.nullcontext()  # type: ignore[method-assign,assignment,return-value]
    sqlite._begin = lambda connection: None  # each statement commits by itself
    job = tables.job.c
    careless = update(tables.job).where(job.id == bindparam("job_id"))
    transitions._TAKE = careless.values(
        state="running", attempt=job.attempt + 1, worker_id=bindparam("by"), started_at=bindparam("now")
    ).returning(*transitions._TAKE.exported_columns)


def claim_all(name: str) -> list[int]:
    """Run jobs as this worker until none is left, from the moment at which all workers are ready; their ids."""
    workers_queue = Queue(Database(URL, busy_timeout_s=30))
    offer = Offer(frozenset({"benchmark"}), frozenset(), 0, 0, idle=True)
    ALL_READY.wait()
    ran = []
    while claim := workers_queue.claim(name, offer):
        workers_queue.finish(claim, Finish("succeeded"))
        ran.append(claim.job_id)
    return ran


hesitate()
if "--sabotage" in sys.argv:
    sabotage()
URL = sys.argv[1]
NAMES = [f"worker-{number}" for number in range(int(sys.argv[2]))]
# Forks, since each new interpreter would import all of this anew.
FORKS = multiprocessing.get_context("fork")
ALL_READY = FORKS.Barrier(len(NAMES))
CHOOSING = [FORKS.Barrier(len(NAMES))] if "--sabotage" in sys.argv else []
"""Where each waits with its first choice."""
with FORKS.Pool(len(NAMES)) as pool:
    print(json.dumps(pool.map(claim_all, NAMES, chunksize=1)))
