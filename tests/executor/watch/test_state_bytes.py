from __future__ import annotations

import itertools

import pytest

from parplan.costmodels.layers.model_states import StateBytes
from parplan.executor.watch.state_bytes import predicted_state_bytes, table
from parplan.profiles.models.spec import Precision
from parplan.profiles.models.transformer import build_graph
from tests.helpers.executor_plans import GPT, LLAMA, make_plan


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
@pytest.mark.parametrize("dp", [2, 3])
def test_zero3_holds_sixteen_bytes_of_every_parameter_once_over_the_ranks(dp, precision):
    plan = make_plan(LLAMA, pp=2, dp=dp, zero=(3,), global_batch_size=12, precision=precision)
    num_parameters = build_graph(plan.model, plan.training, 1).num_parameters

    held = sum(
        predicted_state_bytes(plan, pp, rank).total
        for pp, rank in itertools.product(range(2), range(dp))
    )

    assert held == 16 * num_parameters  # fp32: 4 + 4 + 8; bf16: gradient 4, master 4, moments 8


def test_a_tied_embedding_counts_once_on_one_stage_and_twice_on_two():
    whole, cut = make_plan(GPT), make_plan(GPT, pp=2)
    table_bytes = 4 * GPT.padded_vocab_size * GPT.hidden_size

    held = sum(predicted_state_bytes(cut, pp, 0).parameters for pp in range(2))

    assert held - predicted_state_bytes(whole, 0, 0).parameters == table_bytes


def test_the_table_names_the_rank_whose_bytes_differ():
    same, second = StateBytes(1024, 2048, 4096), StateBytes(1024, 2048, 4097)

    lines = table([((0, 0, 0), same, same), ((0, 0, 1), same, second)])

    assert lines[1].split()[:3] + lines[1].split()[-1:] == ["0", "0", "0", "equal"]
    assert lines[2].split()[:3] + lines[2].split()[-1:] == ["0", "0", "1", "DIFFERS"]
