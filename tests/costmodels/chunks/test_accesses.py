"""When a rank uses which chunks, worked by hand on the action lists."""

from __future__ import annotations

import pytest

from parplan.costmodels.chunks.accesses import MomentSpan, group_uses, layer_passes
from parplan.costmodels.chunks.chunk_layout import SizedTensor, pack
from parplan.costmodels.chunks.chunk_operations import ChunkedBlocks
from parplan.costmodels.schedules.actions import ActionKind
from parplan.costmodels.schedules.schedule import Schedule
from tests.helpers.chunked import DEV, HOST, chunked

F, B = ActionKind.FORWARD, ActionKind.BACKWARD


def moments_of(strategy, rank=0):
    return tuple(
        layer_layer_pass
        for layer_layer_pass in layer_passes(strategy, rank)
        if layer_layer_pass.block is not None
    )


def group_of(blocks, elements, group_elements, ranks=1, home=HOST):
    """Blocks of three tensors of `elements` each, in communication groups of `group_elements`."""
    tensors = [SizedTensor(f"block{block}.{name}", elements) for block in blocks for name in "abc"]
    return ChunkedBlocks(
        home=home,
        blocks=tuple(blocks),
        chunk_layout=pack(tensors, group_elements, ranks, (3,) * len(blocks)),
    )


def test_layers_pass_forward_in_the_order_of_the_model_and_backward_in_the_other():
    passes = tuple(layer_passes(chunked([HOST, DEV], m=1), 0))

    assert [
        (layer_pass.work, layer_pass.layer.kind.value, layer_pass.block) for layer_pass in passes
    ] == [
        (F, "embedding", None),
        (F, "block", 0),
        (F, "block", 1),
        (F, "head", None),
        (B, "head", None),
        (B, "block", 1),
        (B, "block", 0),
        (B, "embedding", None),
    ]


@pytest.mark.parametrize(
    ("schedule", "v", "rank", "expected"),
    [
        pytest.param(Schedule.GPIPE, 1, 0, "F0.0 F0.1 F1.0 F1.1 B0.1 B0.0 B1.1 B1.0", id="gpipe"),
        pytest.param(
            Schedule.ONE_F_ONE_B,
            1,
            1,
            "F0.2 F0.3 B0.3 B0.2 F1.2 F1.3 B1.3 B1.2",
            id="1f1b-last-rank",
        ),
        pytest.param(
            Schedule.INTERLEAVED,
            2,
            1,
            "F0.1 F1.1 F0.3 B0.3 F1.3 B1.3 B0.1 B1.1",
            id="stages-of-a-rank-hold-blocks-apart",
        ),
    ],
)
def test_moments_are_the_blocks_of_the_action_list(schedule, v, rank, expected):
    moments = moments_of(chunked([HOST] * 4, pp=2, m=2, schedule=schedule, v=v), rank)

    assert (
        " ".join(f"{moment.work}{moment.micro_batch}.{moment.block}" for moment in moments)
        == expected
    )


def test_a_chunk_that_two_blocks_share_is_used_in_the_passes_of_both_and_its_gradients_go_once():
    group = group_of([0, 1, 2], elements=1, group_elements=2)
    moments = moments_of(chunked([HOST] * 3, m=2, ends=False))  # F0 F1 F2 B2 B1 B0, twice

    uses = group_uses([group], moments, in_parameters=False)

    assert [use.touched[:4] for use in uses] == [
        (0, 5, 6, 11),
        (0, 1, 4, 5),
        (1, 4, 7, 10),
        (2, 3, 8, 9),
        (2, 3, 8, 9),
    ]
    assert uses[1].runs == (MomentSpan(4, 5), MomentSpan(10, 11))
    assert uses[3].spans == (MomentSpan(2, 3), MomentSpan(8, 9))
    assert uses[0].spans == (MomentSpan(0, 0), MomentSpan(5, 6), MomentSpan(11, 11))


def test_blocks_of_several_ranks_share_no_communication_group_even_where_both_would_fit():
    group = group_of([0, 1], elements=1, group_elements=6, ranks=2)
    moments = moments_of(chunked([HOST] * 2, m=1, ends=False))

    uses = group_uses([group], moments, in_parameters=True)

    assert [use.touched for use in uses] == [(0, 3), (1, 2)]
    assert [use.spans for use in uses] == [
        (MomentSpan(0, 0), MomentSpan(3, 3)),
        (MomentSpan(1, 2),),
    ]
    assert [use.runs for use in uses] == [(MomentSpan(3, 3),), (MomentSpan(2, 2),)]


def test_gradients_over_parameters_keep_a_chunk_from_the_first_of_them_to_the_last():
    group = group_of([0, 2], elements=2, group_elements=12)  # block 1 lies elsewhere
    moments = moments_of(chunked([HOST, DEV, HOST], m=1, ends=False))
    second_group = group_of([1], elements=2, group_elements=12, home=DEV)

    apart = group_uses([group, second_group], moments, in_parameters=False)[0]
    over = group_uses([group, second_group], moments, in_parameters=True)[0]

    assert apart.runs == (MomentSpan(3, 3), MomentSpan(5, 5))
    assert over.runs == (MomentSpan(3, 5),)
    assert over.spans == (MomentSpan(0, 0), MomentSpan(2, 5))


def test_gradients_of_two_micro_batches_are_apart_even_where_one_chunk_is_used_again_at_once():
    moments = moments_of(chunked([HOST] * 4, pp=4, m=8), rank=0)
    (use,) = group_uses([group_of([0], elements=1, group_elements=3)], moments, in_parameters=False)

    assert len(use.runs) == 8
    assert use.spans == (MomentSpan(0, 15),)
