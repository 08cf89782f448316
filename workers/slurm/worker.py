"""The worker that lets a Slurm cluster run its jobs: it claims like any worker, and each claim gets an allocation."""

import logging
from contextlib import closing
from pathlib import Path

from app.logs import about
from app.settings import Settings
from app.specs._base import name_of_nodes
from app.store.database.engine import Database, open_database
from app.store.queue.lease import with_agreed_lease
from app.store.records import Offer
from workers import tools
from workers.agent.agent import MAX_CONNECTIONS, capabilities
from workers.agent.fitness import Examination, Unfit
from workers.agent.serving import Serving
from workers.jobs import RUNNERS
from workers.slurm.allocations import Allocation, Allocations
from workers.slurm.client import SlurmClient
from workers.slurm.handover import HandOverFolder
from workers.slurm.settings import SlurmSettings

logger = logging.getLogger(__name__)

NOT_SUBMITTED = "it is being submitted to Slurm"


class SlurmWorker(Serving[Allocation]):
    """One cluster's worker. `run` returns when a signal has asked for it: jobs that wait in Slurm's queue go back to
    ours, and those that run there go on without it."""

    def __init__(self, settings: Settings, database: Database, cluster: SlurmSettings) -> None:
        super().__init__(settings, database)
        self._cluster = cluster
        self._folder = HandOverFolder(cluster.folder)
        self._allocations = Allocations(
            cluster, self._folder, self._queue, client=SlurmClient(cluster.command_timeout_s), on_end=self._wake_up
        )
        named = {f"{tools.FAMILY}:{tool}" for tool in cluster.tools}
        nodes = {name_of_nodes(number) for number in range(2, cluster.max_nodes + 1)}
        self._capabilities = capabilities(allow_code=settings.allow_code) | named | nodes
        self._offer = Offer(
            kinds=frozenset(RUNNERS),
            capabilities=self._capabilities,
            total_gpus=cluster.gpus_per_node,
            free_gpus=cluster.gpus_per_node,
            idle=True,
        )
        self._refused = False
        self._grace_s = 0.0  # nothing that only waits gains by waiting longer

    def run(self) -> None:
        """Serve until SIGTERM or SIGINT."""
        self._take_signals()
        self.register()
        self._allocations.start()
        self._serve_until_signal()

    def close(self) -> None:
        self._allocations.close()
        self._folder.close()
        super().close()

    def register(self) -> None:
        """Tell the store what the cluster's nodes can run."""
        where = f"partition {self._cluster.partition}" if self._cluster.partition else "default partition"
        device = {
            "type": "slurm",
            "name": f"Slurm, {where}",
            "count": self._cluster.max_nodes,
            "gpus_per_node": self._cluster.gpus_per_node,
        }
        self._register([device], f"Slurm, {where}")

    def _note_change(self) -> None:
        self._refused = False

    def _glance(self) -> Unfit | None:
        if self._allocations.silence is None:
            return None
        return Unfit("slurm_silent", f"Slurm does not answer: {self._allocations.silence}")

    def _begin_examination(self) -> Examination:
        return Examination(lambda: self._glance() or self._allocations.examine(), self._wake_up)

    def _after(self, run: Allocation) -> None:
        self._refused = False

    def _claim_jobs(self) -> None:
        """Claim as many jobs as there may be allocations, while Slurm answers."""
        while not self._refused and self._allocations.answers and self._allocations.room() > 0:
            claim = self._queue.claim(self.id, self._offer, NOT_SUBMITTED)
            if claim is None:
                self._refused = True
                return
            with about(claim.job_id, claim.attempt):
                logger.info("submitting a job of kind %s", claim.kind)
            self.runs[claim.attempt_id] = self._allocations.add(claim)


def serve(settings: Settings, file: Path) -> None:
    """Open the database, migrating it if needed, and run a worker until a signal ends it."""
    cluster = SlurmSettings.read(file)
    with closing(open_database(settings, connections=MAX_CONNECTIONS)) as database:
        SlurmWorker(with_agreed_lease(database, settings), database, cluster).run()
