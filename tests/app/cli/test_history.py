"""The command that shows a case over time."""

import json
from dataclasses import replace
from typing import Any

KEY = "abcdefabcdefabcdefab"


def test_history(site: Any, flopwatch: Any, measured: Any) -> None:
    jobs = []
    for value in (12.0, 34.0):
        row = replace(measured("step_ms", value, model="tiny"), case_key=KEY)
        commit = {"git_commit": f"{len(jobs):040x}", "git_dirty": True}
        rows = [row, replace(row, metric="forward_ms", phase="forward")]
        environment = {"software": commit, "host": {"hostname": f"host-{value:.0f}"}}
        jobs.append(site.run(spec={"context_length": 8}, measurements=rows, environment=environment))
    site.http.put("/baselines/before", json={"job": jobs[0]})

    shown = flopwatch("history", "--job", str(jobs[1]))
    assert shown.returncode == 0
    title, metric, _, newest, oldest, link = shown.stdout.splitlines()
    assert (title, metric) == (f"benchmark: tiny (case {KEY})", "Step (ms) on 1x test CPU")
    assert newest.split()[3:6] == [str(jobs[1]), "host-34", "34"]
    assert "00000000-dirty" in newest
    assert oldest.endswith("before")
    assert site.http.get(link.removeprefix(site.url)).status_code == 200
    answer = json.loads(flopwatch("history", KEY[:6], "--metric", "forward_ms", "--limit", "1", "--json").stdout)
    assert [point["job"] for point in answer["points"]] == jobs[1:]

    assert flopwatch("history").returncode == 2
    assert "--job ID" in flopwatch("history", "7").stderr
    unknown = flopwatch("history", "ffffffff")
    assert unknown.returncode == 1
    assert "no such case" in unknown.stderr
