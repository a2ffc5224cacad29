"""`torchrun --nproc-per-node N -m parplan.executor plan.yaml`: the entry point of a run."""

from __future__ import annotations

import os
import signal

from parplan.commands.train import main, run

__all__ = ["main", "run"]

if __name__ == "__main__":
    # The default action ends even a rank that waits inside a collective, without a traceback; a
    # shell reports 130.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # sys.exit would tear the interpreter down while gloo's threads may still run, which aborted 1
    # run in 14 on a busy machine.
    os._exit(run())
