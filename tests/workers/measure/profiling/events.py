"""Makes events like the profiler's."""

from typing import Any

from workers.measure.profiling.recording import DeviceEvent, HostEvent, Recording


def host(name: str, kind: Any, begin: int, end: int, **fields: Any) -> HostEvent:
    return HostEvent(name, kind, fields.pop("thread", 1), begin, end, **fields)


def kernel(name: str, begin: int, end: int, *, launch: int = 0, operator: int = 0, kind: Any = "kernel") -> DeviceEvent:
    return DeviceEvent(name, kind, 7, begin, end, launch, operator)


def recording(host_events: list[HostEvent], device_events: list[DeviceEvent] | None = None) -> Recording:
    return Recording(
        sorted(host_events, key=lambda event: (event.begin_ns, -event.end_ns)),
        sorted(device_events or [], key=lambda event: event.begin_ns),
    )
