"""Blocks as parts that are one access each, in the order of their passes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parplan.costmodels.host.state_location import Access
from parplan.costmodels.layers.block_parts import part_passes, parts_of, tensor_counts
from parplan.costmodels.layers.recompute import Recompute, recompute_operators
from parplan.profiles.models.transformer import build_graph
from tests.helpers.executor_plans import GPT, LLAMA, MIXTRAL
from tests.helpers.uniform_strategies import TRAINING


def block_of(model):
    return build_graph(model, replace(TRAINING, seq_length=8), 1).block


def names(model, access=Access.OPERATOR):
    return [" ".join(each.name for each in part) for part in parts_of(block_of(model), access)]


def passes(recomputed, backward=True, model=GPT, access=Access.OPERATOR):
    block = block_of(model)
    some = recompute_operators(block, recomputed)
    return [
        (each.part, each.reads, each.makes, each.rerun)
        for each in part_passes(block, access, some, backward=backward)
    ]


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        pytest.param(
            GPT,
            [
                "norm1 qkv attention",
                "attention_out residual1",
                "norm2 fc1 activation",
                "fc2 residual2",
            ],
            id="gpt",
        ),
        pytest.param(
            replace(LLAMA, parallel_residual=True),
            [
                "norm1 qkv rotary attention",
                "attention_out",
                "norm2 fc1 activation",
                "fc2 residual2",
            ],
            id="parallel-residual",
        ),
        pytest.param(
            MIXTRAL,
            [
                "norm1 qkv rotary attention",
                "attention_out residual1",
                "norm2 router choice dispatch",
                "fc1 activation",
                "fc2 combine residual2",
            ],
            id="mixture-of-experts",
        ),
    ],
)
def test_a_part_is_an_operator_with_parameters_and_those_behind_it(model, expected):
    assert names(model) == expected
    assert len(names(model, Access.BLOCK)) == 1


def test_the_tensors_of_all_parts_are_those_of_the_block():
    block = block_of(GPT)

    assert tensor_counts(block, Access.OPERATOR) == (4, 2, 4, 2)
    assert tensor_counts(block, Access.BLOCK) == (12,)


def test_by_blocks_a_pass_is_one_access():
    assert passes(Recompute.FULL, access=Access.BLOCK) == [(0, (0,), (0,), False)]


def test_the_forward_pass_takes_the_parts_in_order_and_the_backward_pass_in_the_other():
    assert [part for part, *_ in passes(Recompute.NONE, backward=False)] == [0, 1, 2, 3]
    assert passes(Recompute.NONE) == [(part, (part,), (part,), False) for part in (3, 2, 1, 0)]


def test_a_whole_recompute_runs_all_parts_but_the_last_again_before_the_backward_pass():
    again = [(part, (part,), (), True) for part in (0, 1, 2)]

    assert passes(Recompute.FULL) == again + passes(Recompute.NONE)


@pytest.mark.parametrize(
    ("recomputed", "reads"),
    [
        pytest.param(("norm1",), {0: (0,), 1: (1,), 2: (2,), 3: (3,)}, id="norm"),
        pytest.param(("qkv",), {0: (0,), 1: (1,), 2: (2,), 3: (3,)}, id="read-in-its-part"),
        # the product behind the activation reads a tensor that needs fc1 again
        pytest.param(("fc1", "activation"), {0: (0,), 1: (1,), 2: (2,), 3: (2, 3)}, id="chain"),
        # norm2 saves the sum that needs attention_out again
        pytest.param(
            ("attention_out", "residual1"), {0: (0,), 1: (1,), 2: (1, 2), 3: (3,)}, id="residual"
        ),
    ],
)
def test_a_list_of_operators_needs_the_parts_that_make_their_tensors_again(recomputed, reads):
    assert {part: read for part, read, _, _ in passes(recomputed)} == reads
