from __future__ import annotations

import os
import subprocess
import sys

from workers.keeper import Request

LEAVES_A_THREAD = """
import atexit, sys, threading, time
from workers import child

def run_request(_request, _messages):
    threading.Thread(target=time.sleep, args=(3600,)).start()
    atexit.register(print, "said goodbye")
    return 69

child.run_request = run_request
sys.exit(child.main(int(sys.argv[1])))
"""


def test_a_unit_in_a_new_interpreter_ends_although_it_leaves_a_thread_running() -> None:
    reader, messages = os.pipe()
    done = subprocess.run(
        [sys.executable, "-c", LEAVES_A_THREAD, str(messages)],
        input=Request("benchmark", {}, {}, "").to_line(),
        capture_output=True,
        pass_fds=[messages],
        timeout=60,
        check=False,
    )
    os.close(reader)
    os.close(messages)
    assert done.returncode == 69, done.stderr
    assert done.stdout == b"said goodbye\n"
