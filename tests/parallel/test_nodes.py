"""Ranks on several nodes: here, processes of one host that reach each other by TCP."""

import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from parallel.nodes import Nodes, interface_to
from parallel.process_group import RanksFailed, children_of, launch
from tests.parallel.node_functions import add_up
from tests.processes import alive

SERVE = """
import sys
from pathlib import Path
from parallel import nodes
from parallel.node_ranks import serve_node
from parallel.nodes import Nodes
nodes.HANDSHAKE_S = 1.0
serve_node(Nodes.from_json(sys.argv[1]), 1, folder=Path(sys.argv[2]), facts={"name": "second"})
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def second_node(nodes: Nodes, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    (folder / "second").mkdir()
    command = [sys.executable, "-c", SERVE, nodes.to_json(), str(folder / "second")]
    process = subprocess.Popen(command)
    try:
        yield process
        assert children_of(process.pid) == [], "its ranks have ended"
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def nodes() -> Nodes:
    return Nodes(2, "127.0.0.1", [free_port(), free_port()], secrets.token_hex(16))


def run(nodes: Nodes, folder: Path, fail_at: int | None = None) -> tuple[list[Any], list[Any]]:
    met: list[Any] = []
    results = launch(
        add_up, fail_at, world_size=2, backend="gloo", folder=folder, nodes=nodes, met=met.extend, start_timeout_s=60
    )
    return results, met


def test_ranks_of_two_nodes_meet_again_and_one_that_dies_ends_all(nodes: Nodes, tmp_path: Path) -> None:
    before = set(children_of(os.getpid()))
    with second_node(nodes, tmp_path) as second, closing(socket.socket()) as stranger:
        stranger.bind((nodes.address, nodes.ports[0]))  # who is there is silent
        stranger.listen()
        results, met = run(nodes, tmp_path)
        assert [result["sum"] for result in results] == [1.0] * 2
        assert [result["local_rank"] for result in results] == [0, 0]
        assert [result["launcher"] for result in results] == [os.getpid(), second.pid]
        assert met == [{"name": "second"}]
        assert (tmp_path / "rank-1.log").read_text() == "this is rank 1\n"
        with pytest.raises(RanksFailed) as raised:
            run(nodes, tmp_path, fail_at=1)
        assert raised.value.rank == 1
        assert "this is rank 1" in raised.value.log
        # Rank 0, which waited for it in an all-reduce, has ended.
        assert not alive([pid for pid in children_of(os.getpid()) if pid not in {*before, second.pid}])


def test_who_has_another_key_is_no_node(nodes: Nodes, tmp_path: Path) -> None:
    other = Nodes(2, nodes.address, nodes.ports, secrets.token_hex(16))
    with second_node(other, tmp_path), pytest.raises(RanksFailed, match="did not start"):
        launch(add_up, None, world_size=2, backend="gloo", folder=tmp_path, nodes=nodes, start_timeout_s=4)


def test_gloo_uses_the_network_by_which_nodes_reach_each_other() -> None:
    assert interface_to("127.0.0.1") == "lo"
