"""deploy/prometheus and deploy/grafana: that Prometheus takes them; and the alerts, one by one."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.app.api.test_metrics import test_the_queue as fill

DEPLOY = Path(__file__).parents[3] / "deploy"
ALERTS = DEPLOY / "prometheus" / "alerts.yml"
DASHBOARD = json.loads((DEPLOY / "grafana" / "flopwatch.json").read_text())
EXPRESSIONS = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
NEEDED = pytest.mark.skipif(shutil.which("prometheus") is None, reason="Debian's package prometheus is not installed")

FIRING = {
    "FlopwatchDown": {'up{job="flopwatch"}': "0x40"},
    "FlopwatchWithoutWorker": {
        'flopwatch_jobs{state="queued",instance="a"}': "3x40",
        'flopwatch_workers{state="active",instance="a"}': "0x40",
    },
    "FlopwatchWorkerUnfit": {'flopwatch_workers{state="unfit"}': "1x40"},
    "FlopwatchWorkerLost": {'flopwatch_lease_losses_total{kind="ddp"}': "0x30 1x10"},
    "FlopwatchJobsFail": {
        'flopwatch_outcomes_total{outcome="crashed"}': "0+1x40",
        'flopwatch_outcomes_total{outcome="succeeded"}': "0+0.5x40",
    },
    "FlopwatchLongWait": {'flopwatch_oldest_job_age_seconds{state="queued"}': "90000x40"},
    "FlopwatchDiskLow": {'flopwatch_disk_free_bytes{folder="data"}': "5000000000x40"},
    "FlopwatchStoreErrors": {'flopwatch_store_errors_total{code="disk_full"}': "0+1x40"},
}
"""Series, by minute, with which each alert fires."""
SILENT = {
    'up{job="flopwatch"}': "1x40",
    'flopwatch_jobs{state="queued",instance="a"}': "3x40",
    'flopwatch_workers{state="active",instance="a"}': "1x40",
    'flopwatch_workers{state="unfit"}': "0x40",
    'flopwatch_lease_losses_total{kind="ddp"}': "7x40",
    'flopwatch_outcomes_total{outcome="crashed"}': "0+1x40",
    'flopwatch_outcomes_total{outcome="succeeded"}': "0+2x40",
    'flopwatch_outcomes_total{outcome="cancelled"}': "0+9x40",
    'flopwatch_oldest_job_age_seconds{state="queued"}': "3600x40",
    'flopwatch_disk_free_bytes{folder="data"}': "50000000000x40",
    'flopwatch_store_errors_total{code="disk_full"}': "3x40",
}
"""Series with which none does."""


@pytest.mark.long
@NEEDED
def test_alerts_fire_when_they_should_and_only_then(tmp_path: Path) -> None:
    names = [rule["alert"] for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
    assert sorted(names) == sorted(FIRING)
    cases = [(SILENT | series, name) for name, series in FIRING.items()] + [(SILENT, None)]
    for series, fires in cases:
        # promtool compares labels and annotations whole, so the number of alerts is asked for.
        firing = [
            {"expr": f'count(ALERTS{{alertstate="firing",alertname="{name}"}}) or vector(0)', "eval_time": "38m"}
            | {"exp_samples": [{"labels": "{}", "value": int(name == fires)}]}
            for name in names
        ]
        inputs = [{"series": name, "values": values} for name, values in series.items()]
        tests = {"rule_files": [str(ALERTS)], "evaluation_interval": "1m"}
        tests["tests"] = [{"interval": "1m", "input_series": inputs, "promql_expr_test": firing}]
        (tmp_path / "tests.yml").write_text(yaml.safe_dump(tests))
        done = subprocess.run(["promtool", "test", "rules", tmp_path / "tests.yml"], capture_output=True, text=True)
        assert done.returncode == 0, (fires, done.stdout + done.stderr)


@NEEDED
def test_prometheus_takes_the_files_and_they_ask_for_what_there_is(fresh_site: Any, tmp_path: Path) -> None:
    fill(fresh_site)
    known = set()
    for family in text_string_to_metric_families(fresh_site.http.get("/metrics").text):
        known |= {family.name, f"{family.name}_total", *(sample.name for sample in family.samples)}
    assert set(re.findall(r"flopwatch_\w+", ALERTS.read_text() + "".join(EXPRESSIONS))) <= known
    records = [{"record": "asked", "expr": one.replace("$instance", ".*")} for one in EXPRESSIONS]
    (tmp_path / "records.yml").write_text(yaml.safe_dump({"groups": [{"name": "of the dashboard", "rules": records}]}))
    (tmp_path / "token").touch()
    scrape = (DEPLOY / "prometheus" / "prometheus.yml").read_text()
    jobs = {one["job_name"] for one in yaml.safe_load(scrape)["scrape_configs"]}
    assert jobs == set(re.findall(r'job="(\w+)"', ALERTS.read_text()))
    scrape = scrape.replace("/etc/prometheus/flopwatch.token", str(tmp_path / "token"))
    (tmp_path / "prometheus.yml").write_text(scrape.replace("alerts.yml", f"{ALERTS}\n  - records.yml"))
    done = subprocess.run(["promtool", "check", "config", tmp_path / "prometheus.yml"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
