"""Modules of multi-token prediction in the head."""

from __future__ import annotations

from dataclasses import replace

from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.operator_graph import LayerKind
from parplan.profiles.models.spec import TrainingSpec
from parplan.profiles.models.transformer import build_graph
from parplan.profiles.stack import NEUTRAL

TRAINING = TrainingSpec(global_batch_size=8, seq_length=128, stack=NEUTRAL)
V3 = load_model("deepseek-v3").spec


def head(layers):
    return build_graph(replace(V3, mtp_layers=layers), TRAINING, 1).head


def test_a_module_has_one_more_block_two_norms_a_projection_and_a_last_norm():
    graph = build_graph(V3, TRAINING, 1)
    without = build_graph(replace(V3, mtp_layers=0), TRAINING, 1)
    block = graph.layer_class(graph.key(61))

    # the table and the product with the vocabulary are those of the model
    assert graph.num_parameters - without.num_parameters == (
        block.num_parameters + 2 * 7168 * 7168 + 3 * 7168
    )
    assert 11.6e9 < graph.num_parameters - without.num_parameters < 11.7e9


def test_every_module_adds_a_prediction_to_the_product_and_the_loss():
    plain, further = head(0), head(2)

    assert further.operator("lm_head").flops_forward == 3 * plain.operator("lm_head").flops_forward
    assert further.operator("loss").size("predictions") == 3
    assert [tensor.name for tensor in further.operator("lm_head").inputs] == [
        "head_norm",
        "mtp1.norm",
        "mtp2.norm",
    ]


def test_the_next_module_reads_the_state_of_the_one_before():
    further = head(2)

    assert further.operator("mtp1.state_norm").inputs[0].name == "head_input"
    assert further.operator("mtp2.state_norm").inputs[0].name == "mtp1.block_output"
    assert further.input.name == "head_input"
    assert further.kind is LayerKind.HEAD


def test_every_operator_reads_what_an_earlier_one_makes():
    made = {"head_input"}
    for operator in head(2).operators:
        assert {tensor.name for tensor in operator.inputs} <= made, operator.name
        made |= {tensor.name for tensor in operator.outputs}
