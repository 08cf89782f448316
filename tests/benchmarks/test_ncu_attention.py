"""The script behind the table of attention's counters: its jobs are valid, and what they end with is shown."""

from __future__ import annotations

import argparse
import json
from typing import Any

import pytest

from app.specs import spec_adapter
from app.specs.profile import ProfileSpec
from benchmarks import ncu_attention
from workers.jobs.profile.nsight import COUNTERS, DURATION

OPTIONS = argparse.Namespace(size="tiny", context_length=64, mode="forward", set="basic", launches=2, timeout_s=1.0)


@pytest.mark.parametrize("attention", ncu_attention.KERNELS)
def test_its_jobs_are_valid(attention: str) -> None:
    spec = spec_adapter.validate_json(json.dumps(ncu_attention.body(attention, OPTIONS)["spec"]))
    assert isinstance(spec, ProfileSpec)
    assert spec.requirements() >= {"tool:ncu", f"attention:{attention}"}


def test_its_columns_are_the_tables_own() -> None:
    known = {"launch", "function", "grid", "block", "kernel", *(counter.name for counter in (DURATION, *COUNTERS))}
    assert set(ncu_attention.SHOWN) <= known


@pytest.mark.parametrize("state", ["succeeded", "failed"])
def test_it_prints_a_jobs_rows_or_its_error(
    state: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {**dict.fromkeys(ncu_attention.SHOWN, 1.5), "function": "forward_kernel", "tensor_pipe_percent": None}
    answers = {
        "/jobs/7/tables/ncu-launches": {"rows": [row]},
        "/jobs/7/artifacts": {"data": [{"name": "report.ncu-rep", "size": 1 << 21}]},
    }

    class Answer:
        def __init__(self, url: str) -> None:
            self.url = url

        def raise_for_status(self) -> Answer:
            return self

        def json(self) -> Any:
            return answers[self.url]

    class Client:
        get = staticmethod(Answer)

    job = {"state": state, "error": {"code": "invalid_environment", "detail": "ERR_NVGPUCTRPERM"}}
    monkeypatch.setattr(ncu_attention, "submit", lambda _client, _body: 7)
    monkeypatch.setattr(ncu_attention, "wait_for_job", lambda _client, _job, timeout_s: job)
    ncu_attention.show(Client(), "triton", OPTIONS)  # type: ignore[arg-type]
    printed = capsys.readouterr().out
    assert ("| forward_kernel | 1.5 |" in printed) == (state == "succeeded")
    assert ("report.ncu-rep: 2.0 MiB" in printed) == (state == "succeeded")
    assert ("ERR_NVGPUCTRPERM" in printed) == (state == "failed")
