"""A service's processes, when they do not start."""

from pathlib import Path

import pytest

from tools import service
from tools.service import Service


def test_a_slow_process_does_not_start_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "START_TIMEOUT_S", 0.1)
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(3600)\n")
    with Service(tmp_path / "service", {"PYTHONPATH": str(tmp_path)}) as running:
        process, log = running.start_process("slow", ["slow"])
        with pytest.raises(TimeoutError, match="listening"):
            running._wait_for_line(process, log, rb"listening on (.*)")
        assert process.returncode == -9
