"""The modules that Megatron-Core names are operators of the blocks that have them."""

from __future__ import annotations

import pytest

from parplan.planner.validation.block_modules import (
    OFFLOADED,
    RECOMPUTED,
    module_operators,
    named_modules,
)
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.spec import TrainingSpec
from parplan.profiles.models.transformer import build_graph
from parplan.profiles.stack import NEUTRAL

GRAPH = build_graph(
    load_model("deepseek-v3").spec,
    TrainingSpec(global_batch_size=1, seq_length=4096, stack=NEUTRAL),
    1,
)
DENSE, ROUTED = GRAPH.layers[1].layer, GRAPH.layers[2].layer


@pytest.mark.parametrize(
    ("cell", "modules"),
    [
        pytest.param("selective [layernorm moe_act]", ("layernorm", "moe_act"), id="brackets"),
        pytest.param("selective mla_up_proj+mlp", ("mla_up_proj", "mlp"), id="sum"),
        pytest.param("selective core_attn,moe", ("core_attn", "moe"), id="commas"),
        pytest.param("selective every block", (), id="unknown"),
        pytest.param("full mlp", (), id="another-level"),
    ],
)
def test_the_modules_of_a_cell_are_read(cell, modules):
    assert named_modules(cell) == modules


@pytest.mark.parametrize(
    ("module", "dense", "routed"),
    [
        ("mlp", ("fc1", "activation", "fc2"), ()),
        ("moe_act", (), ("activation",)),
        ("layernorm", ("norm1", "norm2"), ("norm1", "norm2")),
        ("core_attn", ("attention",), ("attention",)),
        ("shared_experts", (), ("shared_fc1", "shared_activation", "shared_fc2")),
    ],
)
def test_a_module_is_in_the_blocks_that_have_it(module, dense, routed):
    assert module_operators(DENSE, (module,), RECOMPUTED) == dense
    assert module_operators(ROUTED, (module,), RECOMPUTED) == routed


def test_every_module_has_operators_of_some_block():
    for modules in (RECOMPUTED, OFFLOADED):
        for module in modules:
            assert module_operators(DENSE, (module,), modules) or module_operators(
                ROUTED, (module,), modules
            )


def test_all_is_every_operator():
    assert len(module_operators(ROUTED, ("all",), OFFLOADED)) == len(ROUTED.operators)
