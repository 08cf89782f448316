"""Plain facts about a job: the changed fields of its spec, its environment, its checks and its pace."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from app.specs import KINDS
from app.specs._base import flat, with_paths
from flopwatch.text.times import current_time, duration, parsed_time
from flopwatch.text.validity import NOT_JUDGED

MAX_CHECKS = 60
"""Number of a job's checks that its page lists."""


@dataclass(frozen=True)
class Difference:
    """A field of a spec whose value is not its default."""

    field: str
    value: Any
    default: Any


def differences(spec: Mapping[str, Any]) -> list[Difference]:
    """Return the fields of a stored spec that differ from the defaults of its kind, in the spec's order."""
    kind = KINDS.get(str(spec.get("kind")))
    if kind is None:
        return [Difference(name, value, None) for name, value in flat(spec).items()]
    defaults = flat(kind.example().model_dump(mode="json"))
    return [
        Difference(name, value, defaults.get(name))
        for name, value in flat(spec).items()
        if value != defaults.get(name) and not (value is None and name not in defaults)
    ]


def changed_only(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return the spec with its kind and only the fields that differ from the defaults, as a person would type it."""
    return with_paths({"kind": spec.get("kind")}, {one.field: one.value for one in differences(spec)})


ENVIRONMENT = {
    "Device": ("device.name",),
    "Driver": ("device.driver", "software.driver", "driver"),
    "CUDA": ("software.cuda",),
    "cuDNN": ("software.cudnn",),
    "NCCL": ("software.nccl",),
    "PyTorch": ("software.torch",),
    "Triton": ("software.triton",),
    "Python": ("software.python",),
    "CPU": ("host.cpu",),
    "Host": ("host.hostname",),
    "Git commit": ("software.git_commit",),
}


def environment_facts(environment: Mapping[str, Any]) -> dict[str, str]:
    """Return the most important facts of an environment by name; unknown ones are left out."""
    known = flat(environment)
    facts = {}
    for title, paths in ENVIRONMENT.items():
        value = next((known[path] for path in paths if known.get(path) not in (None, "")), None)
        if value is not None:
            facts[title] = str(value)
    if "Git commit" in facts and known.get("software.git_dirty"):
        facts["Git commit"] += " with changes"
    return facts


@dataclass(frozen=True)
class Check:
    """One check on the measurements."""

    verdict: str
    """passed | note | suspect | invalid | wrong"""
    name: str
    detail: str
    where: str


def checks(validity: Mapping[str, Any], without_details: Collection[str] = ()) -> list[Check]:
    """Return the checks of a job, those that failed first; at most MAX_CHECKS. Where a check of one case has the same
    verdict in several units, such as replicates, the first one stands for all. The page has the details of those
    `without_details` elsewhere."""
    listed: dict[tuple[str, str, str], list[Check]] = {}
    for check in validity.get("checks") or ():
        severity = str(check.get("severity") or "suspect")
        name = str(check.get("name") or "check")
        passed = check.get("ok") and severity != NOT_JUDGED
        verdict = "passed" if passed else severity.replace("_", " ")
        where = list(dict.fromkeys(str(check[key]) for key in ("unit", "case") if check.get(key)))
        detail = "" if name in without_details else str(check.get("detail") or "")
        alike = listed.setdefault((verdict, name, str(check.get("case") or check.get("unit"))), [])
        alike.append(Check(verdict, name, detail, ", ".join(where)))
    order = {"wrong": 0, "invalid": 1, "suspect": 2, "note": 3, "not judged": 4, "passed": 5}
    first = [
        alike[0] if len(alike) == 1 else replace(alike[0], where=f"{alike[0].where}; so in {len(alike)} units")
        for alike in listed.values()
    ]
    return sorted(first, key=lambda check: order.get(check.verdict, 2))[:MAX_CHECKS]


def pace(progress: Sequence[Mapping[str, Any]], now: datetime | None = None) -> str | None:
    """Write how long each step of the progress takes and how long the rest will: "0.8 s each, about 12 s left".

    None until enough is known.
    """
    counted = [event for event in progress if event["data"].get("total")]
    if not counted:
        return None
    done, total = counted[-1]["data"]["done"], counted[-1]["data"]["total"]
    same = [event for event in counted if event["data"]["total"] == total and event["data"]["done"] <= done]
    first = same[0]
    made = done - first["data"]["done"]
    seconds = (parsed_time(same[-1]["created_at"]) - parsed_time(first["created_at"])).total_seconds()
    if made <= 0 or seconds <= 0:
        return None
    each = seconds / made
    waited = ((now or current_time()) - parsed_time(same[-1]["created_at"])).total_seconds()
    remaining_s = max(0.0, each * (total - done) - max(0.0, waited))
    return (
        f"{duration(each)} each, about {duration(remaining_s)} left" if remaining_s >= 1 else f"{duration(each)} each"
    )
