"""Exports: one file with the figures of the live page, which needs no server and asks nobody for anything."""

from __future__ import annotations

import array
import base64
import hashlib
import json
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app import web
from app.web import export
from app.web.export import DRAWING, PLOTLY, STYLES
from app.web.plots.drawing import PALETTE

WEB = Path(web.__file__).parent
Measured = Callable[..., Any]


@pytest.fixture
def measured_jobs(site: Any, measured: Measured) -> Iterator[list[int]]:
    """Three jobs, the last two of one case, with three samples each, and a name like markup."""
    jobs = []
    for precision, mean in (("fp32", 2.0), ("bf16", 1.0), ("bf16", 4.0)):
        spec = {"kind": "benchmark", "model": {"size": "tiny"}, "context_length": 64, "precision": precision}
        job = site.submit(spec=spec, priority=90, name="</script><script>alert(1)</script>")["id"]
        samples = zlib.compress(array.array("d", [mean, mean + 0.25, mean + 0.5]).tobytes())
        row = measured("step_ms", mean, model="tiny", context_length=64, precision=precision)
        row = replace(row, n=3, samples=samples)
        site.worker.finish(site.worker.claim_job(job), measurements=[row])
        jobs.append(job)
    yield jobs
    for job in jobs:
        site.http.delete(f"/jobs/{job}")


BUNDLES = {name: (export.STATIC / path).read_text() for name, path in PLOTLY.items()}


def get(site: Any, path: str, status: int = 200) -> Any:
    response = site.http.get(path)
    assert response.status_code == status, response.text
    return response


def figures(text: str) -> list[Any]:
    """What Plotly draws on a page, in order."""
    return [json.loads(found) for found in re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', text)]


def check(response: Any) -> tuple[str, list[Any]]:
    """Check what every export must keep; return its text without scripts, and its figures."""
    text: str = response.text
    policy = response.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert policy.replace("'", "&#39;") in text
    scripts = re.findall(
        r"<script(?: type=\"module\"| type=\"text/plain\" id=\"plotly\")>(.*?)</script>", text, flags=re.DOTALL
    )
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    assert re.findall(r"'sha256-([^']+)'", policy) == hashes, "Plotly and plots.js, and no other script"
    shown = re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)
    assert "<script" not in shown
    assert not re.search(r"""(src|href)\s*=""", shown), "it loads nothing and leads nowhere"
    assert "url(" not in shown
    return shown, figures(text)


def test_a_job(site: Any, measured_jobs: list[int]) -> None:
    job = measured_jobs[0]
    response = get(site, f"/jobs/{job}/export")
    text, [samples] = check(response)
    assert response.headers["content-disposition"] == f'inline; filename="flopwatch-job-{job}.html"'
    for part in (f"Job {job}", "succeeded", "&lt;/script&gt;", '<td class="number">64</td>', "&#34;tiny&#34;"):
        assert part in text, part
    assert samples == get(site, f"/ui/jobs/{job}/samples").json()
    assert BUNDLES["basic"] in response.text
    _, [chart, _] = check(get(site, f"/jobs/{job}/export?metric=step_ms"))
    assert [chart] == figures(get(site, f"/ui/plots?job={job}&metric=step_ms").text)
    get(site, f"/jobs/{job}/export?metric=nose_ms", 422)


def test_a_comparison(site: Any, measured_jobs: list[int]) -> None:
    one, other, _ = measured_jobs
    response = get(site, f"/compare/export?baseline={one}&candidate={other}")
    text, found = check(response)
    assert f"Comparison of job {one}, job {other}" in text
    assert BUNDLES["cartesian"] in response.text, "it may have boxes"
    assert found == figures(get(site, f"/ui/compare?job={one}&job={other}").text)
    get(site, f"/compare/export?baseline={one}", 422)
    get(site, "/compare/export?job=999999", 404)


def test_several_jobs_of_a_side_are_several_processes(site: Any, measured_jobs: list[int]) -> None:
    baseline, *candidates = measured_jobs
    chosen = "&".join(f"candidate={job}" for job in candidates)
    _, found = check(get(site, f"/compare/export?baseline={baseline}&{chosen}"))
    assert [box["y"] for box in found[-1]["data"]] == [[2.0], [1.0, 4.0]]


def test_a_sweep(site: Any, measured: Measured) -> None:
    grid = {"context_length": [32, 64], "precision": ["fp32", "bf16"], "optimizer": ["adamw", "torch_adamw"]}
    base = {"kind": "benchmark", "model": {"size": "tiny"}}
    body = {"base": base, "grid": grid, "name": "<b>exported</b>", "priority": 95}
    sweep = site.http.post("/sweeps", json=body).json()["id"]
    for number, job in enumerate(reversed(site.http.get(f"/jobs?sweep={sweep}").json()["data"]), start=1):
        case = {"model": "tiny", **{name: job["spec"][name] for name in grid}}
        claim = site.worker.claim_job(job["id"])
        site.worker.finish(claim, measurements=[measured("step_ms", number + 0.25, **case)])
    response = get(site, f"/sweeps/{sweep}/export")
    text, found = check(response)
    assert BUNDLES["cartesian"] in response.text, "it has heat maps"
    assert found == figures(get(site, f"/ui/plots?sweep={sweep}").text)
    assert [figure["data"][0].get("type") for figure in found] == ["scatter", "heatmap", "heatmap"]
    for part in ("&lt;b&gt;exported&lt;/b&gt;", "Step (ms) along context length", "8 succeeded"):
        assert part in text, part


def test_a_job_that_waits(site: Any) -> None:
    job = site.submit(priority=-99)["id"]
    text, found = check(get(site, f"/jobs/{job}/export"))
    assert "There are no results yet." in text
    assert found == []
    site.http.post(f"/jobs/{job}/cancel")


def test_unknown_things(site: Any) -> None:
    get(site, "/jobs/999999/export", 404)
    get(site, "/sweeps/999999/export", 404)
    get(site, "/jobs/1/export?nose=1", 422)


def test_a_script_that_would_end_its_element_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*STYLES, *PLOTLY.values(), DRAWING):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1")
    monkeypatch.setattr(export, "STATIC", tmp_path)
    export.assets.__wrapped__("basic")
    (tmp_path / DRAWING).write_text("'</script>'")
    with pytest.raises(RuntimeError, match="would end its element"):
        export.assets.__wrapped__("basic")


def test_exports_define_every_colour_that_figures_name() -> None:
    sources = [*WEB.glob("plots/*.py"), WEB / "samples.py", *WEB.glob("panels/*.py")]
    named = {name for path in sources for name in re.findall(r"var\((--[a-z0-9-]+)[,)]", path.read_text())}
    named |= {name[4:-1] for name in PALETTE}
    styles = "".join((WEB / "static" / name).read_text() for name in STYLES)
    assert "--good" in named
    assert named <= set(re.findall(r"^  (--[a-z0-9-]+):", styles, flags=re.MULTILINE))
