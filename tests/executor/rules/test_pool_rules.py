"""Plans that are no job of several pools are refused, and those that are get their sequences."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parplan.executor.rules.pool_rules import joined_plans, plans_of_run
from parplan.executor.rules.rule import with_training
from parplan.planner.plan.plan import BatchShare
from parplan.planner.plan.plan_file import read_plan, write_plan
from parplan.planner.search.estimate import ChunkRequest
from parplan.profiles.errors import ConfigError
from parplan.profiles.models.module_source import ModuleSource
from parplan.profiles.models.spec import Optimizer, Precision
from parplan.profiles.state_precision import StatePrecision
from tests.helpers.chunked_runs import chunked_plan
from tests.helpers.executor_plans import GPT, LLAMA, make_plan

FIRST = make_plan(GPT, pp=2, global_batch_size=4)
AMPLE = ChunkRequest(host_blocks=2, optimizer_blocks=1, device_bytes=10**9)
SECOND = make_plan(GPT, dp=2)


def share(plan, first, of):
    return replace(plan, batch_share=BatchShare(first=first, of=of))


def test_plans_have_the_sequences_behind_those_of_the_pools_before():
    first, second = joined_plans([("a", FIRST), ("b", share(SECOND, 4, 12))])

    assert first.whole_batch == BatchShare(first=0, of=12)
    assert second.whole_batch == BatchShare(first=4, of=12)
    assert plans_of_run([("a", FIRST)]) == (FIRST,)


BF16 = make_plan(GPT, precision=Precision.BF16)
NO_MASTERS = replace(
    BF16,
    training=replace(BF16.training, stack=BF16.training.stack.keeping(StatePrecision.BF16)),
)
TP2 = make_plan(GPT, tp=2)
ADAM_8BIT = Optimizer.ADAM_8BIT
REFUSED = {
    "order": (
        (share(FIRST, 8, 12), share(SECOND, 0, 12)),
        "a: it is planned for sequences 8 to 11",
    ),
    "missing": ((FIRST, share(SECOND, 4, 20)), "b: .* 4 to 11 of 20, and has 4 to 11 of 12 among"),
    "alone": ((share(SECOND, 4, 12),), "a: .* 4 to 11 of 12, which are those of one pool"),
    "model": ((FIRST, make_plan(LLAMA)), "b: its model tiny-llama is not that of a"),
    "training": ((FIRST, BF16), "b: its training differs from that of a"),
    "states": ((BF16, NO_MASTERS), "b: its masters or moments are of other types"),
    "chunks": ((FIRST, chunked_plan(AMPLE)), "b: its states lie in chunks"),
    "8 bits": (
        (with_training(FIRST, optimizer=ADAM_8BIT), with_training(TP2, optimizer=ADAM_8BIT)),
        "b: tp 2 rounds the moments of 8-bit Adam otherwise than tp 1 of a",
    ),
    "sums": (
        (with_training(NO_MASTERS, optimizer=Optimizer.MUON),) * 2,
        "a: muon sums in another order on every mesh, and parameters of bf16 without masters",
    ),
    "module": (
        (FIRST, replace(SECOND, module=ModuleSource(factory="a.b:c"))),
        "b: it trains a module",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_plans_that_are_no_job_together_are_refused(name):
    plans, message = REFUSED[name]

    with pytest.raises(ConfigError, match=message):
        plans_of_run(list(zip("ab", plans, strict=False)))


def test_a_plan_file_has_the_share_only_where_there_is_one(tmp_path):
    for plan in (FIRST, share(SECOND, 4, 12)):
        write_plan(plan, tmp_path / "plan.yaml")

        assert read_plan(tmp_path / "plan.yaml").batch_share == plan.batch_share
        written = "batch_share" in (tmp_path / "plan.yaml").read_text()
        assert written is (plan.batch_share is not None)


def test_sequences_beyond_the_whole_batch_are_refused(tmp_path):
    write_plan(share(SECOND, 8, 12), tmp_path / "plan.yaml")

    with pytest.raises(ConfigError, match="batch_share: 8 sequences from 8 on, of 12"):
        read_plan(tmp_path / "plan.yaml")
