"""The ranks of a node that did not launch them: it starts them when node 0 launches, and ends them with its connection.

    serve_node(nodes, 1, folder=logs, facts={"hostname": …})

The ranks report to node 0 by connections of their own, so this node interprets nothing.
"""

import json
import os
import signal
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import NoReturn

from .nodes import Nodes
from .process_group import END_S, Elastic, LaunchRequest, Plain, children_of, log_file, search_path, shared_memory_of

LOOK_S = 0.2
LOG_BYTES = 64 << 10
"""Bytes of a rank's log, from its end, that node 0 gets."""


def serve_node(nodes: Nodes, index: int, *, folder: Path, facts: Plain) -> NoReturn:
    """Run this node's ranks of each launch at node 0, until this process is ended.

    Args:
        nodes: The same as node 0's.
        index: This node's, from 1.
        folder: An existing folder for the logs.
        facts: Plain data about this node, for node 0.
    """
    while True:
        with nodes.reach() as connection, suppress(EOFError, OSError):
            connection.send_bytes(json.dumps({"node": index, "facts": facts}).encode())
            _run_ranks(connection, LaunchRequest.from_json(connection.recv_bytes()), index, folder)


def _run_ranks(connection: Connection, request: LaunchRequest, index: int, folder: Path) -> None:
    """Run the ranks of one launch until node 0 closes the connection."""
    for file in folder.glob("rank-*.log"):
        file.unlink()
    own = replace(request, path=search_path(), parent=os.getpid())
    elastic = Elastic(own, folder, node=index)
    elastic.start()
    told = False
    try:
        while True:
            if wait([connection], timeout=LOOK_S):
                rank = int(connection.recv_bytes())
                with suppress(FileNotFoundError):
                    connection.send_bytes(log_file(folder, rank).read_bytes()[-LOG_BYTES:])
            elif elastic.error is not None and not told:
                told = True
                connection.send_bytes(json.dumps(f"could not start its ranks: {elastic.error}").encode())
    finally:
        _end_ranks(own.to_json())
        elastic.join(END_S)


def _end_ranks(request: str) -> None:
    """Kill this process's ranks, and remove shared memory that they have not removed themselves."""
    ranks: dict[int, int] = {}
    for pid in children_of(os.getpid()):
        with suppress(OSError):  # it has ended
            if request.encode() in Path(f"/proc/{pid}/environ").read_bytes():
                ranks[pid] = os.pidfd_open(pid)
    shared = {file for pid in ranks for file in shared_memory_of(pid)}
    for process in ranks.values():
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(process, signal.SIGKILL)
    for process in ranks.values():
        wait([process], timeout=END_S)
        os.close(process)
    for file in shared:
        file.unlink(missing_ok=True)
