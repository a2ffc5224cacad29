"""The fullest moment of a rank, action by action, worked by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.memory.peak_memory import (
    AlikeLayers,
    ConstantBytes,
    LayerBytes,
    peak_bytes,
    peak_of_runs,
)
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


@pytest.mark.parametrize("schedule", [Schedule.ONE_F_ONE_B, Schedule.EARLY_RECOMPUTE])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_row_of_different_layers_has_the_peak_of_each_mix_one_layer_at_a_time(schedule, rank):
    layers, mixes = 5, 7
    layout = replace(strategy(2, 4).layout, schedule=schedule)
    bytes_of = np.random.default_rng(rank).integers(0, 99, (7, layers, mixes)).astype(float)
    bytes_of[4, :, :3] = bytes_of[4, 2:4] = 0  # layers that reduce nothing
    names = ("saved", "workspace", "gradients", "gathered", "reduced", "remade", "alone")
    end = AlikeLayers(LayerKind.EMBEDDING if rank == 0 else LayerKind.HEAD, held(11, 5, 30))
    constant = ConstantBytes(sent=4, shared_table=9, gathered=6)

    row = AlikeLayers(LayerKind.BLOCK, LayerBytes(**dict(zip(names, bytes_of, strict=True))))
    together = peak_of_runs(layout, rank, [[end, row] if rank == 0 else [row, end]], constant)

    for mix in range(mixes):
        runs = [
            AlikeLayers(
                LayerKind.BLOCK,
                LayerBytes(**dict(zip(names, bytes_of[:, layer, mix], strict=True))),
            )
            for layer in range(layers)
        ]
        chunk = [end, *runs] if rank == 0 else [*runs, end]
        assert together[mix] == peak_of_runs(layout, rank, [chunk], constant).item()
