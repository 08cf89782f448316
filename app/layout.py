"""Names and words that the server, its pages and the command line share when they show results.

Standard library only: the command line starts in milliseconds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, get_args

Format = Literal["json", "csv", "markdown", "latex", "html"]
FORMATS: tuple[Format, ...] = get_args(Format)
Statistic = Literal["mean", "median", "min", "max", "p05", "p25", "p75", "p95"]
STATISTICS = ("n", "mean", "std", *get_args(Statistic)[1:])
"""Columns of a measurement that describe its samples."""
FACTS = (
    "case_key",
    "device_key",
    "attempt",
    "unit_index",
    "unit_title",
    "phase",
    "metric",
    "unit",
    "outcome",
    "reason",
    "partial",
    "validity",
)
"""Columns of a measurement between its case's coordinates and its statistics."""
ARROW = " → "
"""Arrow between the baseline's and the candidate's value, in the summary of a comparison."""
MAX_LISTED = 4
"""Largest number of values of a coordinate that a summary lists; for more values it gives their number."""
MAX_DOUBTS = 5
"""Number of a job's failed checks that are shown."""
FIRST_IN_QUEUE = (
    "It starts as soon as a worker has its devices free. Jobs of another Flopwatch on the same host may hold them."
)
"""Said of the first job of the queue, unless a reason is known why it cannot start."""


def varying_columns(measurements: Mapping[str, Any]) -> list[str]:
    """Return the columns that distinguish a page's measurements: coordinates, device and unit, where they vary."""
    rows: Sequence[Mapping[str, Any]] = measurements["rows"]
    told_anyway = {*FACTS, *STATISTICS, "samples"} - {"device_key", "unit_title"}
    names = [column["name"] for column in measurements["columns"] if column["name"] not in told_anyway]
    return [name for name in names if len({json.dumps(in_use(row.get(name))) for row in rows}) > 1]


def in_use(value: Any) -> Any:
    """Return a coordinate's value, with null in place of False.

    For example, sdpa_flash cannot tune (null) and triton was not asked to (False): no table needs a column for that
    difference.
    """
    return None if value is False else value


def case_text(coordinates: Mapping[str, Any]) -> str:
    """Write a case in words: texts unchanged, flags and numbers by name ("triton, causal, head_dim=64").

    A coordinate of a whole job lists its values ("16/32/64"), or their number if they are many ("13 implementations").
    A coordinate in which the sides of a comparison differ has its name before it ("precision=fp32 → bf16"), and so has
    a text that was there before ("bf16, parameter_dtype=bf16").
    """
    words: list[str] = []
    for name, value in coordinates.items():
        if value is not None:
            text = _coordinate(name, value)
            words.append(f"{name}={text}" if text in words else text)
    return ", ".join(words)


def _coordinate(name: str, value: Any) -> str:
    if value is True:
        return name
    if isinstance(value, str) and ARROW in value:
        return f"{name}={ARROW.join(map(_part, value.split(ARROW)))}"
    parts = [_part(part) for part in (value.split("/") if isinstance(value, str) else [value])]
    if len(parts) > MAX_LISTED:
        return f"{len(parts)} {name.replace('_', ' ')}s"
    text = "/".join(parts)
    return f"{name}={text}" if all(map(_is_number_or_flag, parts)) else text


def _part(value: Any) -> str:
    text = str(value)
    return text.lower() if text in ("True", "False", "None") else text


def _is_number_or_flag(text: str) -> bool:
    return text in ("true", "false") or text.lstrip("-").replace(".", "", 1).isdecimal()


def verdict(validity: Mapping[str, Any]) -> str:
    """Write the verdict of a job or a unit: its worst case's verdict, and the number of cases with each verdict if
    there are several.
    """
    counts = validity.get("counts") or {}
    text = str(validity.get("verdict", "unknown"))
    if sum(counts.values()) < 2:
        return text
    return f"{text} ({', '.join(f'{count} {name}' for name, count in counts.items())})"


def doubts(validity: Mapping[str, Any]) -> list[str]:
    """Return the doubts about the measurements: "case: check: detail" of the first checks that failed."""
    failed = [check for check in validity.get("checks") or () if not check.get("ok") and not _is_note(check)]
    lines = [_told(check) for check in failed[:MAX_DOUBTS]]
    if len(failed) > MAX_DOUBTS:
        lines.append(f"and {len(failed) - MAX_DOUBTS} more")
    return lines


def notes(validity: Mapping[str, Any]) -> list[str]:
    """Return the notes, which inform about the measurements without questioning them: "note: check: detail"."""
    found = [check for check in validity.get("checks") or () if not check.get("ok") and _is_note(check)]
    return [f"note: {_told(check)}" for check in found[:MAX_DOUBTS]]


def _is_note(check: Mapping[str, Any]) -> bool:
    return check.get("severity") == "note"


def _told(check: Mapping[str, Any]) -> str:
    words = [check.get("unit"), check.get("case"), check.get("name"), check.get("detail")]
    return ": ".join(str(word) for word in words if word)


