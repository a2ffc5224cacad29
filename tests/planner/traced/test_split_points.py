"""Stages that begin at named submodules, and the errors of names that cannot begin one."""

from __future__ import annotations

import pytest

from parplan.planner.traced.shards import Cutting, CutWay, shard
from parplan.planner.traced.stage_rules import StageRule, StageRuleKind, parse_stages, ranges
from parplan.profiles.errors import ConfigError
from tests.helpers.traced_models import join, linear, model_of, traced_spec, value
from tests.planner.traced.test_shards import GPT, TRAINING, chain


def test_names_of_submodules_are_a_rule():
    assert parse_stages("transformer.h.12,lm_head") == StageRule(
        rule=StageRuleKind.NAMES, names=("transformer.h.12", "lm_head")
    )


@pytest.mark.parametrize("way", list(CutWay))
def test_a_stage_begins_at_the_first_operator_of_each_name(way):
    model, rule = traced_spec(GPT, TRAINING), parse_stages("h.1,h.2.ln_2,head")
    sharded = shard(model, Cutting(way=way, splits=rule.names))
    counts = rule.of(sharded)

    cuts = ranges(counts, sharded, 4)
    assert cuts is not None
    starts = [model.operators[sharded.shards[first].first].path for first, _ in cuts]
    assert starts == ["wte.tokens", "h.1.ln_1", "h.2.ln_2", "head.norm"]


def test_a_split_inside_a_shard_of_the_quota_divides_it():
    whole = shard(model_of(*chain(8)))
    split = shard(model_of(*chain(8)), Cutting(splits=("l3",)))

    assert {each.first for each in split.shards} >= {each.first for each in whole.shards} | {6}


def _with_a_skip():
    return model_of(
        *chain(4),
        join("out", (value("y3"), value("y0")), "sum"),
        linear("last", value("sum"), "loss"),
    )


@pytest.mark.parametrize(
    ("names", "message", "hint"),
    [
        (("l22",), "--stages has 'l22', net has no such submodule", "did you mean 'l2'"),
        (("unifrom",), "--stages has 'unifrom'", "did you mean 'uniform'"),
        (("zzz",), "--stages has 'zzz'", "its modules are l0, l1, l2, l3, out, last"),
        (("l0",), "l0 begins the module", "leave that name out"),
        (("last", "l1"), "has l1 after last", "in the order"),
        (("l1", "l1"), "has l1 after l1", "in the order"),
        (("l2",), "no stage can begin at l2, values of l0, l1 cross", "--cross-skips"),
    ],
)
def test_names_that_begin_no_stage_are_errors(names, message, hint):
    with pytest.raises(ConfigError, match=message) as caught:
        shard(_with_a_skip(), Cutting(splits=names))

    assert hint in caught.value.hint


def test_a_stage_may_begin_inside_a_skip_that_is_handed_on():
    sharded = shard(_with_a_skip(), Cutting(cross_skips=True, splits=("l2",)))

    assert 4 in {each.first for each in sharded.shards}
