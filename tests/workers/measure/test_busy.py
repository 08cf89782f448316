import time

import pytest
import torch

from workers.measure.busy import Busy, device_work, measure_busy


@pytest.mark.gpu
def test_a_device_is_busy_while_kernels_run() -> None:
    x = torch.randn(4096, 4096, device="cuda")
    x @ x

    def step() -> None:
        x @ x
        torch.cuda.synchronize()
        time.sleep(0.02)
        x @ x

    start = time.perf_counter()
    step()
    torch.cuda.synchronize()
    wall_ms = 1e3 * (time.perf_counter() - start)
    busy = measure_busy(step)
    assert isinstance(busy, Busy)
    assert busy.launches >= 2
    assert 0 < busy.busy_ms < wall_ms - 20


@pytest.mark.gpu
def test_kernels_of_a_cuda_graph_are_seen() -> None:
    x = torch.randn(1024, 1024, device="cuda")
    y = torch.empty_like(x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.mul(x, 2, out=y)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(5):
            torch.mul(x, 2, out=y)
    assert len(device_work(graph.replay)) == 5


@pytest.mark.gpu
def test_a_step_without_device_work_says_why() -> None:
    assert "saw no kernel" in str(measure_busy(lambda: None))
