"""Modules from elsewhere are traced, planned and trained as in one process.

Others are refused with the reason and a hint.
"""

from __future__ import annotations

import multiprocessing
import resource

import pytest
import torch
from torch import nn

from parplan.executor.checking.parity import (
    GRADIENT_TOLERANCE,
    LOSS_TOLERANCE,
    gradient_errors,
    loss_errors,
)
from parplan.executor.traced.program_cut import cut_program
from parplan.executor.traced.traced_parity import run_traced_plans, run_traced_reference
from parplan.planner.request import Constraints
from parplan.planner.traced.shards import Cutting, shard
from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.machine_catalog import load_cluster, load_stack, with_gpus
from parplan.profiles.models.module_source import ModuleSource
from parplan.profiles.models.spec import Precision, TrainingSpec
from parplan.profiles.tracing.record import record
from parplan.profiles.tracing.stand_ins import replaced_parameters
from parplan.profiles.tracing.trace import trace
from parplan.profiles.tracing.traced_source import open_workload
from parplan.profiles.units import GIB
from tests.helpers.planning import plan_traced_module
from tests.helpers.traced_plans import hand_plan

SEQ_LENGTH = 16


def source(name: str) -> ModuleSource:
    return ModuleSource(factory=f"tests.helpers.zoo:{name}")


def traced(name: str):
    return trace(source(name), seq_length=SEQ_LENGTH, precision=Precision.FP32, on_cpu=True)


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param(
            "same_layer_four_times", {"dp": 2, "zero": 1}, id="one-layer-under-four-names"
        ),
        pytest.param(
            "same_layer_four_times", {"pp": 2}, id="one-layer-on-two-stages", marks=pytest.mark.slow
        ),
        pytest.param("updated_buffer", {"dp": 2, "shards_a_stage": 1}, id="a-buffer-of-each-rank"),
        pytest.param(
            "updated_buffer",
            {"recompute": True, "shards_a_stage": 1, "num_micro_batches": 2},
            id="a-shard-that-counts-runs-again",
        ),
        pytest.param(
            "assigned_buffer",
            {"shards_a_stage": 1, "num_micro_batches": 2},
            id="a-buffer-that-is-assigned",
        ),
        pytest.param(
            "scaled_by_a_scalar", {"dp": 2, "zero": 3, "shards_a_stage": 1}, id="a-scalar-sharded"
        ),
        pytest.param(
            "chunked_parameter",
            {"dp": 2, "zero": 3, "shards_a_stage": 3},
            id="views-of-a-parameter-in-several-shards",
        ),
        pytest.param(
            "scaled_by_a_scalar", {"tp": 2, "shards_a_stage": 1}, id="a-scalar-beside-divided"
        ),
    ],
)
def test_it_trains_as_in_one_process(name, options):
    plan = hand_plan(f"tests.helpers.zoo:{name}", **options)
    (actual,), expected = run_traced_plans([plan]), run_traced_reference(plan, by_micro_batch=True)

    assert actual.agree
    assert max(loss_errors(actual, expected)) <= LOSS_TOLERANCE
    assert max(gradient_errors(actual, expected).values()) <= GRADIENT_TOLERANCE


def test_a_recording_leaves_parameters_and_buffers_as_they_were():
    for name in ("same_block_twice", "lstm", "assigned_buffer"):
        workload = open_workload(source(name), seq_length=SEQ_LENGTH)
        before = [
            *workload.module.named_parameters(remove_duplicate=False),
            *workload.module.named_buffers(),
        ]

        record(workload, 2)
        after = [
            *workload.module.named_parameters(remove_duplicate=False),
            *workload.module.named_buffers(),
        ]

        assert [key for key, _ in after] == [key for key, _ in before]
        assert all(new is old for (_, new), (_, old) in zip(after, before, strict=True))


def test_the_list_of_weights_of_an_lstm_has_the_stand_ins_and_then_its_own_again():
    module = nn.LSTM(2, 3)
    actual = {
        name: nn.Parameter(torch.ones_like(parameter))
        for name, parameter in module.named_parameters()
    }

    with replaced_parameters(module, actual):
        assert all(a is b for a, b in zip(module._flat_weights, actual.values(), strict=True))
    assert all(a is b for a, b in zip(module._flat_weights, module.parameters(), strict=True))


