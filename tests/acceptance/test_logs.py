"""The log of a real server and a real worker, as JSON."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.acceptance.sabotage import plain_job, plain_kind
from tools.service import Service, submit, wait_for_job

pytestmark = pytest.mark.acceptance


def lines(service: Service, name: str) -> list[dict[str, Any]]:
    """The records of one process, without what it prints beside its log."""
    text = re.split(r"^== ", service.logs(), flags=re.MULTILINE)
    (own,) = [part for part in text if part.partition("\n")[0].endswith(name)]
    return [json.loads(line) for line in own.splitlines()[1:] if line and not line.startswith("listening on")]


def test_lines_of_a_job_have_its_id_and_attempt(service: Service) -> None:
    client = service.start_server(**plain_kind(), FLOPWATCH_LOG_FORMAT="json")
    service.start_worker(**plain_kind(), FLOPWATCH_LOG_FORMAT="json", FLOPWATCH_LOG_LEVEL="DEBUG")
    job = submit(client, plain_job("counted"))
    wait_for_job(client, job)
    records = lines(service, "worker.log")
    own = [one for one in records if one.get("job") == job]
    assert {one["attempt"] for one in own} == {1}
    messages = [one["message"] for one in own]
    assert "starting a job of kind plain" in messages
    assert "message: outcome" in messages
    assert any("ready" in one["message"] and "job" not in one for one in records), "others have none"
    (listening,) = lines(service, "server.log")
    assert listening["message"].startswith("listening on ")
