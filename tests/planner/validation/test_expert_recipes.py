"""Rows with experts take the facts of their recipe's dispatcher and graphs, by release and GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parplan.planner.validation.expert_recipes import recomputes_little, with_recipe
from parplan.profiles.stack import NEUTRAL

PAGE = "mbridge-{}-main-pretrain-l1"


@pytest.mark.parametrize(
    ("row_id", "dtype", "facts"),
    [
        pytest.param(
            PAGE.format("26.06-Qwen3_30B_a3B-gb200-8-mxfp8"),
            "mxfp8",
            {
                "sends_tokens_once": True,
                "overlap_exchanges": True,
                "fused_experts": True,
                "host_operator_s": 0.0,
            },
            id="one-graph-a-step",
        ),
        pytest.param(
            PAGE.format("26.04-Qwen3_30B_a3B-h100-16-fp8"),
            "fp8",
            {"sends_tokens_once": True, "overlap_exchanges": False, "fused_experts": False},
            id="hybrid-ep-without-graphs",
        ),
        pytest.param(
            PAGE.format("26.02-Qwen3_235B_a22B-h100-256-fp8"),
            "fp8",
            {"sends_tokens_once": False, "overlap_exchanges": True},
            id="all-to-all-under-another-micro-batch",
        ),
        pytest.param(
            "mbcard-qwen3-30b-a3b-pretrain_performance-H100",
            "bf16",
            {"sends_tokens_once": True, "overlap_exchanges": True, "dispatch_launches": 0},
            id="a-card",
        ),
        pytest.param(
            PAGE.format("26.04-LLAMA3_70B-h100-64-fp8"), "fp8", {}, id="a-dense-model-as-it-is"
        ),
    ],
)
def test_the_recipe_of_a_release_says_how_tokens_are_exchanged(row_id, dtype, facts):
    stack = with_recipe({"id": row_id, "dtype": dtype, "notes": ""}, NEUTRAL)

    assert {name: getattr(stack, name) for name in facts} == facts
    assert facts or stack == NEUTRAL


def test_a_row_may_note_its_dispatcher_and_its_graphs():
    row = {"id": "one's own", "dtype": "bf16", "notes": "dispatcher=deepep; cuda_graphs=layers"}
    stack = with_recipe(row, replace(NEUTRAL, host_operator_s=1.0))

    assert (stack.sends_tokens_once, stack.host_operator_s) == (True, 0.0)


def test_recipes_recompute_little_but_for_those_of_h100():
    assert recomputes_little({"id": PAGE.format("26.02-DeepSeekV3-gb200-256-mxfp8")})
    assert not recomputes_little({"id": PAGE.format("26.02-DeepSeekV3-h100-1024-fp8")})
    assert not recomputes_little({"id": PAGE.format("26.02-LLAMA3_70B-gb200-64-fp8")})
