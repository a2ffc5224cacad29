"""The examples run as a user runs them (`pytest -m slow tests/docs/test_examples.py`)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.slow
@pytest.mark.multiproc
def test_the_byte_model_learns_goes_on_elsewhere_and_learns_more(tmp_path):
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "train_bytes.py"), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )

    assert done.returncode == 0, done.stderr
    assert "note: goes on from checkpoints/step-000060, after step 60" in done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()[-3:-1]] == ["2", "4"]
