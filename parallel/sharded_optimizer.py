"""An optimizer whose state is divided among the ranks.

Only one rank keeps a parameter's optimizer state and updates the parameter; then all ranks gather the new values.
Parameters of similar size form a chunk, whose memory is contiguous and has equally long parts for the ranks, so that
one all-gather without copies exchanges a chunk. It runs while the next chunk is being updated.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from kernels.clock import now_s, sleep

from .collectives import (
    MIB,
    Work,
    aligned,
    check_same_everywhere,
    group_of,
    owns_its_memory,
    start_all_gather,
    start_broadcast,
    strides_of,
    view_like,
)
from .silent_group import SilentGroup
from .step_check import refuse_parts, refuse_shared_memory

CHUNKS = 8
"""Number of chunks of a large model: the first chunk's update and the last one's exchange overlap with nothing."""
LEAST_CHUNK_BYTES = 32 * MIB
SMALL_NUMEL = 64
"""State tensors up to this size are sent with the description of the state when it is consolidated."""
RELEASE_S = 0.2
"""Longest delay, in seconds, until a backend has released the parameters that it has sent before."""
NOT_HYPERPARAMETERS = ("params", "param_names")


@dataclass
class Chunk:
    """Parameters of one dtype that are exchanged together."""

    parameters: list[list[Tensor]]
    """By rank: the parameters that it updates."""
    piece: int = 0
    """Elements per rank."""
    memory: Tensor = field(default_factory=lambda: torch.empty(0))
    """All parameters' memory: ranks × piece elements."""

    def holds_its_parameters(self) -> bool:
        begin, end = self.memory.data_ptr(), self.memory.data_ptr() + self.memory.nbytes
        return all(begin <= one.data_ptr() < end or not one.numel() for mine in self.parameters for one in mine)


