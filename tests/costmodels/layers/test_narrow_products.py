"""Products in a narrow format: the bytes that they keep, hold and gather (EQUATIONS M8)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parplan.costmodels.layers.model_states import (
    StateSharding,
    held_states,
    local_parameters,
)
from parplan.costmodels.layers.narrow_products import narrow_weights, with_kept_casts
from parplan.costmodels.layers.recompute import Recompute, recompute_operators, saved_bytes
from parplan.costmodels.operators.sharding import Sharding
from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.machine_catalog import load_stack
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.operator_graph import ROUTES
from parplan.profiles.models.spec import TrainingSpec
from parplan.profiles.models.transformer import build_graph
from parplan.profiles.product_formats import FORMATS, ProductFormat

HOPPER, BLACKWELL, CONSUMER = 9.0, 10.0, 12.0
GPT = replace(load_model("gpt-tiny").spec, dropout=0.0)
S, B, H = 128, 2, GPT.hidden_size
ENGINE = load_stack("nemo")  # Transformer Engine
DATA = 8  # data-parallel ranks
WHOLE = Sharding()


def training(products, stack=ENGINE, **changes):
    return TrainingSpec(
        global_batch_size=B, seq_length=S, products=ProductFormat(products), stack=stack, **changes
    )


def saved(spec, level=Recompute.NONE, sharding=WHOLE):
    wide = build_graph(GPT, spec, B).block
    kept = with_kept_casts(wide, spec, HOPPER)
    operators = recompute_operators(wide, level)
    return tuple(saved_bytes(each, sharding, operators) for each in (wide, kept))


@pytest.mark.parametrize(
    ("products", "kept"),
    [
        # inputs of qkv, fc1 and fc2 are H, H and 4 H features of 2 bytes; that of the projection is
        # attention's own output, which delayed scaling alone keeps a cast of as well
        ("fp8-current", 6 * 1),
        ("fp8-delayed", 6 * 1 + 1),
        ("mxfp8", 6 * 33 / 32),
        ("nvfp4", 6 * 9 / 16),
    ],
)
def test_a_product_keeps_the_cast_of_its_input(products, kept):
    wide, cast = saved(training(products))

    assert cast == wide - 6 * 2 * S * B * H + kept * S * B * H


def test_a_divided_block_keeps_casts_of_a_ranks_own_tokens():
    wide, cast = saved(training("fp8-current"), sharding=Sharding(4, sequence_parallel=True))

    assert wide - cast == 6 * S * B * H // 4


def test_a_recomputed_norm_leaves_no_cast_behind_it():
    wide, cast = saved(training("fp8-current"), Recompute.SELECTIVE)

    assert wide == cast


def test_torchao_keeps_the_operands_and_casts_them_again():
    wide, kept = saved(training("fp8-current", load_stack("torchtitan")))

    assert wide == kept


def test_casts_of_weights_in_every_micro_batch_are_saved_with_it():
    fsdp = load_stack("fsdp1")
    wide, kept = saved(training("fp8-delayed", fsdp))
    _, held = saved(training("fp8-delayed"))
    weights = 12 * H * H

    assert kept - held == 2 * weights
    assert wide == saved(training("fp8-delayed"))[0]


@pytest.mark.parametrize(
    ("products", "capability", "narrow", "held"),
    [
        ("fp8-current", HOPPER, False, 2 + 2),
        ("fp8-current", BLACKWELL, False, 2 + 1),
        ("fp8-current", CONSUMER, False, 2 + 2),
        ("fp8-current", HOPPER, True, 2),
        ("fp8-delayed", BLACKWELL, True, 1),
        ("mxfp8", BLACKWELL, True, 2 * 33 / 32),
        ("nvfp4", BLACKWELL, True, 2 * 9 / 16),
    ],
)
def test_weights_are_held_in_their_casts(products, capability, narrow, held):
    spec = training(products, narrow_weights=narrow)
    weights = narrow_weights(spec, capability)
    parameters = local_parameters(build_graph(GPT, spec, B).block, Sharding()).each
    of_products = sum(each.elements for each in parameters if each.of_product)
    plain = held_states(parameters, StateSharding(1, DATA), spec)
    states = held_states(parameters, StateSharding(1, DATA), spec, narrow=weights)

    assert of_products == 12 * H * H
    assert weights.held == held
    assert states.parameters - plain.parameters == (held - 2) * of_products
    assert (states.gradients, states.optimizer) == (plain.gradients, plain.optimizer)


@pytest.mark.parametrize(
    ("products", "gathered"), [("fp8-delayed", 1), ("mxfp8", 2), ("nvfp4", 0.5)]
)
def test_ranks_gather_weights_in_their_format(products, gathered):
    spec = training(products, narrow_weights=True)
    parameters = local_parameters(build_graph(GPT, spec, B).block, Sharding()).trained
    whole = parameters.gathered_bytes(spec)
    casts = parameters.gathered_bytes(spec, narrow=narrow_weights(spec, BLACKWELL))

    assert whole == 2 * parameters.owned()
    assert whole - casts == (2 - gathered) * 12 * H * H


def test_experts_are_narrow_where_the_stack_runs_them_so_and_routers_never():
    model = load_model("mixtral-8x7b").spec

    def narrow(stack):
        spec = training("fp8-current", stack)
        block = build_graph(model, spec, 1).block
        weights = narrow_weights(spec, HOPPER)
        each = local_parameters(block, WHOLE).each
        kept = with_kept_casts(block, spec, HOPPER)
        router = next(op.name for op in block.operators if op.dims[-2].name == ROUTES)
        assert kept.operator(router).saved == block.operator(router).saved
        return any(parameter.is_narrow(weights) for parameter in each if parameter.of_experts)

    assert narrow(ENGINE)
    assert not narrow(replace(ENGINE, narrow_experts=False))


def test_the_formats_of_gathers_are_those_of_products():
    for name in ("nemo", "megatron-core", "torchtitan", "torchtitan-2024"):
        stack = load_stack(name)
        assert set(stack.narrow_gathers) <= set(stack.product_formats)
    assert all(row.gathered_bytes <= 2 for row in FORMATS.values())


def test_a_stack_that_cannot_gather_a_format_is_refused_by_name():
    with pytest.raises(ConfigError, match="stack torchtitan gathers no weights in fp8-rowwise"):
        training("fp8-rowwise", load_stack("torchtitan"), narrow_weights=True)
