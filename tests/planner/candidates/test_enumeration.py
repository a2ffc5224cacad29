"""Each mesh is searched or pruned with a reason, no layout comes twice, and pins are kept."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.schedules.schedule import Schedule
from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.candidates.enumeration import illegal_layout, layout_text
from parplan.planner.candidates.meshes import illegal_tensor_parallel
from parplan.planner.deadline import deadline_after
from parplan.planner.request import MAX_MICRO_BATCH_SIZE, Constraints, SearchOptions
from parplan.profiles.divisors import divisors
from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.machine_catalog import load_cluster, with_gpus
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.spec import TrainingSpec
from parplan.profiles.stack import NEUTRAL
from tests.helpers.planning import enumerate_candidates

A100 = load_cluster("a100-80gb")
TINY = load_model("gpt-tiny").spec  # 4 layers, 4 heads, ffn 256, vocabulary 512
TRAINING = TrainingSpec(global_batch_size=8, seq_length=128, stack=NEUTRAL)


def space(num_gpus=8, model=TINY, training=TRAINING, **pins):
    return enumerate_candidates(
        model, with_gpus(A100, num_gpus, min(num_gpus, 8)), training, Constraints(**pins)
    )


def layout(
    *, pp=1, dp=1, tp=1, schedule=Schedule.ONE_F_ONE_B, v=1, b=1, m=8, sequence_parallel=False
):
    return ParallelLayout(
        mesh=Mesh(pp=pp, dp=dp, tp=tp),
        schedule=schedule,
        virtual_stages=v,
        micro_batch_size=b,
        num_micro_batches=m,
        sequence_parallel=sequence_parallel,
    )


@given(number=st.integers(1, 3000))
def test_divisors_are_all_that_divide(number):
    assert divisors(number) == tuple(d for d in range(1, number + 1) if number % d == 0)


@pytest.mark.parametrize(
    ("model", "tp", "across_nodes", "reason"),
    [
        pytest.param(TINY, 4, False, None, id="legal"),
        pytest.param(TINY, 8, False, "tp 8 does not divide the 4 attention heads", id="heads"),
        pytest.param(
            replace(TINY, num_kv_heads=2),
            4,
            False,
            "tp 4 does not divide the 2 key-value heads",
            id="key-value-heads",
        ),
        pytest.param(
            replace(TINY, ffn_hidden_size=258),
            4,
            False,
            "tp 4 does not divide the 258 ffn width",
            id="ffn",
        ),
        pytest.param(
            replace(TINY, num_heads=256, num_kv_heads=256),
            256,
            True,
            "tp 256 does not divide the 128 vocabulary",
            id="padded-vocabulary",
        ),
        pytest.param(
            replace(TINY, num_heads=16, num_kv_heads=16),
            16,
            False,
            "tp 16 does not fit inside a node of 8 GPUs (--tp-across-nodes allows it)",
            id="node",
        ),
        pytest.param(
            replace(TINY, num_heads=16, num_kv_heads=16),
            16,
            True,
            None,
            id="across-nodes-when-allowed",
        ),
    ],
)
def test_tensor_parallelism_is_refused_with_its_reason(model, tp, across_nodes, reason):
    model = replace(model, vocab_size=100) if reason and "vocabulary" in reason else model

    assert (
        illegal_tensor_parallel(tp, model, with_gpus(A100, 16), across_nodes=across_nodes) == reason
    )


def test_a_degree_that_leaves_a_part_of_a_node_over_is_refused():
    model = replace(TINY, num_heads=12, num_kv_heads=12, ffn_hidden_size=384, vocab_size=384)

    assert illegal_tensor_parallel(3, model, with_gpus(A100, 8), across_nodes=False) == (
        "tp 3 does not fit inside a node of 8 GPUs (--tp-across-nodes allows it)"
    )


@pytest.mark.parametrize(
    ("candidate", "reason"),
    [
        pytest.param(layout(pp=2, m=8), None, id="legal"),
        pytest.param(
            layout(dp=3, m=2),
            "the global batch of 8 is not micro-batch 1 x dp 3 x a whole number",
            id="batch",
        ),
        pytest.param(
            layout(pp=4, b=4, m=2),
            "1f1b needs at least pp 4 micro-batches to fill, there are 2",
            id="1f1b-fills",
        ),
        pytest.param(
            layout(pp=4, b=4, m=2, schedule=Schedule.GPIPE), None, id="gpipe-need-not-fill"
        ),
        pytest.param(layout(pp=8), "pp 8 is more than the 4 layers", id="layers"),
        pytest.param(
            layout(pp=2, m=8, schedule=Schedule.INTERLEAVED, v=5),
            "4 layers, or two more, are not a multiple of pp 2 x 5 virtual stages",
            id="virtual-stages",
        ),
        pytest.param(
            layout(pp=2, m=8, schedule=Schedule.INTERLEAVED, v=3),
            None,
            id="virtual-stages-with-shorter-ends",
        ),
        pytest.param(
            layout(pp=4, b=4, m=2, schedule=Schedule.INTERLEAVED, v=2),
            "interleaved needs micro-batches in multiples of the 4 pipeline ranks, found 2",
            id="interleaved-multiples",
        ),
        pytest.param(
            layout(pp=2, m=8, v=2),
            "1f1b has 1 virtual stage per rank, found 2",
            id="1f1b-has-one-chunk",
        ),
        pytest.param(
            layout(sequence_parallel=True),
            "sequence parallelism needs tp > 1 that divides the sequence of 128, tp is 1",
            id="sequence-tp-1",
        ),
        pytest.param(
            layout(tp=3, sequence_parallel=True),
            "sequence parallelism needs tp > 1 that divides the sequence of 128, tp is 3",
            id="sequence-does-not-divide",
        ),
    ],
)
def test_a_frame_is_refused_with_its_reason(candidate, reason):
    assert illegal_layout(candidate, TINY, TRAINING) == reason


@pytest.mark.parametrize("num_gpus", [1, 2, 6, 8, 16, 64])
@pytest.mark.parametrize(
    "pins", [{}, {"tp": (2,)}, {"pp": (1, 2), "zero": (1,)}], ids=["free", "tp-2", "pp-1-or-2"]
)
def test_every_mesh_is_searched_or_pruned(num_gpus, pins):
    candidates = enumerate_candidates(
        TINY, with_gpus(A100, num_gpus, 2 if num_gpus == 6 else None), TRAINING, Constraints(**pins)
    )
    named = {f"pp {f.mesh.pp} x dp {f.mesh.dp} x tp {f.mesh.tp}" for f in candidates.layouts}
    named |= {
        re.match(r"pp \d+ x dp \d+ x tp \d+", pruned.candidate).group()
        for pruned in candidates.pruned
    }

    every = {
        f"pp {pp} x dp {num_gpus // tp // pp} x tp {tp}"
        for tp in divisors(num_gpus)
        for pp in divisors(num_gpus // tp)
    }
    assert named == every


@pytest.mark.parametrize("num_gpus", [8, 64])
def test_nothing_is_enumerated_twice_and_every_frame_is_legal(num_gpus):
    candidates = space(num_gpus)

    names = Counter(
        [layout_text(f) for f in candidates.layouts]
        + [pruned.candidate for pruned in candidates.pruned]
    )
    assert max(names.values()) == 1
    assert len(set(candidates.layouts)) == len(candidates.layouts)
    for candidate in candidates.layouts:
        assert candidate.mesh.num_ranks == num_gpus
        assert illegal_layout(candidate, TINY, TRAINING) is None


def test_the_frames_of_one_small_cluster_by_hand():
    """Two GPUs with batch 2 have three meshes.

    Each allows micro-batches of 1 or 2 where they divide; two micro-batches fill the pipeline.
    """
    candidates = space(2, training=replace(TRAINING, global_batch_size=2))

    assert sorted(layout_text(f) for f in candidates.layouts) == sorted(
        [
            "pp 1 x dp 2 x tp 1, 1f1b, micro-batch 1 x 1",
            "pp 2 x dp 1 x tp 1, 1f1b, micro-batch 1 x 2",
            "pp 2 x dp 1 x tp 1, early-recompute, micro-batch 1 x 2",
            "pp 2 x dp 1 x tp 1, interleaved x 2 virtual stages, micro-batch 1 x 2",
            # 4 blocks, embedding and head over 6 stages
            "pp 2 x dp 1 x tp 1, interleaved x 3 virtual stages, micro-batch 1 x 2",
            "pp 2 x dp 1 x tp 1, gpipe, micro-batch 2 x 1",
            *(
                f"pp 2 x dp 1 x tp 1, zbv x 2 virtual stages, micro-batch {bm}"
                for bm in ("1 x 2", "2 x 1")
            ),
            *(
                f"pp 1 x dp 1 x tp 2, 1f1b, micro-batch {bm}{sp}"
                for bm in ("1 x 2", "2 x 1")
                for sp in ("", ", sequence parallel")
            ),
        ]
    )
    assert [(pruned.candidate, pruned.count) for pruned in candidates.pruned] == [
        ("pp 2 x dp 1 x tp 1, gpipe, micro-batch 1", 1),
        # 2 and 3 virtual stages
        ("pp 2 x dp 1 x tp 1, interleaved x 2 virtual stages, micro-batch 2 x 1", 2),
    ]


@pytest.mark.parametrize(
    ("pins", "holds", "reason"),
    [
        pytest.param(
            {"tp": (2,), "pp": (2,)},
            lambda f: (f.mesh.tp, f.mesh.pp) == (2, 2),
            "excluded by --pp",
            id="mesh",
        ),
        pytest.param(
            {"micro_batch_size": (2,)}, lambda f: f.micro_batch_size == 2, None, id="micro-batch"
        ),
        pytest.param(
            {"schedule": (Schedule.GPIPE,)},
            lambda f: f.mesh.pp == 1 or f.schedule is Schedule.GPIPE,
            "excluded by --schedule",
            id="schedule",
        ),
        pytest.param(
            {"virtual_stages": (2,)},
            lambda f: f.mesh.pp == 1 or f.virtual_stages == 2,
            "excluded by --virtual-stages",
            id="virtual-stages",
        ),
        pytest.param(
            {"sequence_parallel": (True,)},
            lambda f: f.sequence_parallel or f.mesh.tp == 1,
            "excluded by --sequence-parallel",
            id="sequence-parallel",
        ),
    ],
)
def test_a_pin_keeps_exactly_what_it_names(pins, holds, reason):
    free, pinned = space(), space(**pins)

    assert pinned.layouts
    assert all(map(holds, pinned.layouts))
    expected = {f for f in free.layouts if holds(f)}
    assert expected <= set(pinned.layouts)  # GPipe is enumerated beside 1F1B only when it is pinned
    assert reason is None or reason in {pruned.reason for pruned in pinned.pruned}


def test_large_micro_batches_are_tried_only_when_pinned():
    batch = replace(TRAINING, global_batch_size=4 * MAX_MICRO_BATCH_SIZE)

    assert max(f.micro_batch_size for f in space(1, training=batch).layouts) == MAX_MICRO_BATCH_SIZE
    assert {
        f.micro_batch_size
        for f in space(1, training=batch, micro_batch_size=(2 * MAX_MICRO_BATCH_SIZE,)).layouts
    } == {128}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param(
            lambda: Constraints(pp=(2, 0)),
            "--pp is 0, it must be from 1 to 10,000,000",
            id="degree",
        ),
        pytest.param(
            lambda: Constraints(micro_batch_size=(-1,)),
            "--micro-batch-size is -1, it must be from 1 to 1,000,",
            id="micro-batch",
        ),
        pytest.param(
            lambda: Constraints(zero=(4,)), "--zero is 4, it must be 0, 1, 2 or 3", id="zero"
        ),
        pytest.param(
            lambda: SearchOptions(max_slowdown=-0.1),
            "--max-slowdown is -0.1, it must be from 0 to 1000",
            id="slowdown",
        ),
        pytest.param(
            lambda: SearchOptions(memory_margin=1.0),
            r"--memory-margin is 1.0, it must be in \[0, 1\)",
            id="margin",
        ),
        pytest.param(
            lambda: deadline_after(0.0), "--time-limit is 0.0, it must be positive", id="time-limit"
        ),
    ],
)
def test_a_request_that_cannot_be_is_refused_with_its_option(options, message):
    with pytest.raises(ConfigError, match=message):
        options()
