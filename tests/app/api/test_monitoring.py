"""deploy/prometheus and deploy/grafana with a real Prometheus, which scrapes a server; and the alerts, one by one."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from socket import socket
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.app.api.test_access import BOOTSTRAP, bearer, made
from tests.app.api.test_metrics import test_the_queue as fill
from tools.waiting import wait_until

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
        done = subprocess.run(
            ["promtool", "test", "rules", str(tmp_path / "tests.yml")], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, (fires, done.stdout + done.stderr)


@pytest.fixture
def scraped(serve: Any, tmp_path: Path) -> Iterator[tuple[Any, httpx.Client]]:
    """A server, and the API of a Prometheus that scrapes it as deploy/prometheus says."""
    with serve(tmp_path / "data", api_token=BOOTSTRAP) as site:
        (tmp_path / "token").write_text(made(site, "prometheus", "read"))
        (tmp_path / "alerts.yml").write_text(ALERTS.read_text())
        text = (DEPLOY / "prometheus" / "prometheus.yml").read_text()
        text = text.replace("/etc/prometheus/flopwatch.token", str(tmp_path / "token")).replace("30s", "1s")
        (tmp_path / "prometheus.yml").write_text(text.replace("127.0.0.1:8000", site.url.removeprefix("http://")))
        with socket() as bound:  # Prometheus does not tell the port that it takes for 0
            bound.bind(("127.0.0.1", 0))
            port = bound.getsockname()[1]
        process = subprocess.Popen(
            [
                *("prometheus", f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/tsdb"),
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stderr=subprocess.DEVNULL,
        )
        site.http.headers.update(bearer(BOOTSTRAP))
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}/api/v1") as api:
                yield site, api
        finally:
            process.terminate()
            process.wait()


@pytest.mark.long
@NEEDED
def test_a_real_prometheus_scrapes_it_and_the_dashboard_asks_for_what_there_is(scraped: Any) -> None:
    site, api = scraped
    fill(site)

    def asked(expression: str) -> list[Any]:
        answer = api.get("/query", params={"query": expression}).json()
        assert answer["status"] == "success", (expression, answer)
        return answer["data"]["result"]

    def is_scraped() -> bool:
        try:
            return any(one["value"][1] == "1" for one in asked('flopwatch_outcomes_total{outcome="failed"}'))
        except httpx.TransportError:
            return False  # Prometheus starts

    wait_until(is_scraped, "a scrape", 20)
    assert [one["value"][1] for one in asked('up{job="flopwatch"}')] == ["1"]
    for expression in EXPRESSIONS:
        asked(expression.replace("$instance", ".*"))
    rules = api.get("/rules").json()["data"]["groups"][0]["rules"]
    assert len(rules) == len(FIRING)
    assert all(rule["health"] != "err" for rule in rules)
    known = {
        name for family in text_string_to_metric_families(site.http.get("/metrics").text) for name in _names(family)
    }
    used = set(re.findall(r"flopwatch_\w+", ALERTS.read_text() + "".join(EXPRESSIONS)))
    assert used - known == set()


def _names(family: Any) -> list[str]:
    return [family.name, f"{family.name}_total", *(sample.name for sample in family.samples)]
