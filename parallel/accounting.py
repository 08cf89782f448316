"""Formulas for the bytes that ranks exchange in a collective operation and in a training step. Needs no torch.

Sizes of all operations are those of the whole tensor: the output of an all-gather, the input of a reduce-scatter.
NCCL's rings move the fewest bytes possible (Patarasuk and Yuan, "Bandwidth optimal all-reduce
algorithms for clusters of workstations", 2009, sections 3 and 4), and nccl-tests derives its bus bandwidth from the
same counts (NVIDIA, nccl-tests, doc/PERFORMANCE.md, "Bandwidth"). NVLink multicast (NVLS) moves fewer.
"""

from dataclasses import dataclass

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send_receive")
STRATEGIES = ("none", "naive", "flat", "overlapped", "bucketed", "torch_ddp", "fsdp", "torch_fsdp")
SHARDING = ("fsdp", "torch_fsdp")


def traffic_factor(operation: str, ranks: int) -> float:
    """Return the bytes that one rank's link must carry in each direction, per byte of the whole tensor.

    all_reduce       2 (n-1)/n   a reduce-scatter and an all-gather
    all_gather       (n-1)/n     every piece but one's own comes in
    reduce_scatter   (n-1)/n     every piece but one's own goes out
    broadcast        1           the whole tensor passes through
    all_to_all       (n-1)/n     every piece but one's own goes out
    send_receive     1           the whole tensor goes to the next rank

    Source: nccl-tests, doc/PERFORMANCE.md, "Bandwidth".

    Raises:
        ValueError: no such operation, or fewer than one rank.
    """
    if ranks < 1:
        raise ValueError(f"ranks must be 1 or more, not {ranks}")
    match operation:
        case "all_reduce":
            return 2 * (ranks - 1) / ranks
        case "all_gather" | "reduce_scatter" | "all_to_all":
            return (ranks - 1) / ranks
        case "broadcast" | "send_receive":
            return 1.0 if ranks > 1 else 0.0
    raise ValueError(f"unknown operation {operation!r}; known are {', '.join(OPERATIONS)}")


def algorithm_bandwidth(size_bytes: int, seconds: float) -> float:
    """Return bytes of the whole tensor per second. Source: nccl-tests, doc/PERFORMANCE.md, "Algorithm bandwidth"."""
    return size_bytes / seconds


def bus_bandwidth(operation: str, size_bytes: int, seconds: float, ranks: int) -> float:
    """Return bytes per second on one rank's link: comparable between operations and numbers of ranks.

    Source: nccl-tests, doc/PERFORMANCE.md, "Bus bandwidth": algorithm bandwidth times `traffic_factor`.
    """
    return algorithm_bandwidth(size_bytes, seconds) * traffic_factor(operation, ranks)


@dataclass(frozen=True)
class Traffic:
    """Bytes of whole tensors that go through each kind of operation in one step."""

    all_reduce: int = 0
    all_gather: int = 0
    reduce_scatter: int = 0


def step_traffic(
    strategy: str,
    *,
    gradient_bytes: int,
    parameter_bytes: int,
    sharded_bytes: int = 0,
    gathered_once_bytes: int = 0,
    frozen_bytes: int = 0,
    sharded_optimizer: bool = False,
    micro_batches: int = 1,
) -> Traffic:
    """Return the traffic of one training step.

    With every strategy of data parallelism, all gradients are all-reduced; strategies differ only in the time (Li et
    al., 2020, section 3.2). A sharded optimizer then gathers the parameters (ZeRO stage 1 with a whole all-reduce:
    Rajbhandari et al., 2020, section 7.1). Full sharding gathers each sharded parameter for the forward and for the
    backward pass, and reduces its gradient to its owners (stage 3, section 7.2.2: 3/2 of data parallelism); parameters
    that every rank keeps are all-reduced.

    Args:
        strategy: One of STRATEGIES.
        gradient_bytes: Of all trainable parameters' gradients, in the dtype in which they travel.
        parameter_bytes: Of all trainable parameters.
        sharded_bytes: With full sharding: of the sharded parameters, in the dtype in which they travel; the others'
            gradients are `gradient_bytes - sharded_bytes`.
        gathered_once_bytes: The part of sharded and frozen bytes that stays gathered from the forward to the backward
            pass, as the root unit of torch's FSDP2 does; all of them if nothing is resharded after the forward pass,
            which sends what ZeRO's stages 1 and 2 do (section 7.2.1).
        frozen_bytes: With full sharding: of the sharded parameters without gradients, which are gathered all the same.
        sharded_optimizer: Whether the optimizer's state is divided, with data parallelism.
        micro_batches: Forward and backward passes of the step. Full sharding gathers and reduces in each of them;
            everything else is exchanged once.

    Raises:
        ValueError: an unknown strategy, or a sharded optimizer where everything is sharded or nothing is exchanged.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"unknown strategy {strategy!r}; known are {', '.join(STRATEGIES)}")
    if sharded_optimizer and strategy in (*SHARDING, "none"):
        raise ValueError(f"sharded_optimizer does not go with the strategy {strategy!r}")
    if strategy == "none":
        return Traffic()
    if strategy in SHARDING:
        kept = gradient_bytes - sharded_bytes
        gathered = 2 * (sharded_bytes + frozen_bytes) - gathered_once_bytes
        return Traffic(kept, micro_batches * gathered, micro_batches * sharded_bytes)
    return Traffic(all_reduce=gradient_bytes, all_gather=parameter_bytes if sharded_optimizer else 0)
