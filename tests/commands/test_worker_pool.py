"""Work in several processes: Ctrl-C ends it at once."""

from __future__ import annotations

import os
import signal
import threading
import time

from parplan.commands.worker_pool import in_processes


def test_ctrl_c_does_not_wait_for_the_work_that_was_begun() -> None:
    started_s = time.monotonic()
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()

    assert in_processes(time.sleep, [60.0], "naps") == ([], True)
    assert time.monotonic() - started_s < 30
