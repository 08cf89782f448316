"""Readings of the host's devices, beside the heartbeat."""

from typing import Any

from flopwatch.text.times import parsed_time
from tools.waiting import wait_until
from workers.agent import readings
from workers.agent.readings import Readings
from workers.devices.discovery import Gpu, Host

HOST = Host(gpus=(Gpu("GPU-a", "A", 81_920), Gpu("GPU-b", "B", 81_920)), cpu_count=2, memory_mib=4096)


class Busy:
    """A GPU that NVML knows."""

    def load(self) -> dict[str, Any]:
        return dict.fromkeys(readings.UNKNOWN_GPU_LOAD, 7)


def test_each_device_in_the_order_of_the_registration() -> None:
    reading = readings.read(HOST, lambda uuid: Busy() if uuid == "GPU-a" else None)  # type: ignore[arg-type,return-value]
    cpu, known, unknown = reading["devices"]
    assert (cpu["type"], known["uuid"], unknown["uuid"]) == ("cpu", "GPU-a", "GPU-b")
    assert cpu["memory_used_mib"] > 0
    assert 0 <= cpu["utilisation_percent"] <= 100
    assert known["utilisation_percent"] == 7
    assert {name: unknown[name] for name in readings.UNKNOWN_GPU_LOAD} == readings.UNKNOWN_GPU_LOAD
    assert parsed_time(reading["read_at"]).tzinfo is not None


def test_an_error_does_not_end_the_readings() -> None:
    answers: list[Any] = [OSError("no descriptor"), {"devices": [1]}]

    def faulty(_host: Host) -> dict[str, Any]:
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, Exception):
            raise answer
        return dict(answer)

    reader = Readings(HOST, 0.001, faulty)
    reader.start()
    wait_until(lambda: reader.latest() == {"devices": [1]})
    reader.stop()
