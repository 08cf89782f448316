"""Measured ceilings of this host's devices, one small file per device, which jobs of other kinds read.

A job's process has no database, so the files are on the host's own disk. They keep the newest rate of each data type.
"""

import json
import re
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import torch

from workers.measure.environment import device_name

NO_CEILING = "no measured ceiling of this device is on record: run a job of kind ceiling on this worker"


@dataclass(frozen=True)
class Rate:
    """A measured rate, when it was measured (RFC 3339, UTC), and the rate of its fastest sample less that of its
    slowest."""

    value: float
    measured_at: str
    spread: float = 0.0


@dataclass(frozen=True)
class Ceiling:
    """The rates that a device reached: matrix products in TFLOP/s by precision ("fp32", …), copies in GB/s (read +
    written)."""

    device: str
    tflops: Mapping[str, Rate] = field(default_factory=dict)
    copy_gb_per_s: Rate | None = None


class Ceilings:
    """The files, in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self, device: torch.device) -> Ceiling | None:
        """Return the recorded ceilings; None if there are none, or if the file cannot be understood."""
        try:
            stored = json.loads(self._path(device).read_text(encoding="utf-8"))
            copy = stored["copy_gb_per_s"]
            return Ceiling(
                device=stored["device"],
                tflops={precision: Rate(**rate) for precision, rate in stored["tflops"].items()},
                copy_gb_per_s=None if copy is None else Rate(**copy),
            )
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def record(
        self,
        device: torch.device,
        tflops: Mapping[str, float],
        copy_gb_per_s: float | None,
        at: datetime | None = None,
        *,
        spread: float = 0.0,
    ) -> None:
        """Record new rates, which have this spread; data types that were not measured now keep their old rates. Raises
        OSError: the file cannot be written."""
        now = (at or datetime.now(UTC)).strftime("%Y-%m-%dT%H:%M:%SZ")
        known = self.read(device) or Ceiling(device_name(device))
        ceiling = Ceiling(
            device=device_name(device),
            tflops={**known.tflops, **{name: Rate(value, now, spread) for name, value in tflops.items()}},
            copy_gb_per_s=known.copy_gb_per_s if copy_gb_per_s is None else Rate(copy_gb_per_s, now, spread),
        )
        self._folder.mkdir(parents=True, exist_ok=True)
        # Replace the file in one step: another job may read it now.
        with tempfile.NamedTemporaryFile("w", dir=self._folder, encoding="utf-8", delete=False) as file:
            written = Path(file.name)
            try:
                json.dump(asdict(ceiling), file, indent=2)
                file.flush()
                written.replace(self._path(device))
            except OSError:
                written.unlink()
                raise

    def tflops(self, device: torch.device, precision: str) -> tuple[float | None, str]:
        """Return the ceiling of matrix products and when it was measured, or None and the reason why there is none."""
        ceiling = self.read(device)
        if ceiling is None:
            return None, NO_CEILING
        rate = ceiling.tflops.get(precision)
        if rate is None:
            return None, f"no measured ceiling of this device in {precision} is on record"
        return rate.value, f"measured at {rate.measured_at}"

    def copy_gb_per_s(self, device: torch.device) -> tuple[float | None, str]:
        """Return the bandwidth of copies and when it was measured, or None and the reason why there is none."""
        ceiling = self.read(device)
        if ceiling is None or ceiling.copy_gb_per_s is None:
            return None, NO_CEILING
        return ceiling.copy_gb_per_s.value, f"measured at {ceiling.copy_gb_per_s.measured_at}"

    def _path(self, device: torch.device) -> Path:
        return self._folder / f"{_identity(device)}.json"


def _identity(device: torch.device) -> str:
    """Return a GPU's UUID, or a CPU's model with torch's number of threads, on which its rate depends."""
    if device.type == "cuda":
        return f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    return f"cpu-{re.sub(r'[^a-z0-9]+', '-', device_name(device).lower()).strip('-')}-{torch.get_num_threads()}-threads"
