"""What a running job has reported, as it is kept for the final commit."""

import base64
import json
import math
import tracemalloc
import zlib
from collections.abc import Sequence
from typing import Any

import pytest

from app.store.reading.packed import unpack
from app.store.records import MeasurementRecord
from workers import messages
from workers.agent import spool as spooling
from workers.agent.spool import Spool
from workers.agent.verdicts import MAX_CHECKS
from workers.measure.measurement import Measurement, pack
from workers.measure.table import Column, Table, TooLarge
from workers.outcome import Cancelled, Failed, Succeeded, UnfitResult

CASE: dict[str, str | int] = {"model": "tiny", "context_length": 128}
KERNELS = (Column("name", "string"), Column("time", "number", "ms"))


def verdict(name: str, *checks: str) -> dict[str, Any]:
    judged = [{"name": check, "ok": name == "valid", "detail": check, "severity": "suspect"} for check in checks]
    return {"verdict": name, "checks": judged}


NOTE = {"name": "host_bound", "ok": False, "detail": "the host takes longer", "severity": "note"}


def measured(key: str = "key", *, metric: str = "forward_ms", samples: Any = (1.0,)) -> dict[str, Any]:
    return Measurement(CASE, key, "1x GPU", "forward", metric, "ms", samples=list(samples)).to_wire()


def begun(*titles: str) -> Spool:
    spool = Spool()
    for index, title in enumerate(titles or ["unit"]):
        spool.begin_unit(index, title)
    return spool


def add(spool: Spool, kind: str, **fields: Any) -> None:
    """Add a result to the spool, as a message of the unit."""
    spool.add(messages.parse(json.dumps({**fields, "type": kind}).encode()))  # type: ignore[arg-type]


def add_measurement(spool: Spool, wire: dict[str, Any]) -> None:
    add(spool, "measurement", **wire)


def add_validity(spool: Spool, verdict: dict[str, Any], case_key: str | None, title: str) -> None:
    add(spool, "validity", **verdict, case_key=case_key, title=title)


def test_a_measurement_arrives_with_its_units_number() -> None:
    spool = begun("first", "second")
    add_measurement(spool, {**measured(samples=[1.5, 2.5, 3.5]), "unit_index": 0, "validity": "valid"})
    (record,) = spool.measurements
    assert record.validity is None, "a process chooses neither its number nor that"
    assert isinstance(record, MeasurementRecord)
    assert (record.unit_index, record.case, record.case_key, record.device_key) == (1, CASE, "key", "1x GPU")
    assert (record.phase, record.metric, record.unit) == ("forward", "forward_ms", "ms")
    assert (record.outcome, record.reason, record.n, record.median) == ("ok", None, 3, 2.5)
    assert unpack(record.samples) == [1.5, 2.5, 3.5]


def packed(values: Sequence[float]) -> str:
    return base64.b64encode(pack(values)).decode()


SEVERAL = measured(samples=[1.5, 2.5, 3.5])


@pytest.mark.parametrize(
    "wrong",
    [
        {"samples": base64.b64encode(b"garbage").decode()},
        {"samples": "no base64"},
        {"samples": None},
        {"samples": base64.b64encode(zlib.compress(b"1234567")).decode()},
        {"samples": base64.b64encode(zlib.compress(b"")).decode()},
        {"samples": base64.b64encode(pack([1.5, 2.5, 3.5]) + b"more").decode()},
        {"samples": packed([1.5, math.nan, 3.5])},
        {"outcome": "oom"},
        {"outcome": "oom", "reason": "too large"},
        {"case": {"model": {"name": "tiny"}}},
        {"case": {"lengths": [1, 2]}},
        {"case": {"length": 2**70}},
        {"case": {"x" * 501: 1}},
        {"case_key": "x" * 501},
    ],
    ids=lambda wrong: str(wrong)[:40],
)
def test_a_measurement_that_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    spool = begun()
    add_measurement(spool, SEVERAL)
    with pytest.raises(ValueError):
        add_measurement(spool, {**SEVERAL, **wrong})
    assert len(spool.measurements) == 1


def test_a_zip_bomb_is_not_unpacked() -> None:
    inflate = zlib.compressobj()
    zeros = bytes(1 << 24)
    blob = b"".join(inflate.compress(zeros) for _ in range(6)) + inflate.flush()
    spool = begun()
    tracemalloc.start()
    with pytest.raises(TooLarge, match=r"forward_ms .* has more than 1000000 samples"):
        add_measurement(spool, {**measured(), "samples": base64.b64encode(blob).decode()})
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 40 << 20, "of 96 MiB"