def number(value: Any) -> str:
    """Write a value with four significant digits, or all digits before the point; "–" if there is none."""
    if value is None:
        return "–"
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def duration(seconds: float) -> str:
    """Write a time span with the two units that matter: "850 ms", "4.2 s", "3 min 12 s", "5 h 10 min", "12 d 3 h"."""
    if seconds < 1:
        return f"{max(seconds, 0) * 1000:.0f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for size, unit, smaller, smaller_unit in ((86_400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            rest = whole % size // smaller
            return f"{whole // size} {unit}" + (f" {rest} {smaller_unit}" if rest else "")
    return f"{whole} s"


def parsed_time(text: str) -> datetime:
    """Parse a time that the server wrote."""
    return datetime.fromisoformat(text)


_SPANS = {"min": 60, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


def moment_of(text: str, now: datetime | None = None) -> datetime:
    """Parse a time: a span before now ("90min", "12h", "7d", "2w"), a date, or an RFC 3339 time.

    A date stands for its first moment; a time without a time zone is UTC.

    Raises:
        ValueError: the text is none of these, or the time is before the year 1.
    """
    if found := re.fullmatch(r"(\d{1,9})(min|m|h|d|w)", text.strip(), re.ASCII):
        try:
            return (now or datetime.now(UTC)) - timedelta(seconds=int(found[1]) * _SPANS[found[2]])
        except OverflowError:
            raise ValueError("is before the year 1") from None
    try:
        time = datetime.fromisoformat(text.strip())
    except ValueError:
        raise ValueError("must be a span such as 90min, 12h, 7d or 2w, a date such as 2026-03-01, or a time") from None
    return time.replace(tzinfo=UTC) if time.tzinfo is None else time.astimezone(UTC)


def age(text: str | None, now: datetime | None = None) -> str | None:
    """Write how long ago a time of the server was, in its largest unit: "5 s ago", "3 min ago", "12 d ago".

    A time that cannot be read is None, and so is its age.
    """
    if text is None:
        return None
    seconds = ((now or datetime.now(UTC)) - parsed_time(text)).total_seconds()
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{int(seconds // size)} {unit} ago"
    return f"{max(int(seconds), 0)} s ago"


def ran(job: Mapping[str, Any], now: datetime | None = None) -> str | None:
    """Write how long a job ran, or has been running for; None if it never started."""
    if job["started_at"] is None:
        return None
    end = (now or datetime.now(UTC)) if job["finished_at"] is None else parsed_time(job["finished_at"])
    return duration((end - parsed_time(job["started_at"])).total_seconds())


def moment(text: str | None) -> str | None:
    """Write a time of the server to the second, in UTC: "2026-03-01 14:05:09 UTC"; None if there is none."""
    return None if text is None else f"{parsed_time(text):%Y-%m-%d %H:%M:%S} UTC"


LONGEST = 60
"""Largest number of characters of a table's cell on a terminal: a kernel's name may have a thousand."""
CUT_NOTE = "Long texts are shortened (…) on a terminal; in a file, and with --format csv or json, they are whole."


def shortened(markdown: str) -> str:
    """Shorten the long cells of Markdown tables in their middle, for a terminal, and say so below.

    Columns stay aligned. The beginning of a name identifies the kernel, the end its types or shape.
    """
    lines = [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] if line.startswith("|") else line
        for line in markdown.split("\n")
    ]
    cut = [line if isinstance(line, str) else [_cut(cell) for cell in line] for line in lines]
    if cut == lines:
        return markdown
    texts: list[str] = []
    table: list[list[str]] = []
    for line in [*cut, ""]:
        if isinstance(line, str):
            texts += _aligned(table)
            table = []
            texts.append(line)
        else:
            table.append(line)
    return "\n".join(texts[:-1]).rstrip("\n") + f"\n\n{CUT_NOTE}\n"


def _cut(text: str) -> str:
    if len(text) <= LONGEST or not text.strip(":-"):
        return text
    end = LONGEST // 3
    return f"{text[: LONGEST - 1 - end]}…{text[-end:]}"


def _aligned(table: Sequence[Sequence[str]]) -> list[str]:
    """Write the rows of one table, the second of which says how its columns are aligned."""
    if not table:
        return []
    rights = [rule.endswith(":") and not rule.startswith(":") for rule in table[1]]
    widths = [max(len(row[at]) for row in (table[0], *table[2:])) for at in range(len(rights))]
    lines = []
    for number, row in enumerate(table):
        if number == 1:
            rules = (
                "-" * (width + 1) + ":" if right else ":" + "-" * (width + 1)
                for width, right in zip(widths, rights, strict=True)
            )
            lines.append(f"|{'|'.join(rules)}|")
        else:
            cells = (
                text.rjust(width) if right else text.ljust(width)
                for text, width, right in zip(row, widths, rights, strict=True)
            )
            lines.append(f"| {' | '.join(cells)} |")
    return lines
