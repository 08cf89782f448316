"""A node of a job on several nodes that does not hold its claim: it locks its devices and runs its ranks.

srun ends it when node 0's agent has ended.
"""

import contextlib
import hashlib
import logging
import os
import select
import selectors
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict

from app.errors import CannotRunHere
from app.settings import Settings
from app.store.records import HandedOver
from parallel.nodes import Nodes
from workers.agent.scratch import Scratch
from workers.devices.discovery import Host, discover
from workers.devices.locks import DeviceLocks, HeldDevices
from workers.jobs._base import Unit
from workers.jobs._ranks import VARIABLE
from workers.processes.keeper import Request
from workers.processes.launch import Launcher, Process

logger = logging.getLogger(__name__)

PORTS = 8
FIRST_PORT, PORT_RANGE = 20_000, 12_000
"""Below the ports that the kernel gives to clients."""
READ_BYTES = 1 << 16


def nodes_of(handed: HandedOver, count: int) -> Nodes:
    """Return where the nodes of a job meet, which each knows from the hand-over file and its variables. Raises
    CannotRunHere: srun has not started this process."""
    address = os.environ.get("SLURM_LAUNCH_NODE_IPADDR")
    if address is None or "SLURM_PROCID" not in os.environ:
        raise CannotRunHere("A job on several nodes is started by srun, which sets SLURM_LAUNCH_NODE_IPADDR.")
    chosen = hashlib.sha256(f"ports {handed.token}".encode()).digest()
    numbers = [int.from_bytes(chosen[2 * place : 2 * place + 2], "big") for place in range(PORTS)]
    key = hashlib.sha256(f"ranks {handed.token}".encode()).hexdigest()
    return Nodes(count, address, [FIRST_PORT + number % PORT_RANGE for number in numbers], key)


class Node:
    """The agent of one further node. `serve` returns after SIGTERM or SIGINT."""

    def __init__(self, settings: Settings, nodes: Nodes, index: int) -> None:
        self._nodes, self._index = nodes, index
        self._host = discover()
        self._locks = DeviceLocks(self._host)
        self._scratch = Scratch(settings.data_dir / "scratch")
        self._launcher = Launcher()
        self._wake, self._wake_in = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def serve(self) -> None:
        """Run this node's ranks until a signal."""
        signal.set_wakeup_fd(self._wake_in, warn_on_full_buffer=False)
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, lambda *_: None)
        try:
            self._launcher.end_leftovers()
            held = wait_for_devices(self._locks, self._host, self._has_signal)
            if not has_all(held, self._host):
                held.release()
                if self._has_signal():
                    return
                raise CannotRunHere(f"Another Flopwatch held the devices of this node for {DEVICES_S:g} s.")
            held = self._locks.keep_only(held, gpus=len(held.gpus), alone=not self._host.gpus)
            process = self._launcher.start(self._request(held), "fork", held.descriptors)
            try:
                self._drain(process)
            finally:
                process.close()
                held.release()
        finally:
            self._launcher.close()
            self._locks.close()
            self._scratch.close()

    def _has_signal(self) -> bool:
        return bool(select.select([self._wake], [], [], 0)[0])

    def _request(self, held: HeldDevices) -> Request:
        visible = ",".join(gpu.uuid for gpu in held.gpus)
        return Request(
            kind="",
            spec={},
            unit=asdict(Unit(f"node {self._index}", {"node": self._index})),
            scratch=str(self._scratch.path),
            environment={"CUDA_VISIBLE_DEVICES": visible, VARIABLE: self._nodes.to_json()},
            task="node",
        )

    def _drain(self, process: Process) -> None:
        """Pass the process's output on until it has ended, or a signal comes."""
        with selectors.DefaultSelector() as selector:
            for descriptor in (process.messages, process.log, process.control.fileno(), self._wake):
                selector.register(descriptor, selectors.EVENT_READ)
            while len(selector.get_map()) > 1:
                for key, _ in selector.select():
                    data = b""
                    with contextlib.suppress(ConnectionResetError):
                        data = os.read(key.fd, READ_BYTES)
                    if key.fd == self._wake:
                        return
                    if key.fd == process.log:
                        sys.stderr.buffer.write(data)
                        sys.stderr.flush()
                    if not data:
                        selector.unregister(key.fd)
        raise CannotRunHere(f"The process with the ranks of node {self._index} has ended.")


DEVICES_S = 60.0
"""Seconds for which an agent in an allocation waits for its devices: another Flopwatch may use the node without Slurm,
or a killed job's processes may still be ending."""
LOOK_S = 0.1


def wait_for_devices(locks: DeviceLocks, host: Host, stopped: Callable[[], bool]) -> HeldDevices:
    """Lock all devices of an allocation; after DEVICES_S, or once `stopped` returns True, those that are free."""
    give_up_at = time.monotonic() + DEVICES_S
    while True:
        free = locks.take_free()
        if has_all(free, host) or stopped() or time.monotonic() >= give_up_at:
            return free
        free.release()
        time.sleep(LOOK_S)


def has_all(held: HeldDevices, host: Host) -> bool:
    """Return True if these are all devices of the host: its GPUs, or without any the host alone."""
    return bool(held.descriptors) and len(held.gpus) == len(host.gpus) and (held.alone or bool(host.gpus))


def serve(settings: Settings, handed: HandedOver, nodes: int, index: int) -> None:
    """Run the ranks of one further node, until a signal."""
    settings.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    Node(settings, nodes_of(handed, nodes), index).serve()
    logger.info("node %d has ended", index)