@pytest.mark.parametrize(("limit", "value"), [("MAX_MEASUREMENTS", 2), ("MAX_MEASUREMENT_BYTES", 100)])
def test_a_jobs_measurements_have_a_largest_size(limit: str, value: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spooling, limit, value)
    spool = begun("first", "second")
    for _ in range(2):
        add_measurement(spool, measured())
    with pytest.raises(TooLarge, match=rf"this job has 3 measurements of 1\d\d bytes; .*\b{value}\b"):
        add_measurement(spool, measured())
    assert len(spool.measurements) == 2


@pytest.mark.parametrize(
    "case", [{str(number): 1 for number in range(201)}, {f"text {number}": "x" * 400 for number in range(50)}]
)
def test_a_case_has_a_largest_size(case: dict[str, Any]) -> None:
    with pytest.raises(TooLarge, match=r"a case has .* are kept"):
        add_measurement(begun(), {**SEVERAL, "case": case})


def test_an_environment_has_a_largest_size() -> None:
    spool = begun()
    with pytest.raises(TooLarge, match=r"the environment has 1\d{6} bytes; 1048576 are kept"):
        add(spool, "environment", environment={"notes": ["x" * 1000] * 1100})
    assert spool.environment is None


def test_verdicts_have_a_largest_size(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TooLarge, match="a verdict has 1001 checks; 1000 are kept"):
        add_validity(begun(), verdict("valid", *map(str, range(1001))), None, "")
    with pytest.raises(ValueError, match="a check's name has 501 characters"):
        add_validity(begun(), verdict("valid", "x" * 501), None, "")
    monkeypatch.setattr(spooling, "MAX_VERDICT_BYTES", 100)
    spool = begun()
    for number in range(3):
        add_validity(spool, verdict("valid", "clocks"), str(number), "title")
    with pytest.raises(TooLarge, match=r"this job's verdicts have 1\d\d bytes; 100 are kept"):
        add_validity(spool, verdict("valid", "clocks"), "3", "title")


def test_a_job_has_so_many_artifacts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spooling, "MAX_ARTIFACTS", 1)
    spool = Spool()
    spool.begin_unit(0, "unit")
    spool.name_artifact("first")
    with pytest.raises(TooLarge, match=r"'second' of unit 0 \(unit\).*keeps 1 of a job"):
        spool.name_artifact("second")


class TestUnits:
    def test_each_has_its_outcome_with_its_reason_and_its_first_environment(self) -> None:
        spool = begun("first")
        add(spool, "environment", environment={"gpu": "A"})
        add(spool, "environment", environment={"gpu": "said again"})
        spool.end_unit(Failed("timeout", "too long"))
        spool.begin_unit(1, "second")
        spool.end_unit(Cancelled())
        assert [(unit.outcome, unit.reason) for unit in spool.units] == [("timeout", "too long"), ("cancelled", None)]
        assert spool.environment == {"gpu": "A", "neighbours": []}

    def test_what_was_reported_before_a_crash_stands(self) -> None:
        """Killed after the results of a cell, before the cursor moves: the fresh process calls that cell crashed."""
        spool = begun()
        add_measurement(spool, measured("a", samples=[1.5]))
        add_measurement(spool, measured("b", samples=[2.5]))
        add_validity(spool, verdict("valid", "clocks"), "a", "case a")
        spool.continue_after_crash("It went on in a fresh process.")
        crashed = Measurement(CASE, "a", "1x GPU", "forward", "forward_ms", "ms", "crashed", "SIGKILL").to_wire()
        add_measurement(spool, crashed)
        add_measurement(spool, {**crashed, "metric": "tflops"})
        add_validity(spool, verdict("suspect", "measured"), "a", "case a")
        add_measurement(spool, {**crashed, "case_key": "b"})
        add_validity(spool, verdict("suspect", "measured"), "b", "case b")
        add_measurement(spool, measured("c"))
        shown = [(row.case_key, row.metric, row.outcome, row.validity) for row in spool.measurements]
        assert shown == [
            ("a", "forward_ms", "ok", "valid"),
            ("b", "forward_ms", "ok", "suspect"),
            ("a", "tflops", "crashed", "valid"),
            ("c", "forward_ms", "ok", None),
        ]
        spool.end_unit(Succeeded())
        spool.begin_unit(1, "another")
        add_measurement(spool, measured("a"))
        assert len(spool.measurements) == 5, "another unit has results of its own"


