"""The fullest moment of a rank, action by action, worked by hand."""

from __future__ import annotations

import pytest

from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.memory.peak_memory import ConstantBytes, LayerBytes, peak_bytes
from parplan.costmodels.schedules.schedule import Schedule
from parplan.costmodels.strategy import LayerChoice, ParallelLayout, Strategy
from parplan.profiles.models.operator_graph import LayerKind

EMBEDDING = LayerChoice(LayerKind.EMBEDDING, Recompute.NONE, 0)
BLOCK = LayerChoice(LayerKind.BLOCK, Recompute.NONE, 0)
HEAD = LayerChoice(LayerKind.HEAD, Recompute.NONE, 0)


def strategy(pp: int, num_micro_batches: int) -> Strategy:
    """Two blocks on one rank or on two."""
    layout = ParallelLayout(
        mesh=Mesh(pp=pp, dp=1, tp=1),
        schedule=Schedule.ONE_F_ONE_B,
        virtual_stages=1,
        micro_batch_size=1,
        num_micro_batches=num_micro_batches,
        sequence_parallel=False,
    )
    return Strategy(
        layout=layout,
        stages=((EMBEDDING, BLOCK, BLOCK, HEAD),)
        if pp == 1
        else ((EMBEDDING, BLOCK), (BLOCK, HEAD)),
    )


def held(saved: float, workspace: float, gradients: float) -> LayerBytes:
    return LayerBytes(saved=saved, workspace=workspace, gradients=gradients)


LAYERS = {EMBEDDING: held(1, 5, 30), BLOCK: held(100, 20, 7), HEAD: held(10, 50, 3)}


@pytest.mark.parametrize(
    ("pp", "rank", "num_micro_batches", "throughout", "expected"),
    [
        pytest.param(1, 0, 1, ConstantBytes(), 211 + 50, id="gradients-come-after-the-activations"),
        pytest.param(
            1, 0, 2, ConstantBytes(), 211 + 50 + 47, id="in-a-second-micro-batch-they-are-there"
        ),
        pytest.param(
            1,
            0,
            1,
            ConstantBytes(shared_table=90),
            201 + 3 + 90 + 20,
            id="a-shared-table-waits-while-blocks-run",
        ),
        pytest.param(
            1, 0, 1, ConstantBytes(reduced=400), 47 + 400, id="a-reduction-after-the-last-pass"
        ),
        pytest.param(2, 0, 2, ConstantBytes(), 2 * 101 + 20, id="all-forward-passes-come-first"),
        pytest.param(2, 1, 2, ConstantBytes(sent=4), 110 + 50 + 10 + 4, id="what-was-sent-stays"),
    ],
)
def test_the_fullest_moment_is_the_one_found_by_hand(
    pp, rank, num_micro_batches, throughout, expected
):
    assert peak_bytes(strategy(pp, num_micro_batches), rank, LAYERS, throughout) == expected
