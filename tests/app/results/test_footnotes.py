"""Signs on rows, and the notes that explain them."""

from app.results.footnotes import Footnotes, doubts_of, doubts_text

VARIES = ("variation", "26.4%")
LOADED = ("host_load", "11.9%")


def test_several_reasons_are_numbered() -> None:
    footnotes = Footnotes()
    footnotes.count("suspect", [VARIES])
    footnotes.count("invalid", [LOADED])
    footnotes.count("suspect", [])
    assert footnotes.mark("invalid", [LOADED], partial=False) == "†2"
    assert footnotes.notes() == [
        "†1 suspect: variation: 26.4%.",
        "†2 invalid: host_load: 11.9%.",
        "†3 suspect: the checks of its job say why.",
    ]


def test_partial_rows_say_how_their_jobs_ended() -> None:
    footnotes = Footnotes()
    for job in (3, 7):
        footnotes.count_partial(job, "timeout")
    footnotes.count_partial(9, "cancelled")
    footnotes.count("suspect", [VARIES])
    assert footnotes.mark("valid", [], partial=True) == "*"
    assert footnotes.mark("suspect", [VARIES], partial=True) == "†*"
    assert footnotes.notes()[-1] == (
        "* partial: measured before the job ended without success: timeout (jobs 3, 7); cancelled (job 9)."
    )


def test_doubts_of_one_case() -> None:
    checks = [
        {"name": "variation", "ok": False, "detail": "a", "severity": "suspect", "case": "first", "case_key": "1"},
        {"name": "variation", "ok": False, "detail": "b", "severity": "suspect", "case": "second", "case_key": "2"},
        {"name": "host_bound", "ok": False, "detail": "c", "severity": "note", "case": "first", "case_key": "1"},
        {"name": "drift", "ok": True, "detail": "d", "severity": "suspect", "case": "first", "case_key": "1"},
        {"name": "clocks", "ok": False, "detail": "e", "severity": "suspect"},
        {"name": "old", "ok": False, "detail": "names no key", "severity": "suspect", "case": "first"},
    ]
    assert (doubts_of({"checks": checks}, "1"), doubts_of(None, "1")) == ([("variation", "a"), ("clocks", "e")], [])
    assert (doubts_text([("variation", "a"), ("clocks", "")]), doubts_text([])) == ("variation: a; clocks", None)
