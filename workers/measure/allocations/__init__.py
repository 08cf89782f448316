"""Records the allocations of a step, finds the purpose of each, and writes snapshots for pytorch.org/memory_viz.

`make_recording` returns the recording of a device: `cuda` records a GPU's allocator, `cpu` a CPU's, and `recording` is
their common interface. `ledger` follows the history and gives each allocation one of the `categories`. `snapshot` reads
and writes torch's format, in which both recordings keep their history. `stacks` finds the line of code behind an
allocation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from workers.measure.allocations.recording import Recording


def make_recording(device: torch.device, max_entries: int) -> Recording:
    """Make the recording of a device, with a history of at most `max_entries` entries."""
    from workers.measure.allocations.cpu import CpuRecording
    from workers.measure.allocations.cuda import CudaRecording

    return CudaRecording(device, max_entries) if device.type == "cuda" else CpuRecording(max_entries)
