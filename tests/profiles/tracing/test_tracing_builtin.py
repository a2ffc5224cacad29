"""Traced GPT and Llama beside their built-in description: parameters, FLOPs and saved bytes.

The terms that differ are those of docs/design/tracing.md. The executor's modules are what the
description describes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache

import pytest

from parplan.costmodels.operators.compute import operator_time
from parplan.costmodels.operators.sharding import Sharding
from parplan.profiles.machines.machine_catalog import load_cluster, load_stack
from parplan.profiles.machines.shipped_profiles import machine_for
from parplan.profiles.models.module_source import ModuleSource
from parplan.profiles.models.operator_graph import LayerClass, ModelGraph, Operator
from parplan.profiles.models.spec import ModelSpec, Precision, TrainingSpec
from parplan.profiles.models.traced_model import TracedModel
from parplan.profiles.models.transformer import build_graph
from parplan.profiles.tracing.trace import trace
from tests.helpers.builtin_modules import (
    CONFIGS,
    LARGE_GPT,
    LARGE_LLAMA,
    LONG,
    SEQ_LENGTH,
    SPECS,
    TRAINING,
    spec_of,
)
from tests.helpers.cases import mostly_slow

B = 2  # samples of a traced micro-batch
TOKENS = B * SEQ_LENGTH
HIDDEN = 64
OWN = ("gpt", "gpt_dropped", "neox", "llama")
BLOCK = {"gpt2": "transformer.h.1.", "gpt_neox": "gpt_neox.layers.1.", "llama": "model.layers.1."}


def own_spec(name: str) -> ModelSpec:
    return SPECS[name.replace("_", "-")]


@cache
def traced(
    name: str, precision: Precision = Precision.BF16, *, on_cpu: bool = False
) -> TracedModel:
    return trace(
        ModuleSource(factory=f"tests.helpers.builtin_modules:{name}"),
        seq_length=SEQ_LENGTH,
        precision=precision,
        on_cpu=on_cpu,
    )


@cache
def traced_hugging_face(name: str) -> TracedModel:
    return trace(ModuleSource(huggingface=CONFIGS[name]), seq_length=SEQ_LENGTH)


def described(
    spec: ModelSpec, training: TrainingSpec = TRAINING, *, plain_dropout: bool = False
) -> ModelGraph:
    return build_graph(spec, training, B, plain_dropout=plain_dropout)


def part(model: TracedModel, *paths: str) -> tuple[Operator, ...]:
    return tuple(each.operator for each in model.operators if each.operator.name.startswith(paths))


def kept_bytes(operators: Iterable[Operator]) -> int:
    return sum(
        {
            tensor.name: tensor.num_bytes for operator in operators for tensor in operator.saved
        }.values()
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", OWN)
def test_parameters_and_flops_of_the_executors_modules_are_those_of_the_description(name):
    traced_model, expected = traced(name), described(own_spec(name))

    assert traced_model.num_parameters == expected.num_parameters
    assert traced_model.model_flops == expected.model_flops
    for layer, path in (
        (expected.embedding, "embedding."),
        (expected.block, "blocks.1."),
        (expected.head, "head."),
    ):
        operators = part(traced_model, path)
        assert sum(each.flops_forward for each in operators) == layer.flops_forward
        assert sum(each.flops_backward for each in operators) == layer.flops_backward
        assert (
            sum(p.num_elements for each in operators for p in each.parameters)
            == layer.num_parameters
        )


@pytest.mark.slow
@pytest.mark.parametrize("name", mostly_slow(CONFIGS, {"llama"}))
def test_parameters_and_flops_of_hugging_face_models_are_those_of_the_description(name):
    traced_model, expected = traced_hugging_face(name), described(spec_of(CONFIGS[name]))

    assert traced_model.num_parameters == expected.num_parameters
    assert traced_model.model_flops == expected.model_flops


@pytest.mark.parametrize("name", OWN)
def test_the_executors_blocks_keep_what_is_described_and_the_statistics_of_their_norms(name):
    """Two norms, each with two fp32 numbers a token (layer norm) or one (rms norm)."""
    expected = described(own_spec(name)).block
    statistics = 2 * 4 * TOKENS * (1 if name == "llama" else 2)

    assert (
        kept_bytes(part(traced(name), "blocks.1.")) == kept_bytes(expected.operators) + statistics
    )


@pytest.mark.parametrize("name", OWN)
def test_embedding_and_head_keep_what_is_described_and_where_the_targets_are(name):
    """The loss saves two tensors besides the statistics of the norm.

    They are each token's target (int64) and whether it is on this rank (bool).
    """
    traced_model, expected = traced(name), described(own_spec(name))
    statistics = 4 * TOKENS * (1 if name == "llama" else 2)

    assert kept_bytes(part(traced_model, "embedding.")) == kept_bytes(expected.embedding.operators)
    assert (
        kept_bytes(part(traced_model, "head."))
        == kept_bytes(expected.head.operators) + statistics + 9 * TOKENS
    )


@pytest.mark.slow
def test_what_a_cpu_keeps_with_dropout_in_fp32_is_described_as_well():
    """Its attention keeps scores, masks and dropped scores, and its norms statistics of fp32."""
    spec, training = own_spec("gpt_dropped"), replace(TRAINING, precision=Precision.FP32)
    expected = described(spec, training, plain_dropout=True)

    traced_model = traced("gpt_dropped", Precision.FP32, on_cpu=True)

    assert (
        kept_bytes(part(traced_model, "blocks.1."))
        == kept_bytes(expected.block.operators) + 2 * 2 * 4 * TOKENS
    )
    assert kept_bytes(part(traced_model, "embedding.")) == kept_bytes(expected.embedding.operators)


STATISTICS = 2 * 2 * 4 * TOKENS  # of two layer norms
FFN, LLAMA_FFN = 256, 160
ACTIVATION = 2 * TOKENS  # bytes of one feature in bf16
DIFFERENCES = {  # of a block, in the order of docs/design/tracing.md
    # gelu_new is made of single calls, which keep tanh and two factors besides its input
    "gpt2": {"statistics": STATISTICS, "gelu": 3 * FFN * ACTIVATION},
    # values stay views of qkv, so its queries and keys stay beside the rotated ones; attention's
    # output is copied before the next product
    "gpt_neox": {
        "statistics": STATISTICS,
        "qkv": 2 * HIDDEN * ACTIVATION,
        "context": HIDDEN * ACTIVATION,
    },
    # rms norms are made of single calls, which keep an fp32 copy of the input, its normalized form
    # in bf16 and one fp32 number a token, but not the input itself; silu(gate) is kept beside gate
    # and up
    "llama": {
        "statistics": 2 * 4 * TOKENS,
        "fp32 inputs": 2 * (4 - 2) * HIDDEN * TOKENS,
        "normalized": 2 * HIDDEN * ACTIVATION,
        "silu": LLAMA_FFN * ACTIVATION,
    },
}


@pytest.mark.parametrize("name", list(CONFIGS))
def test_what_blocks_of_hugging_face_keep_beyond_the_description_is_explained_term_by_term(name):
    expected = described(spec_of(CONFIGS[name])).block

    more = kept_bytes(part(traced_hugging_face(name), BLOCK[name])) - kept_bytes(expected.operators)

    assert more == sum(DIFFERENCES[name].values())


@pytest.mark.parametrize("name", list(CONFIGS))
def test_the_head_of_hugging_face_keeps_fp32_probabilities_as_described(name):
    """The head saves the norm's statistics and an int64 target a token too.

    It also saves the number of tokens; an un-fused norm is as in the blocks.
    """
    traced_model = traced_hugging_face(name)
    operators = part(traced_model, "lm_head", "cross_entropy")

    assert (
        kept_bytes(operators)
        == kept_bytes(described(spec_of(CONFIGS[name])).head.operators)
        - 2 * HIDDEN * TOKENS
        + 8 * TOKENS
        + 4
    )


MACHINE = machine_for(load_cluster("a100-80gb"))


def seconds(operators: Iterable[Operator], training: TrainingSpec) -> tuple[float, float]:
    times = [operator_time(each, Sharding(), MACHINE, training) for each in operators]
    return sum(time.forward.value_s for time in times), sum(time.backward.value_s for time in times)


@pytest.mark.parametrize(("name", "spec"), [("gpt_large", LARGE_GPT), ("llama_large", LARGE_LLAMA)])
def test_operators_of_a_traced_block_are_priced_as_those_of_the_description(name, spec):
    """Rotary positions and the copies of queries, keys and values differ.

    The description prices them as one kernel.
    """
    training = replace(TRAINING, seq_length=LONG, stack=load_stack("parplan"))
    traced_model = trace(
        ModuleSource(factory=f"tests.helpers.builtin_modules:{name}"), seq_length=LONG
    )
    block: LayerClass = build_graph(spec, training, B).block
    single = (
        "blocks.0.rotary",
        *(f"blocks.0.attention.{copy}" for copy in ("flatten", "contiguous")),
    )
    operators = [
        each for each in part(traced_model, "blocks.0.") if not each.name.startswith(single)
    ]
    fused = [each for each in block.operators if each.name != "rotary"]

    assert seconds(operators, training) == pytest.approx(seconds(fused, training), rel=1e-4)
