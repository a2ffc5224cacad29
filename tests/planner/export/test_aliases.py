"""Options are taken by the names that launchers have for them."""

from __future__ import annotations

import json

from parplan.planner.export.aliases import aliases
from tests.helpers.command_runs import fail, succeed

PLAIN = ("estimate", "--model", "gpt-tiny", "--gpus", "4", "--json")


def test_the_tables_name_the_options():
    known = aliases()

    assert known["--tensor-model-parallel-size"] == "--tp"
    assert known["--num-virtual-stages-per-pipeline-rank"] == "--virtual-stages"
    assert known["--parallelism.tensor_parallel_degree"] == "--tp"
    assert known["--training.seq_len"] == "--seq-length"
    assert known["--per_device_train_batch_size"] == "--micro-batch-size"
    assert known["--train_batch_size"] == "--global-batch-size"
    assert "--sequence-parallel" not in known


def test_a_command_takes_both_names_with_either_sign():
    own = succeed(*PLAIN, "--tp", "2", "--pp", "2").stdout
    theirs = succeed(
        *PLAIN, "--tensor-model-parallel-size=2", "--pipeline-model-parallel-size", "2"
    ).stdout

    assert json.loads(theirs)["mesh"] == json.loads(own)["mesh"]


def test_a_name_that_the_command_does_not_have_stays_an_error():
    assert "--tensor-model-parallel-size" in fail(2, "models", "--tensor-model-parallel-size", "2")
