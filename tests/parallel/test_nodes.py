"""Ranks on several nodes: here, processes of one host that reach each other by TCP."""

import os
import secrets
import signal
import socket
import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from parallel import nodes as nodes_module
from parallel.node_ranks import serve_node
from parallel.nodes import Nodes, interface_to
from parallel.process_group import RanksFailed, children_of, launch
from tests.parallel.node_functions import add_up
from tests.processes import alive


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def second_node(nodes: Nodes, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The process of another node: a fork, since it has torch."""
    (folder / "second").mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        process = os.fork()
    if process == 0:
        try:
            monkeypatch.setattr(nodes_module, "HANDSHAKE_S", 1.0)
            serve_node(nodes, 1, folder=folder / "second", facts={"name": "second"})
        finally:
            os._exit(1)
    try:
        yield process
        assert children_of(process) == [], "its ranks have ended"
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)


@pytest.fixture
def nodes() -> Nodes:
    return Nodes(2, "127.0.0.1", [free_port(), free_port()], secrets.token_hex(16))


def run(nodes: Nodes, folder: Path, fail_at: int | None = None) -> tuple[list[Any], list[Any]]:
    met: list[Any] = []
    results = launch(
        add_up, fail_at, world_size=2, backend="gloo", folder=folder, nodes=nodes, met=met.extend, start_timeout_s=60
    )
    return results, met


def test_ranks_of_two_nodes_meet_again_and_one_that_dies_ends_all(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = set(children_of(os.getpid()))
    with second_node(nodes, tmp_path, monkeypatch) as second, closing(socket.socket()) as stranger:
        stranger.bind((nodes.address, nodes.ports[0]))  # who is there is silent
        stranger.listen()
        results, met = run(nodes, tmp_path)
        assert [result["sum"] for result in results] == [1.0] * 2
        assert [result["local_rank"] for result in results] == [0, 0]
        assert [result["launcher"] for result in results] == [os.getpid(), second]
        assert met == [{"name": "second"}]
        assert (tmp_path / "rank-1.log").read_text() == "this is rank 1\n"
        with pytest.raises(RanksFailed) as raised:
            run(nodes, tmp_path, fail_at=1)
        assert raised.value.rank == 1
        assert "this is rank 1" in raised.value.log
        # Rank 0, which waited for it in an all-reduce, has ended.
        assert not alive([pid for pid in children_of(os.getpid()) if pid not in {*before, second}])


def test_who_has_another_key_is_no_node(nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = Nodes(2, nodes.address, nodes.ports, secrets.token_hex(16))
    with second_node(other, tmp_path, monkeypatch), pytest.raises(RanksFailed, match="did not start"):
        launch(add_up, None, world_size=2, backend="gloo", folder=tmp_path, nodes=nodes, start_timeout_s=4)


def test_gloo_uses_the_network_by_which_nodes_reach_each_other() -> None:
    assert interface_to("127.0.0.1") == "lo"
