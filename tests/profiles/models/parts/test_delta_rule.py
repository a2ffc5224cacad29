"""The gated delta rule: FLOPs by hand, what is saved, and the division of its heads."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parplan.costmodels.operators.sharding import Sharding
from parplan.profiles.errors import ConfigError
from parplan.profiles.models.blocks import BlockRun, DeltaRule, Mixer
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.operator_graph import LayerClass, Operator
from parplan.profiles.models.spec import TrainingSpec
from parplan.profiles.models.transformer import build_graph
from parplan.profiles.stack import NEUTRAL

MODEL = load_model("qwen3-next-80b-a3b").spec
TRAINING = TrainingSpec(global_batch_size=1, seq_length=1024, stack=NEUTRAL)


def layer(mixer: Mixer) -> LayerClass:
    kinds = MODEL.block_kinds
    index = next(number for number, kind in enumerate(kinds) if kind.mixer is mixer)
    return build_graph(MODEL, TRAINING, 1).layer_class(
        build_graph(MODEL, TRAINING, 1).key(index + 1)
    )


def operator(mixer: Mixer, name: str) -> Operator:
    return next(each for each in layer(mixer).operators if each.name == name)


def test_three_blocks_of_four_have_the_rule() -> None:
    mixers = [kind.mixer for kind in MODEL.block_kinds]

    assert mixers == ([Mixer.DELTA_RULE] * 3 + [Mixer.ATTENTION]) * 12


def test_the_flops_of_the_scan_are_those_of_its_products() -> None:
    """Per token and head of 128 x 128: 3 of 64 x 128, 2 of 64 x 128, 3 of 128 x 128, twice."""
    scan = operator(Mixer.DELTA_RULE, "scan")

    assert scan.flops_forward == 1024 * 32 * 2 * (5 * 64 * 128 + 3 * 128 * 128)
    assert [tensor.name for tensor in scan.saved] == ["conv", "steps"]


def test_the_gate_of_attention_lies_beside_its_queries() -> None:
    """16 heads of 256 features for queries and as many for gates, 2 for keys and for values."""
    qkv, gate = (operator(Mixer.ATTENTION, name) for name in ("qkv", "attention_gate"))

    assert qkv.outputs[0].dims[-1].size == (2 * 16 + 2 * 2) * 256
    assert [tensor.name for tensor in gate.inputs] == ["context", "qkv"]


@pytest.mark.parametrize("tp", [2, 4, 16])
def test_ranks_divide_the_heads_of_keys_with_their_values(tp: int) -> None:
    sharding, names = Sharding(tp=tp), ("in_proj", "gate_proj", "conv", "steps", "out_proj")
    for name in names:
        one = operator(Mixer.DELTA_RULE, name)
        assert sharding.parameter_elements(one) * tp == Sharding().parameter_elements(one)
    norm = operator(Mixer.DELTA_RULE, "gated_norm")
    assert sharding.parameter_elements(norm) == 128


def test_a_rule_whose_heads_do_not_match_is_refused() -> None:
    with pytest.raises(ConfigError, match="delta_rule has 33 heads of values"):
        replace(MODEL, delta_rule=replace(MODEL.delta_rule or _rule(), value_heads=33))
    with pytest.raises(ConfigError, match="mixer delta_rule without delta_rule"):
        replace(MODEL, delta_rule=None)
    plain = load_model("llama3-8b").spec
    with pytest.raises(ConfigError, match="mixer delta_rule without delta_rule"):
        replace(plain, blocks=(BlockRun(mixer=Mixer.DELTA_RULE),))


def _rule() -> DeltaRule:
    return DeltaRule(key_heads=16, key_head_dim=128, value_heads=32, value_head_dim=128)