class TestValidity:
    def test_the_cases_verdicts_are_their_measurements_their_units_and_the_jobs(self) -> None:
        spool = begun("first")
        for key in ("a", "b", "c"):
            add_measurement(spool, measured(key))
        judged = verdict("valid", "clocks")
        add_validity(spool, judged | {"checks": [*judged["checks"], NOTE]}, "a", "case a")
        add_validity(spool, verdict("suspect", "variation"), "b", "case b")
        add_validity(spool, judged, None, "")
        spool.begin_unit(1, "second")
        add_measurement(spool, measured("a"))
        assert spool.units[1].validity is None
        add_validity(spool, verdict("invalid", "clocks"), "a", "case a")
        shown = [(record.unit_index, record.case_key, record.validity) for record in spool.measurements]
        assert shown == [(0, "a", "valid"), (0, "b", "suspect"), (0, "c", "valid"), (1, "a", "invalid")]
        failed = {"name": "variation", "ok": False, "detail": "variation", "severity": "suspect"}
        failed |= {"case": "case b", "case_key": "b"}
        counts = {"valid": 2, "suspect": 1}
        assert spool.units[0].validity == {"verdict": "suspect", "noisy": 1, "counts": counts, "checks": [failed]}
        assert (spool.validity["verdict"], spool.validity["counts"]) == ("invalid", counts | {"invalid": 1})
        listed = [(check["unit"], check["case"]) for check in spool.validity["checks"]]
        assert sorted(listed) == [("first", "case b"), ("second", "case a")]

    def test_with_one_case_all_checks_are_listed(self) -> None:
        spool = begun()
        add_measurement(spool, measured("a"))
        judged = verdict("valid", "clocks")
        add_validity(spool, judged | {"checks": [*judged["checks"], NOTE]}, "a", "case a")
        expected = {"verdict": "valid", "counts": {"valid": 1}, "checks": [*judged["checks"], NOTE]}
        assert spool.validity == expected == spool.units[0].validity

    def test_failed_checks_of_a_case_come_first(self) -> None:
        spool = begun()
        add_measurement(spool, measured("a"))
        for _ in range(3):  # as often as the unit likes
            add_validity(spool, verdict("valid", *map(str, range(1000))), "a", "case a")
        add_validity(spool, verdict("suspect", "drift"), "a", "case a")
        checks = spool.validity["checks"]
        assert len(checks) == MAX_CHECKS + 1
        assert checks[0]["name"] == "drift"
        assert checks[-1] == {"name": "more", "ok": True, "detail": "2901 more checks", "severity": "suspect"}

    @pytest.mark.parametrize(("others", "counts"), [(0, {"valid": 1}), (3, {"valid": 1, "suspect": 3})])
    def test_a_verdict_without_a_case_is_of_the_others(self, others: int, counts: dict[str, int]) -> None:
        spool = begun()
        for key in ("a", "b", "c", "d")[: 1 + others]:
            add_measurement(spool, measured(key))
        add_validity(spool, verdict("valid", "clocks"), "a", "case a")
        add_validity(spool, verdict("suspect", "measured"), None, "")
        assert (spool.validity["verdict"], spool.validity["counts"]) == ("suspect", counts)