@pytest.mark.parametrize(
    "name",
    [
        "lstm_cell",
        "gru_cell",
        "rnn_cell",
        "unrolled_cells",
        "multihead_attention_with_all_flags",
        "transformer",
        "spectral_norm",
        "orthogonal",
        "parameter_collections",
        "returns_a_dataclass",
        "custom_function",
        "fourier",
        "in_place",
        "hooked",
        "reports_its_calls",
    ],
)
def test_it_is_traced(name):
    assert traced(name).num_parameters > 0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "raises_by_itself",
            r"a forward pass of Called raises ValueError at tests/helpers/zoo\.py:\d+: "
            r"this module cannot run",
        ),
        ("raises_when_made", r"raises_when_made\(\) raises KeyError at tests/helpers/zoo\.py:\d+"),
        ("wrong_shapes", r"raises RuntimeError at tests/helpers/zoo\.py:\d+: "),
        (
            "embedding_with_max_norm",
            r"tests/helpers/zoo\.py:\d+ writes into parameter module\.weight",
        ),
        ("sparse_embedding", r"module\.0 \(Embedding\) has sparse gradients"),
        ("sync_batch_norm", "asks all ranks for their batch"),
        ("scripted", "is TorchScript"),
        ("data_parallel", "copies the module to devices by itself"),
        ("lazy_linear", "LazyLinear makes its weight in the first forward pass"),
        ("complex_parameter", "parameter weight is torch.complex64, it must be fp32"),
        ("empty_parameter", "parameter one is empty"),
        ("nothing_learns", "depends on no parameter that learns"),
        ("layer_drop_by_python", "draws random numbers of Python or numpy"),
        ("layer_drop_by_numpy", "draws random numbers of Python or numpy"),
        ("counts_in_the_module", r"_CountsInPython\.calls changes in every forward pass"),
        ("counts_in_the_class", r"_CountsInPython\.total changes in every forward pass"),
        ("counts_in_a_dict", r"_CountsInPython\.log\.calls changes in every forward pass"),
        ("counts_by_a_flag", r"_CountsInPython\.flip changes in every forward pass"),
        (
            "layer_drop_by_torch",
            r"tests/helpers/zoo\.py:\d+ does depends on the values of a tensor",
        ),
        (
            "keeps_activations",
            r"tests/helpers/zoo\.py:\d+ uses a tensor \[8\] that no call of torch made",
        ),
        ("batch_norm_momentum_none", "depends on the values of a tensor"),
        ("large_buffer", r"its buffers are 64\.0 GiB"),
    ],
)
def test_what_cannot_be_trained_is_one_error_with_its_line_and_a_hint(name, message):
    with pytest.raises(ConfigError, match=message) as caught:
        traced(name)

    assert caught.value.hint


def test_no_stage_ends_where_a_value_without_gradient_would_be_handed_on():
    training = TrainingSpec(
        global_batch_size=8,
        seq_length=SEQ_LENGTH,
        precision=Precision.FP32,
        stack=load_stack("parplan"),
    )
    plan = plan_traced_module(
        source("frozen_parameters"),
        with_gpus(load_cluster("cpu"), 2),
        training,
        constraints=Constraints(pp=(2,)),
        cross_skips=True,
    )

    cut_program(
        plan,
        record(
            open_workload(source("frozen_parameters"), seq_length=SEQ_LENGTH),
            plan.pipeline.micro_batch_size,
        ),
    )
    assert [
        value.tensor.name
        for value in shard(traced("masks_late"), Cutting(cross_skips=True)).values.by_name.values()
        if not value.gradient
    ]
    assert all(
        value.gradient
        for cross in (False, True)
        for model in [shard(traced("masks_late"), Cutting(cross_skips=cross))]
        for later_shard in model.shards[1:]
        for value in model.values.by_name.values()
        if value.crosses(later_shard.first)
    )


def test_what_reads_and_what_writes_a_buffer_stay_together():
    model = traced("same_norm_twice")
    places = [
        place
        for place, operator in enumerate(model.operators)
        if "module.1.running_mean" in operator.counts
    ]

    assert len(places) == 2
    assert not any(
        min(places) < one_shard.first <= max(places)
        for one_shard in shard(model, Cutting(cross_skips=True)).shards
    )


def _opens_in_little_memory(end) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (8 * GIB, 8 * GIB))
    experts = {
        "model_type": "deepseek_v3",
        "hidden_size": 7168,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "num_hidden_layers": 1,
        "first_k_dense_replace": 0,
        "vocab_size": 64,
    }
    workload = open_workload(ModuleSource(huggingface=experts), seq_length=SEQ_LENGTH)
    end.send(sum(parameter.nbytes for parameter in workload.module.parameters()))


@pytest.mark.slow
def test_experts_of_40_gib_are_opened_in_8():
    context = multiprocessing.get_context("fork")
    end, second = context.Pipe(duplex=False)
    child = context.Process(target=_opens_in_little_memory, args=(second,))
    child.start()
    second.close()
    actual = end.recv() if end.poll(60) else 0
    child.join()

    assert actual > 40 * GIB


@pytest.mark.slow
def test_grouped_products_of_experts_are_counted_in_fp32_as_in_bf16():
    config = {
        "model_type": "mixtral",
        "num_hidden_layers": 1,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 64,
        "num_local_experts": 4,
    }
    single, half = (
        trace(
            ModuleSource(huggingface=config),
            seq_length=SEQ_LENGTH,
            precision=precision,
            on_cpu=True,
        )
        for precision in (Precision.FP32, Precision.BF16)
    )
    grouped = [
        operator.operator for operator in single.operators if "grouped_mm" in operator.operator.name
    ]

    assert single.model_flops == half.model_flops
    assert (
        sum(each.flops_forward for each in grouped) == 2 * 3 * (2 * SEQ_LENGTH * 2) * 32 * 48
    )  # 2 samples, 2 experts a token