class ShardedOptimizer(Optimizer):
    """Divides an optimizer's state among the ranks; each rank updates its parameters and fetches the others'.

    With P bytes of parameters, K·P of optimizer state (AdamW: K = 2; 6 for bfloat16 with float32 master weights) and n
    ranks, each rank keeps K·P/n of state instead of K·P. Each step it sends and receives P·(n-1)/n to exchange the
    parameters, besides the 2·P·(n-1)/n of the gradients' all-reduce. ZeRO stage 1 (Rajbhandari et al., 2020, section
    5.1) keeps the same K·P/n of state but reduces each gradient to its owner alone, so it moves P·(n-1)/n for gradients
    and as much for parameters; in exchange, no rank has all averaged gradients then, and clipping by a global norm
    needs another exchange. Here gradients come averaged from any of the data-parallel wrappers.

    Parameters are assigned by size, the largest first, each to the rank with the fewest bytes (the lowest of several),
    so all ranks come to the same assignment. Parameters that alone use their memory are moved into a chunk's shared
    memory, so other tensors that alias the old memory do not see later values. The optimizer must treat parameters one
    by one, as torch's do except LBFGS: it is called for each chunk.

    Learning rates and other hyper-parameters are those of `param_groups`, as in any optimizer; schedulers work. `state`
    holds this rank's part.

    Args:
        params: Parameters or parameter groups, the same in the same order on every rank, with gradients that are the
            same on every rank when `step` is called.
        optimizer_cls: The optimizer, called with this rank's parameter groups and `kwargs`.
        process_group: The ranks; by default all of them.
        kwargs: Hyper-parameters.

    Raises:
        ValueError: no parameters, hyper-parameters that the optimizer refuses, or a process group without this rank.
        RuntimeError: no process group is initialised, or the ranks' parameters differ.
        TypeError: the parameters are those of a FullyShardedDataParallel, which differ from rank to rank; or two of
            them are one memory.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_cls: type[Optimizer],
        *,
        process_group: dist.ProcessGroup | None = None,
        **kwargs: Any,
    ) -> None:
        self.group = group_of(process_group)
        self._rank = self.group.rank()
        self._owner: dict[Tensor, int] = {}
        self._bytes = [0] * self.group.size()
        self._chunks: list[Chunk] = []
        self._loose: list[Tensor] = []
        """Parameters that are exchanged one by one, where they are."""
        self._consolidated: dict[int, Any] | None = None
        self._local: Optimizer | None = None
        super().__init__(params, kwargs)
        self._divide([parameter for group in self.param_groups for parameter in group["params"]])
        self._local = optimizer_cls([self._local_group(group) for group in self.param_groups], **kwargs)
        self.defaults = self._local.defaults  # by which schedulers know what there is to schedule
        self._take_over()

    def __getstate__(self) -> Any:
        raise TypeError(
            "a ShardedOptimizer can be neither copied nor pickled: save what state_dict() returns after "
            "consolidate_state_dict()"
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group; call it on every rank. Its parameters go to the ranks with the fewest bytes so far."""
        super().add_param_group(param_group)
        if self._local is None:
            return  # torch's constructor adds the first groups
        group = self.param_groups[-1]
        self._divide(group["params"])
        self._local.add_param_group(self._local_group(group))
        group.update(_hyperparameters(self._local.param_groups[-1]))

    def step(self, closure: Callable[[], float] | None = None, **kwargs: Any) -> None:  # type: ignore[override]
        """Update every parameter on every rank.

        Args:
            closure: Refused: optimizers call it during their step, where ranks would run backward passes, and wait for
                each other, in different numbers.
            kwargs: Passed to the optimizer's own `step`.

        Raises:
            ValueError: there is a closure.
            RuntimeError: a parameter has other memory than before, of which the other ranks would see no update.
        """
        if closure is not None:
            raise ValueError(
                "ShardedOptimizer.step takes no closure: ranks would call it differently often; compute the loss and "
                "its gradients before the step"
            )
        assert self._local is not None
        if not all(chunk.holds_its_parameters() for chunk in self._chunks):
            raise RuntimeError(
                "a parameter was given new memory after ShardedOptimizer had moved it, as by module.to(dtype): make "
                "the optimizer after that"
            )
        self._consolidated = None
        self._local.state = self.state  # which may have been replaced
        settings = [_hyperparameters(group) for group in self.param_groups]
        counters = {name: value for name, value in vars(self._local).items() if isinstance(value, int | float)}
        members = [group["params"] for group in self._local.param_groups]
        for group, setting in zip(self._local.param_groups, settings, strict=True):
            group.update(setting)  # also on a rank that updates nothing
        works: list[Work] = []
        with torch.no_grad():
            try:
                for chunk in self._chunks:
                    self._update(chunk.parameters[self._rank], settings, counters, members, kwargs)
                    start = self._rank * chunk.piece
                    own = chunk.memory[start : start + chunk.piece]
                    works.append(start_all_gather(chunk.memory, own, self.group))
                loose = [parameter for parameter in self._loose if self._owner[parameter] == self._rank]
                self._update(loose, settings, counters, members, kwargs)
            finally:
                for group, parameters in zip(self._local.param_groups, members, strict=True):
                    group["params"] = parameters
            works += [self._broadcast(parameter) for parameter in self._loose if parameter.requires_grad]
            for work in works:
                work.wait()
        self._take_over()

    def _update(
        self,
        parameters: Sequence[Tensor],
        settings: list[dict[str, Any]],
        counters: dict[str, float],
        members: list[list[Tensor]],
        kwargs: dict[str, Any],
    ) -> None:
        """Update only some of the optimizer's parameters, by hiding the others from it."""
        assert self._local is not None
        chosen = set(parameters)
        if not chosen:
            return
        # Counters in the optimizer and its groups must count steps, not chunks.
        vars(self._local).update(counters)
        for group, setting, all_members in zip(self._local.param_groups, settings, members, strict=True):
            group.clear()
            group.update(setting)
            group["params"] = [parameter for parameter in all_members if parameter in chosen]
        self._local.step(**kwargs)

    def _broadcast(self, parameter: Tensor) -> Work:
        source = dist.get_global_rank(self.group, self._owner[parameter])
        if parameter.is_contiguous():
            return start_broadcast(parameter.detach(), source, self.group)
        dense = parameter.detach().contiguous()
        start_broadcast(dense, source, self.group).wait()
        parameter.detach().copy_(dense)
        return _Done()

    def _divide(self, parameters: Sequence[Tensor]) -> None:
        """Assign new parameters to ranks, and put them into chunks."""
        named = [(f"parameter {number}", one) for number, one in enumerate(parameters)]
        refuse_parts(named)
        refuse_shared_memory(named)
        described = [(tuple(p.shape), str(p.dtype), p.requires_grad) for p in parameters]
        if parameters:
            check_same_everywhere("list of parameters", described, parameters[0].device, self.group)
        by_size = sorted(parameters, key=lambda parameter: -parameter.nbytes)
        for parameter in by_size:
            owner = min(range(len(self._bytes)), key=self._bytes.__getitem__)
            self._owner[parameter] = owner
            self._bytes[owner] += parameter.nbytes
        kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        # All ranks must decide alike, even if other tensors use this rank's memory.
        movable = self._movable_everywhere(by_size)
        for parameter in by_size:
            if parameter in movable:
                kinds.setdefault((parameter.device, parameter.dtype), []).append(parameter)
            else:
                self._loose.append(parameter)
        for kind in kinds.values():
            self._chunks += [self._moved(chunk) for chunk in self._into_chunks(kind)]

    def _movable_everywhere(self, parameters: Sequence[Tensor]) -> set[Tensor]:
        if not parameters:
            return set()
        # gloo's threads release the tensors of a broadcast a moment after its caller continues.
        until = now_s() + RELEASE_S
        here = [
            parameter.requires_grad
            and parameter.stride() == strides_of(parameter)
            and _owns_its_memory_before(until, parameter)
            for parameter in parameters
        ]
        flags = torch.tensor(here, dtype=torch.uint8, device=parameters[0].device)
        dist.all_reduce(flags, op=dist.ReduceOp.MIN, group=self.group)
        return {parameter for parameter, flag in zip(parameters, flags.tolist(), strict=True) if flag}

    def _into_chunks(self, parameters: Sequence[Tensor]) -> list[Chunk]:
        """Cut the parameters, the largest first, where one rank's share of a chunk is complete.

        Neighbours in this order have similar sizes and different ranks, so the ranks' shares are about equal.
        """
        ranks = self.group.size()
        share = max(LEAST_CHUNK_BYTES, sum(p.nbytes for p in parameters) / CHUNKS) / ranks
        chunks: list[Chunk] = []
        filled = [share] * ranks
        for parameter in parameters:
            if max(filled) >= share:
                chunks.append(Chunk([[] for _ in range(ranks)]))
                filled = [0.0] * ranks
            owner = self._owner[parameter]
            chunks[-1].parameters[owner].append(parameter)
            filled[owner] += parameter.nbytes
        return chunks

    @torch.no_grad()
    def _moved(self, chunk: Chunk) -> Chunk:
        """Move a chunk's parameters into memory of its own."""
        sizes = [[aligned(p.numel(), p.element_size()) for p in mine] for mine in chunk.parameters]
        first = next(parameter for mine in chunk.parameters for parameter in mine)
        chunk.piece = max(sum(mine) for mine in sizes)
        chunk.memory = torch.zeros(chunk.piece * len(sizes), dtype=first.dtype, device=first.device)
        if isinstance(self.group, SilentGroup):
            self.group.keep(chunk.memory)
        for rank, mine in enumerate(chunk.parameters):
            start = rank * chunk.piece
            for parameter, size in zip(mine, sizes[rank], strict=True):
                place = view_like(parameter, chunk.memory, start)
                place.copy_(parameter)
                parameter.data = place
                start += size
        return chunk

    def _local_group(self, group: dict[str, Any]) -> dict[str, Any]:
        mine = [parameter for parameter in group["params"] if self._owner[parameter] == self._rank]
        return {"params": mine, **_hyperparameters(group)}

    def _take_over(self) -> None:
        """Adopt the optimizer's state and hyper-parameters, including its defaults."""
        assert self._local is not None
        self.state = self._local.state
        for group, local in zip(self.param_groups, self._local.param_groups, strict=True):
            group.update(_hyperparameters(local))

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Collect all ranks' state on one rank, in its host memory; call it on every rank.

        `state_dict` of that rank is then the whole one, until the next step.

        Args:
            to: The rank's number in the process group.

        Raises:
            ValueError: there is no such rank.
        """
        if not 0 <= to < self.group.size():
            raise ValueError(f"to must be a rank from 0 to {self.group.size() - 1}, not {to}")
        mine = self._own_state()
        large = [(i, key) for i, state in mine.items() for key, value in state.items() if self._travels_alone(value)]
        described = {
            i: {key: _described(value) if (i, key) in set(large) else _on_host(value) for key, value in state.items()}
            for i, state in mine.items()
        }
        receiver = dist.get_global_rank(self.group, to)
        parts: list[Any] | None = [None] * self.group.size() if self._rank == to else None
        dist.gather_object((large, described), parts, receiver, group=self.group)
        if parts is None:
            for i, key in large:
                dist.send(mine[i][key].contiguous(), receiver, group=self.group)
            return
        whole: dict[int, Any] = {}
        device = self.param_groups[0]["params"][0].device
        for rank, (names, states) in enumerate(parts):
            for i, key in names:
                shape, strides, dtype = states[i][key]
                if rank == to:
                    states[i][key] = _on_host(mine[i][key])
                    continue
                arrived = torch.empty(shape, dtype=dtype, device=device)
                dist.recv(arrived, dist.get_global_rank(self.group, rank), group=self.group)
                # Fused optimizers read it in the order of its parameter's memory.
                states[i][key] = torch.empty_strided(shape, strides, dtype=dtype).copy_(arrived)
            whole.update(states)
        self._consolidated = whole

    def _travels_alone(self, value: object) -> bool:
        first = self.param_groups[0]["params"][0]
        return isinstance(value, Tensor) and value.numel() > SMALL_NUMEL and value.device == first.device

    def _own_state(self) -> dict[int, Any]:
        """This rank's state, by the parameters' numbers over all groups."""
        everything = (parameter for group in self.param_groups for parameter in group["params"])
        return {i: self.state[parameter] for i, parameter in enumerate(everything) if parameter in self.state}

    def state_dict(self) -> dict[str, Any]:
        """Return the state in the format of torch's optimizers.

        On the rank that has just consolidated it, that is the whole state, as an optimizer that is not sharded would
        have it and could load it. Otherwise it is this rank's part, marked as such, which only the same rank of as many
        ranks can load.
        """
        numbers = {p: i for i, p in enumerate(p for group in self.param_groups for p in group["params"])}
        groups = [
            {**_hyperparameters(group), "params": [numbers[parameter] for parameter in group["params"]]}
            for group in self.param_groups
        ]
        if self._consolidated is not None:
            return {"state": self._consolidated, "param_groups": groups}
        part = {"rank": self._rank, "world_size": self.group.size()}
        return {"state": self._own_state(), "param_groups": groups, "part": part}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load this rank's part of a state: of a whole one, from any number of ranks, or of its own part.

        Raises:
            ValueError: it is another rank's part, or of other parameter groups.
        """
        assert self._local is not None
        part = state_dict.get("part")
        if part is not None and part != {"rank": self._rank, "world_size": self.group.size()}:
            raise ValueError(
                f"this is the part of rank {part['rank']} of {part['world_size']}, not of rank {self._rank} of "
                f"{self.group.size()}: call consolidate_state_dict before saving"
            )
        theirs = state_dict["param_groups"]
        if [len(group["params"]) for group in theirs] != [len(group["params"]) for group in self.param_groups]:
            raise ValueError("the loaded state has other parameter groups than this optimizer")
        numbers = {
            parameter: number
            for group, saved in zip(self.param_groups, theirs, strict=True)
            for parameter, number in zip(group["params"], saved["params"], strict=True)
        }
        local = self._local.state_dict()
        mine = (p for group in self._local.param_groups for p in group["params"])
        local["state"] = {
            i: state_dict["state"][numbers[parameter]]
            for i, parameter in enumerate(mine)
            if numbers[parameter] in state_dict["state"]
        }
        for group, saved in zip(local["param_groups"], theirs, strict=True):
            group.update(_hyperparameters(saved))
        self._local.load_state_dict(local)
        self._consolidated = None
        self._take_over()


def _owns_its_memory_before(until_s: float, parameter: Tensor) -> bool:
    while not owns_its_memory(parameter):
        if now_s() > until_s:
            return False
        sleep(0.001)
    return True


class _Done:
    def wait(self) -> None:
        return


def _hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in NOT_HYPERPARAMETERS}


def _described(value: Tensor) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
    return tuple(value.shape), strides_of(value), value.dtype


def _on_host(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, Tensor) else value