class TestChecks:
    """The table `checks`: the verdicts of a unit's cases, as reported."""

    def judged(self, cases: int) -> Spool:
        """Each case has a passed check and, from one to the next, a note, a suspect or an invalid one."""
        spool = begun("first")
        for number in range(cases):
            add_measurement(spool, measured(str(number)))
            severity = ("note", "suspect", "invalid")[number % 3]
            word = "valid" if severity == "note" else severity
            fine = {"name": "clocks", "ok": True, "detail": "SM clock 1980 MHz", "severity": "suspect"}
            checks = [fine, NOTE | {"severity": severity}]
            add_validity(spool, {"verdict": word, "checks": checks}, str(number), f"case {number}")
        return spool

    def test_of_a_unit_with_several_cases_every_check_is_kept(self) -> None:
        (table,) = self.judged(2).tables
        assert (table.unit_index, table.name, table.row_count) == (0, "checks", 4)
        names = [column["name"] for column in table.columns]
        assert names == ["case_key", "case", "check", "ok", "severity", "detail"]
        assert json.loads(zlib.decompress(table.rows)) == [
            ["0", "case 0", "clocks", True, None, "SM clock 1980 MHz"],
            ["0", "case 0", "host_bound", False, "note", "the host takes longer"],
            ["1", "case 1", "clocks", True, None, "SM clock 1980 MHz"],
            ["1", "case 1", "host_bound", False, "suspect", "the host takes longer"],
        ]

    def test_what_is_too_much_is_cut_and_said_to_be(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(spooling, "MAX_TABLES_ROWS", 4)
        (table,) = self.judged(3).tables
        *kept, last = json.loads(zlib.decompress(table.rows))
        assert [row[4] for row in kept] == ["invalid", "suspect", "note"], "the worst first"
        assert (last[2], table.row_count) == ("more", 4)
        assert last[5].startswith("3 more checks are left out")

    def test_long_details_leave_room_for_fewer(self, monkeypatch: pytest.MonkeyPatch) -> None:
        (whole,) = self.judged(3).tables
        monkeypatch.setattr("workers.measure.table.MAX_BYTES", len(zlib.decompress(whole.rows)) - 1)
        (table,) = self.judged(3).tables
        assert json.loads(zlib.decompress(table.rows))[-1][5].startswith("4 more checks are left out")

    def test_its_name_is_reserved(self) -> None:
        with pytest.raises(UnfitResult, match="'checks': that name is reserved"):
            add(begun(), "table", **Table("checks", KERNELS, []).to_wire())


class TestTables:
    @pytest.mark.parametrize(
        "wrong",
        [
            {"name": "../kernels"},
            {"columns": []},
            {"columns": [{"name": "time", "type": "float"}]},
            {"columns": [{"name": "time", "type": "number"}, {"name": "time", "type": "number"}]},
            {"columns": [{"name": "unit_index", "type": "integer"}], "rows": [[1]]},
            {"rows": [["fast"]]},
            {"rows": [[True]]},
            {"rows": [[1.0, 2.0]]},
        ],
        ids=str,
    )
    def test_a_process_is_not_trusted(self, wrong: dict[str, Any]) -> None:
        wire = {"name": "kernels", "columns": [{"name": "time", "type": "number", "unit": None}], "rows": [[1.0]]}
        spool = begun()
        with pytest.raises(ValueError):
            add(spool, "table", **{**wire, **wrong})
        assert spool.tables == []

    @pytest.mark.parametrize(
        "other",
        [KERNELS[:1], KERNELS[::-1], (KERNELS[0], Column("time", "number", "us"))],
        ids=["fewer", "order", "unit"],
    )
    def test_tables_of_one_name_have_equal_columns(self, other: tuple[Column, ...]) -> None:
        spool = begun("forward")
        add(spool, "table", **Table("kernels", KERNELS, []).to_wire())
        with pytest.raises(UnfitResult, match=r"unit 0 \(forward\) reports two tables named 'kernels'"):
            add(spool, "table", **Table("kernels", KERNELS, []).to_wire())
        spool.begin_unit(1, "backward")
        with pytest.raises(UnfitResult, match=r"'kernels' of unit 1 \(backward\) has other columns .* 'forward'.* ms"):
            add(spool, "table", **Table("kernels", other, []).to_wire())

    @pytest.mark.parametrize(("limit", "value"), [("MAX_TABLES", 2), ("MAX_TABLES_BYTES", 40), ("MAX_TABLES_ROWS", 2)])
    def test_a_job_has_a_largest_size(self, limit: str, value: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(spooling, limit, value)
        spool = begun()
        for name in ("first", "second"):
            add(spool, "table", **Table(name, KERNELS, [["gemm", 1.5]]).to_wire())
        with pytest.raises(TooLarge, match=f"3 tables of 45 bytes and 3 rows with table 'third'.*{value}"):
            add(spool, "table", **Table("third", KERNELS, [["gemm", 1.5]]).to_wire())
        assert len(spool.tables) == 2


class TestArtifacts:
    def test_a_name_is_used_once_in_a_unit_and_again_in_the_next(self) -> None:
        spool = begun("forward")
        assert spool.name_artifact("trace.json.gz") == "trace.json.gz"
        with pytest.raises(UnfitResult, match=r"unit 0 \(forward\) reports two artifacts named 'trace.json.gz'"):
            spool.name_artifact("trace.json.gz")
        spool.begin_unit(1, "backward")
        assert spool.name_artifact("trace.json.gz") == "trace-unit-1.json.gz"

    def test_a_name_that_another_unit_has_is_refused(self) -> None:
        spool = begun("forward")
        spool.name_artifact("trace-unit-1.json")
        spool.begin_unit(1, "backward")
        with pytest.raises(
            UnfitResult, match=r"'trace.json' of unit 1 \(backward\) would be called 'trace-unit-1.json'"
        ):
            spool.name_artifact("trace.json")

    @pytest.mark.parametrize("name", ["", ".hidden", "a/b", "a b", "x" * 201])
    def test_a_name_is_a_files(self, name: str) -> None:
        with pytest.raises(ValueError, match="no artifact's name"):
            begun().name_artifact(name)


def test_results_can_be_forgotten_and_the_log_kept() -> None:
    spool = begun()
    spool.log.write(b"hello\n")
    add_measurement(spool, measured())
    add(spool, "table", **Table("kernels", KERNELS, []).to_wire())
    spool.forget_results()
    assert (spool.measurements, spool.tables, spool.units, spool.log.text()) == ([], [], [], "hello\n")


class TestReplicates:
    @staticmethod
    def spool(times_ms: Sequence[float], device: str = "cpu", key: str | None = None) -> Spool:
        spool = Spool()
        for index, time_ms in enumerate(times_ms):
            spool.begin_unit(index, f"replicate {index + 1}")
            add(spool, "environment", environment={"device": {"type": device}})
            add_measurement(spool, measured(samples=(0.5 * time_ms, time_ms, 9 * time_ms)))
            add_validity(spool, verdict("valid", "clocks"), key, "")
        return spool

    @pytest.mark.parametrize("key", [None, "key"])
    def test_processes_that_disagree_are_suspect(self, key: str | None) -> None:
        """The median of these was printed without a word: 284 ms, which none of them took."""
        spool = self.spool([550.0, 635.0, 15.5, 18.5], key=key)
        assert (spool.validity["verdict"], spool.validity["counts"]) == ("suspect", {"valid": 3, "suspect": 1})
        (found,) = [check for check in spool.validity["checks"] if not check["ok"]]
        assert (found["name"], found["severity"]) == ("replicates", "suspect")
        assert found["detail"].startswith("forward_ms of 4 replicates: 550, 635, 15.5, 18.5; ")
        assert [record.validity for record in spool.measurements] == ["suspect", "valid", "valid", "valid"]

    @pytest.mark.parametrize(
        ("times_ms", "device", "agree"),
        [
            ([10.0, 15.0], "cpu", True),
            ([10.0, 15.0], "cuda", False),
            ([10.0, 10.5], "cuda", True),
            ([10.0], "cuda", True),
            ([10.0, 21.0], "cpu", False),
        ],
    )
    def test_processors_are_shared_and_gpus_are_not(self, times_ms: list[float], device: str, agree: bool) -> None:
        validity = self.spool(times_ms, device).validity
        assert (validity["verdict"] == "valid") is agree

    def test_sides_of_a_comparison_may_differ(self) -> None:
        spool = Spool()
        for index, side in enumerate(("baseline", "candidate")):
            spool.begin_unit(index, side, side)
            add_measurement(spool, measured(samples=(10.0 + 90 * index,)))
            add_validity(spool, verdict("valid", "clocks"), None, "")
        assert spool.validity["verdict"] == "valid"


@pytest.mark.parametrize(
    ("outcomes", "failure"),
    [
        (["failed", "failed"], "no case was measured (2 failed): it raised"),
        (["failed", "crashed", "unsupported"], "no case was measured (1 crashed, 1 failed, 1 unsupported): it raised"),
        (["invalid_environment"], "no case was measured (1 invalid_environment): it raised"),
        (["failed", "ok"], None),
        (["failed", "oom"], None),
        (["unsupported"], None),
        ([], None),
    ],
)
def test_a_job_of_failures_alone_has_failed(outcomes: list[str], failure: str | None) -> None:
    """A lack of memory, a device that refuses and a wrong result are answers; of a failed case, one metric is none."""
    spool = begun()
    for key, outcome in enumerate(outcomes):
        reason, samples = (None, [1.0]) if outcome == "ok" else ("it raised", None)
        if outcome == "failed":
            add_measurement(spool, measured(str(key), metric="output_error"))
        one = Measurement(CASE, str(key), "1x GPU", None, "forward_ms", "ms", outcome, reason, samples=samples)
        add_measurement(spool, one.to_wire())
    assert spool.failure() == failure
