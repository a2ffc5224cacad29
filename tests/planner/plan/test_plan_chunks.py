"""Plans with blocks in chunks are made by hand, written, read back, priced again and broken."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parplan.costmodels.chunks.chunk_layout import SizedTensor, pack
from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.host.offload import Offload
from parplan.costmodels.host.state_location import Eviction, StateLocation
from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.schedules.schedule import Schedule
from parplan.costmodels.strategy import ParallelLayout
from parplan.executor.checking.shrunk_plan import shrunk
from parplan.planner.plan.chunk_levels import levels
from parplan.planner.plan.plan_chunks import busiest_rank, rank_chunks_of
from parplan.planner.plan.plan_file import (
    plan_from_document,
    plan_to_document,
    read_plan,
    write_plan,
)
from parplan.planner.plan.plan_strategy import prices_of_plan
from parplan.planner.plan.reprice import reprice
from parplan.planner.request import Constraints, SearchOptions
from parplan.planner.runs.rank_checks import repriced_today
from parplan.planner.search.estimate import ChunkRequest
from parplan.profiles.errors import ConfigError, InfeasibleError
from parplan.profiles.machines.machine_catalog import (
    load_cluster,
    load_stack,
    with_gpus,
)
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.spec import Precision, TrainingSpec
from parplan.profiles.units import GIB, spans_text
from parplan.report.plans.chunk_tables import blocks_by_location, fullest_levels
from tests.helpers.chunk_formulas import OwnedShares, copied_in_bytes, copied_out_bytes
from tests.helpers.planning import estimate_plan, find_plan

TINY = replace(load_model("gpt-tiny").spec, num_layers=8)
HALF = TrainingSpec(
    global_batch_size=8,
    seq_length=128,
    precision=Precision.FP16,
    gradient_precision=Precision.FP16,
    stack=load_stack("parplan"),
)
DEVICE = StateLocation.DEVICE
OPTIMIZER = StateLocation.OPTIMIZER
HOST = StateLocation.HOST


def estimate(request, pp=1, dp=1, m=1, v=1, training=HALF, model=TINY, **options):
    schedule = Schedule.ONE_F_ONE_B if v == 1 else Schedule.INTERLEAVED
    layout = ParallelLayout(
        mesh=Mesh(pp=pp, dp=dp, tp=1),
        schedule=schedule,
        virtual_stages=v,
        micro_batch_size=8 // (dp * m),
        num_micro_batches=m,
        sequence_parallel=False,
    )
    cluster = with_gpus(load_cluster("v100-32gb"), pp * dp)
    return estimate_plan(
        model, cluster, training, layout, chunks=request, recompute=Recompute.FULL, **options
    )


def chunked(
    host=3,
    optimizer=2,
    pp=1,
    dp=1,
    m=1,
    v=1,
    training=HALF,
    eviction=Eviction.OPT,
    budget=2 * GIB,
    **options,
):
    request = ChunkRequest(
        host_blocks=host, optimizer_blocks=optimizer, eviction=eviction, device_bytes=budget
    )
    return estimate(request, pp, dp, m, v, training, **options)


def smallest(**options):
    return max(rank.smallest_bytes for rank in chunked(**options).chunks.ranks)


@pytest.mark.parametrize(
    ("host", "optimizer", "num_blocks", "expected"),
    [
        pytest.param(
            1, 2, 5, (DEVICE, DEVICE, OPTIMIZER, OPTIMIZER, HOST), id="the-last-on-the-host"
        ),
        pytest.param(9, 9, 3, (HOST, HOST, HOST), id="no-more-than-there-are"),
        pytest.param(0, 9, 2, (OPTIMIZER, OPTIMIZER), id="optimizer-alone"),
        pytest.param(0, 0, 2, (DEVICE, DEVICE), id="none"),
    ],
)
def test_homes_that_a_request_gives_by_hand(host, optimizer, num_blocks, expected):
    assert ChunkRequest(host_blocks=host, optimizer_blocks=optimizer).homes(num_blocks) == expected


def test_the_file_says_homes_by_layer_plan_and_every_block_has_one():
    plan = chunked(pp=2, dp=2, m=4)

    assert [layer_plan.offload for layer_plan in plan.layer_plans.values()] == [
        (),
        (Offload.OPTIMIZER,),
        (Offload.OPTIMIZER, Offload.PARAMETERS),
        (),
    ]
    assert blocks_by_location(plan) == {
        (0, OPTIMIZER): [0],
        (0, HOST): [1, 2, 3],
        (1, OPTIMIZER): [4],
        (1, HOST): [5, 6, 7],
    }
    assert {layer_plan.zero for layer_plan in plan.layer_plans.values()} == {3}


def test_with_virtual_stages_the_last_blocks_of_a_rank_are_those_of_its_last_stage_first():
    plan = chunked(host=3, optimizer=0, pp=2, dp=1, m=2, v=2)

    assert blocks_by_location(plan) == {
        (0, DEVICE): [0],
        (0, HOST): [1, 4, 5],
        (1, DEVICE): [2],
        (1, HOST): [3, 6, 7],
    }


def test_groups_are_the_tensors_of_their_blocks_packed():
    plan = chunked(dp=2, m=2)
    h = TINY.hidden_size
    block = (h, h, 3 * h * h, 3 * h, h * h, h, h, h, 4 * h * h, 4 * h, 4 * h * h, h)
    for group, count in zip(plan.chunks.groups, (3, 2, 3), strict=True):
        chunk_layout = pack(
            [SizedTensor("", size) for size in block * count],
            2 * group.chunk_elements,
            2,
            (len(block),) * count,
        )

        assert (group.num_chunks, group.utilisation) == (
            chunk_layout.num_chunks,
            pytest.approx(chunk_layout.utilisation, abs=1e-6),
        )


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="one-rank"),
        pytest.param({"dp": 2, "m": 2, "eviction": Eviction.LRU}, id="two-ranks-lru"),
        pytest.param(
            {"pp": 2, "dp": 2, "m": 2, "v": 2, "eviction": Eviction.FIFO}, id="virtual-stages-fifo"
        ),
        pytest.param(
            {
                "host": 8,
                "training": replace(
                    HALF, precision=Precision.FP32, gradient_precision=Precision.FP32
                ),
            },
            id="fp32",
        ),
        pytest.param({"host": 0, "optimizer": 0, "dp": 2}, id="all-on-the-device"),
        pytest.param({"offload": (Offload.ACTIVATIONS,)}, id="activations-too"),
    ],
)
def test_a_plan_is_written_read_back_and_priced_again_the_same(tmp_path, options):
    plan = chunked(**options)
    write_plan(plan, tmp_path / "plan.yaml")
    reread = read_plan(tmp_path / "plan.yaml")

    assert reread == plan
    assert reprice(reread).plan == plan


@pytest.mark.parametrize("eviction", list(Eviction))
def test_the_schedule_of_a_plan_moves_the_bytes_that_its_file_predicts(eviction):
    budget = smallest(host=8, optimizer=0, pp=2, m=4) + 300_000
    plan = chunked(host=8, optimizer=0, pp=2, m=4, eviction=eviction, budget=budget)
    for rank in plan.chunks.ranks:
        chunks = rank_chunks_of(plan, rank.stage)

        assert (chunks.in_bytes, chunks.out_bytes) == (rank.in_bytes, rank.out_bytes)
        assert (chunks.device_bytes, chunks.smallest_bytes) == (
            rank.device_bytes,
            rank.smallest_bytes,
        )


@pytest.mark.parametrize(("dp", "m"), [(1, 1), (1, 4), (2, 2)])
def test_with_room_for_all_a_step_moves_what_the_closed_form_says(dp, m):
    plan = chunked(host=3, optimizer=2, dp=dp, m=m)
    owned = {
        group.home: group.num_chunks * group.chunk_elements // dp for group in plan.chunks.groups
    }
    total = sum(owned.values())
    shares = OwnedShares(
        parameters=total, delta=owned[HOST] / total, gamma=(owned[HOST] + owned[OPTIMIZER]) / total
    )

    (rank,) = plan.chunks.ranks
    assert rank.in_bytes == pytest.approx(
        copied_in_bytes(shares, num_micro_batches=m, staying=shares.delta)
    )
    assert rank.out_bytes == pytest.approx(copied_out_bytes(shares, num_micro_batches=m))


@pytest.mark.parametrize("m", [1, 2, 4])
def test_with_room_for_one_block_every_sweep_but_at_its_turns_fetches_all_as_the_closed_form_says(
    m,
):
    """Each block is a chunk, larger than the activations: one chunk stays where the sweeps turn.

    Gradients of the embedding are there from the beginning, or the first turn had room for more.
    """
    training = replace(HALF, seq_length=8, stack=replace(HALF.stack, frees_gradients=False))
    options = {"host": 8, "optimizer": 0, "m": m, "training": training}
    plan = chunked(**options, budget=smallest(**options))
    (group,), (rank,) = plan.chunks.groups, plan.chunks.ranks
    shares = OwnedShares(parameters=group.num_chunks * group.chunk_elements, delta=1, gamma=1)

    assert group.num_chunks == 8
    assert rank.in_bytes == pytest.approx(
        copied_in_bytes(shares, num_micro_batches=m, staying=1 / 8)
    )
    assert rank.out_bytes == pytest.approx(copied_out_bytes(shares, num_micro_batches=m))


def test_without_a_budget_tensors_may_fill_what_the_limit_leaves():
    small = (
        estimate(ChunkRequest(host_blocks=8, optimizer_blocks=0, limit_bytes=4 * GIB))
        .chunks.ranks[0]
        .device_bytes
    )
    whole = (
        estimate(ChunkRequest(host_blocks=8, optimizer_blocks=0, limit_bytes=None))
        .chunks.ranks[0]
        .device_bytes
    )

    assert small < 4 * GIB < whole < load_cluster("v100-32gb").device.memory_bytes


def test_a_budget_under_the_smallest_is_infeasible_and_says_it():
    least = smallest()
    with pytest.raises(InfeasibleError, match=f"{least:,} bytes"):
        chunked(budget=least - 1)
    assert chunked(budget=least).chunks.ranks[0].smallest_bytes == least


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param({"offload": (Offload.STATES,)}, "states is of whole layers", id="states"),
        pytest.param(
            {"offload": (Offload.OPTIMIZER,)},
            "offload has optimizer, which is by block",
            id="homes-as-offload",
        ),
        pytest.param({"dp": 2, "zero": 1}, "sharded as with ZeRO 3", id="another-zero"),
        pytest.param({"dp": 4, "zero": 3, "zero_ranks": 2}, "lie over all of dp", id="zero-ranks"),
    ],
)
def test_what_does_not_go_with_chunks_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        chunked(**options)


def test_a_number_of_blocks_is_not_negative():
    with pytest.raises(ConfigError, match="-1 and 0 blocks"):
        ChunkRequest(host_blocks=-1, optimizer_blocks=0)


def edited(**changes):
    """Returns the document of a plan with layer plans, the first group or ranks replaced."""
    plan = chunked(pp=2, dp=2, m=2)
    body = plan_to_document(plan)
    for name, fields in changes.get("layers", {}).items():
        body["layer_plans"][name].update(fields)
    body["chunks"]["groups"][0].update(changes.get("group", {}))
    body["chunks"]["ranks"][1].update(changes.get("rank", {}))
    if "chunks" in changes:
        body["chunks"] = changes["chunks"]
    return body


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param(
            {"layers": {"A": {"offload": []}}},
            "stage 0, home device has none, its blocks fill 2 chunks",
            id="home",
        ),
        pytest.param(
            {"layers": {"B": {"offload": ["parameters"]}}},
            r"layer_plans\.B: offload has parameters without optimizer",
            id="half",
        ),
        pytest.param(
            {"layers": {"B": {"offload": ["states"]}}}, "differ between layers", id="states-of-one"
        ),
        pytest.param(
            {"layers": {"A": {"zero": 0}}},
            r"layer_plans\.A: a block in chunks has zero 0, not 3",
            id="zero",
        ),
        pytest.param(
            {"layers": {"head": {"offload": ["optimizer"]}}},
            "of blocks of a plan with chunks",
            id="head",
        ),
        pytest.param(
            {"layers": {"head": {"offload": ["states"]}}},
            "states for one of embedding and head",
            id="states-of-the-head",
        ),
        pytest.param(
            {"group": {"num_chunks": 4}},
            "stage 0, home optimizer has 4 chunks of .* its blocks fill 2",
            id="chunks",
        ),
        pytest.param(
            {"rank": {"device_bytes": 7}},
            "pipeline rank . need at least .* the device budget is 7 ",
            id="budget",
        ),
        pytest.param(
            {"chunks": None},
            r"layer_plans\.A: offload is optimizer, and the plan has no chunks",
            id="no-chunks",
        ),
    ],
)
def test_a_file_that_was_changed_into_what_no_plan_is_says_where(changes, message):
    with pytest.raises((ConfigError, InfeasibleError), match=message):
        reprice(plan_from_document(edited(**changes), "plan.yaml"))


def test_the_schedule_is_of_a_rank_that_there_is_and_of_a_layout_that_its_blocks_fill():
    with pytest.raises(ConfigError, match="pipeline rank 2: the plan has 0 to 1"):
        rank_chunks_of(plan_from_document(edited(), "plan.yaml"), 2)
    with pytest.raises(ConfigError, match="its blocks fill"):
        rank_chunks_of(plan_from_document(edited(group={"chunk_elements": 64}), "plan.yaml"), 0)


def test_a_file_has_the_chunks_of_every_rank():
    body = edited()
    del body["chunks"]["ranks"][1]
    with pytest.raises(ConfigError, match=r"chunks\.ranks has 1 stages, the mesh has pp 2"):
        plan_from_document(body, "plan.yaml")


def test_a_plan_without_chunks_has_no_schedule_of_them():
    plan = estimate(None)

    assert plan.chunks is None
    with pytest.raises(ConfigError, match="no chunks"):
        rank_chunks_of(plan, 0)


def test_a_check_on_few_ranks_refuses_groups_that_are_not_those_of_the_blocks():
    plan = chunked()
    wrong = replace(plan, chunks=replace(plan.chunks, groups=plan.chunks.groups[1:]))

    assert shrunk(plan).chunks is not None
    with pytest.raises(ConfigError, match="has none, its blocks fill"):
        shrunk(wrong)


def test_a_dry_run_refuses_chunks():
    with pytest.raises(ConfigError, match="does not hold states in chunks"):
        repriced_today(chunked(host=0, optimizer=0))


def test_a_changed_budget_or_policy_is_another_schedule_of_the_same_layout():
    plan = chunked(host=8, optimizer=0, m=4)
    (rank,) = plan.chunks.ranks
    tight = replace(rank, device_bytes=rank.smallest_bytes)
    changed = replace(plan, chunks=replace(plan.chunks, eviction=Eviction.LRU, ranks=(tight,)))

    chunks, before = rank_chunks_of(changed, 0), rank_chunks_of(plan, 0)
    assert chunks.groups == before.groups
    assert chunks.in_bytes > before.in_bytes


@pytest.mark.parametrize("options", [{"m": 2}, {"dp": 2, "m": 2}, {"pp": 2, "dp": 2, "m": 4}])
def test_levels_add_up_to_the_bytes_of_every_moment_and_stay_under_the_budget(options):
    plan = chunked(
        host=4, optimizer=2, **options, budget=smallest(host=4, optimizer=2, **options) + 100_000
    )
    chunks = rank_chunks_of(plan, busiest_rank(plan))
    moments = levels(chunks, prices_of_plan(plan))

    assert [level.total for level in moments] == [moment.device_bytes for moment in chunks.moments]
    assert max(level.total for level in moments) <= chunks.device_bytes
    assert min(min(level.always, level.pool, level.gathered, level.other) for level in moments) >= 0
    assert any(level.pool for level in moments)
    assert any(level.gathered for level in moments) == (plan.mesh.dp > 1)
    assert sum(level.in_bytes for level in moments) == sum(
        op.num_bytes for moment in chunks.moments for op in moment.before if op.does == "fetch"
    )


def test_what_is_always_there_is_counted_by_hand():
    plan = chunked(host=3, optimizer=2, m=2)
    size = {group.home: group.num_chunks * group.chunk_elements for group in plan.chunks.groups}

    assert {level.always for level in levels(rank_chunks_of(plan, 0), prices_of_plan(plan))} == {
        16 * size[DEVICE] + 4 * size[OPTIMIZER]
    }


def test_the_fullest_moments_are_of_different_passes_in_the_order_of_the_step():
    plan = chunked(m=4)
    moments = levels(rank_chunks_of(plan, 0), prices_of_plan(plan))
    shown = fullest_levels(moments)

    assert len({(level.work, level.block) for level in shown}) == len(shown) == 8
    assert [level.moment for level in shown] == sorted(level.moment for level in shown)
    assert max(level.total for level in shown) == max(level.total for level in moments)


@pytest.mark.parametrize(("blocks", "expected"), [([3], "3"), ([0, 1, 2, 5, 6, 9], "0-2, 5-6, 9")])
def test_blocks_in_a_row_are_named_by_their_ends(blocks, expected):
    assert spans_text(blocks) == expected


def test_a_plan_that_was_searched_has_the_budget_of_the_limit_and_is_priced_again_the_same():
    limit = round(0.42 * GIB)
    pins = Constraints(
        micro_batch_size=(1,),
        recompute=(Recompute.NONE,),
        offload=(Offload.OPTIMIZER, Offload.PARAMETERS),
    )
    cluster = with_gpus(load_cluster("v100-32gb"), 1)
    plan = find_plan(
        TINY, cluster, HALF, constraints=pins, options=SearchOptions(memory_limit_bytes=limit)
    )

    assert plan.chunks.ranks[0].device_bytes < limit
    assert plan.predicted.memory_gib[0].total <= limit / GIB
    assert reprice(plan).plan == plan
