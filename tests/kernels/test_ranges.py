import os
import subprocess
import sys

import pytest
import torch

from kernels import ranges
from kernels.ranges import has_recorder, named, record_ranges


def seen(work) -> set[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        work()
    return {event.name for event in profiler.events()}


def work() -> None:
    with named("scores"):
        torch.ones(3)


def test_work_is_named_only_while_somebody_listens() -> None:
    assert "scores" not in seen(work)
    with record_ranges():
        assert has_recorder()
        assert "scores" in seen(work)
        with record_ranges():
            pass
        assert has_recorder(), "the outer one still listens"
    assert not has_recorder()


def test_an_error_closes_the_range_and_ends_the_listening() -> None:
    def fail() -> None:
        with record_ranges(), named("scores"):
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fail()
    assert not has_recorder()


@pytest.mark.long
def test_an_outside_profiler_listens_from_the_start() -> None:
    code = "from kernels.ranges import has_recorder; raise SystemExit(not has_recorder())"
    environment = {**os.environ, ranges.OUTSIDE_PROFILER_VARIABLE: "/opt/injection.so"}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0


def test_a_compiled_function_has_no_ranges() -> None:
    graphs = []

    def backend(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    @torch.compile(backend=backend, fullgraph=True)
    def multiply(x):
        with named("scores"):
            return x * 2

    torch._dynamo.reset()
    x = torch.ones(3)
    multiply(x)
    with record_ranges():
        assert "scores" not in seen(lambda: multiply(x))
    assert len(graphs) == 1
    torch._dynamo.reset()
