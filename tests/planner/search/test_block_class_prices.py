"""A search over blocks of several classes finds what an enumeration of all plans finds."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest

from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.host.offload import Offload
from parplan.costmodels.host.state_location import Access
from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.schedules.schedule import Schedule
from parplan.costmodels.step import price_step
from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.candidates.enumeration import enumerate_candidates
from parplan.planner.candidates.tower_divisions import with_tower_divisions
from parplan.planner.objective import Objective
from parplan.planner.plan.plan_file import any_plan_from_document, plan_to_document
from parplan.planner.plan.plan_strategy import prices_of_plan, strategy_of
from parplan.planner.plan.prediction import Status
from parplan.planner.request import Constraints, PlanRequest, SearchOptions
from parplan.planner.search.block_class_prices import BlockClassPrices, given_cuts
from parplan.planner.search.fastest_layouts import search_fastest
from parplan.planner.search.find_plan import search
from parplan.planner.search.search_session import SearchSession
from parplan.planner.search.sequence_shortfall import least_peak_bytes
from parplan.profiles.errors import ConfigError, InfeasibleError
from parplan.profiles.machines.machine_catalog import load_cluster, load_stack
from parplan.profiles.models.blocks import BlockRun
from parplan.profiles.models.fine_tuning import FineTuning
from parplan.profiles.models.spec import ModelSpec, Norm, Positions, TrainingSpec
from parplan.profiles.models.towers import Projection, Tower
from parplan.profiles.stack import NEUTRAL, ContextForm, TowerDivision
from parplan.profiles.units import GIB, MIB
from tests.helpers.cases import mostly_slow
from tests.helpers.class_strategies import every_strategy, random_strategy, tied_alike
from tests.helpers.enumerations import OBJECTIVES, Point, check_memory_first, check_objectives
from tests.helpers.planning import find_plan, request

STACK = replace(NEUTRAL, context_forms=tuple(ContextForm), divides_experts=True)
TRAINING = TrainingSpec(global_batch_size=16, seq_length=512, stack=STACK)
CLUSTER = replace(load_cluster("a100-80gb"), nodes=1)
ALTERNATING = ModelSpec(
    name="alternating",
    num_layers=4,
    hidden_size=512,
    num_heads=8,
    num_kv_heads=8,
    head_dim=64,
    ffn_hidden_size=2048,
    vocab_size=8192,
    max_seq_length=512,
    norm=Norm.RMS_NORM,
    positions=Positions.ROTARY,
    gated_ffn=True,
    linear_bias=False,
    qkv_bias=False,
    blocks=(BlockRun(window=64), BlockRun()),
)
# the first block is dense, as in DeepSeek's models
PREFIX = replace(
    ALTERNATING,
    name="prefix",
    tied_embeddings=False,
    num_experts=4,
    experts_per_token=2,
    expert_ffn_hidden_size=1024,
    blocks=(BlockRun(experts=False), BlockRun(num_blocks=3)),
)
LEVELS = (Recompute.NONE, Recompute.FULL)
TWO = Constraints(
    pp=(2,),
    tp=(1,),
    ep=(1,),
    schedule=(Schedule.ONE_F_ONE_B,),
    micro_batch_size=(2,),
    zero=(0, 2),
    recompute=LEVELS,
)
SPACES = {
    "alternating": (ALTERNATING, TWO),
    "prefix": (PREFIX, replace(TWO, ep=(2,))),
    "one-rank": (PREFIX, replace(TWO, pp=(1,), zero=(0, 1, 3))),
    "selective": (ALTERNATING, replace(TWO, pp=(1,), recompute=tuple(Recompute))),
    "three-ranks": (PREFIX, replace(TWO, pp=(3,), zero=(0, 1))),
    "interleaved": (
        ALTERNATING,
        replace(TWO, schedule=(Schedule.INTERLEAVED,), virtual_stages=(2,)),
    ),
    "zero-bubble-v": (
        ALTERNATING,
        replace(TWO, schedule=(Schedule.ZBV,), virtual_stages=(2,), recompute=(Recompute.NONE,)),
    ),
    "early-recompute": (PREFIX, replace(TWO, schedule=(Schedule.EARLY_RECOMPUTE,))),
    "tensor-parallel": (
        ALTERNATING,
        replace(TWO, tp=(2,), megatron_sharding=True, sequence_parallel=(True,)),
    ),
    "context": (ALTERNATING, replace(TWO, cp=(1, 2))),
    "experts-over-context": (PREFIX, replace(TWO, cp=(1, 2), ep=(1, 2, 4))),
    "divided-experts": (
        PREFIX,
        replace(TWO, pp=(1,), tp=(2,), cp=(2,), ep=(1, 2), etp=(1, 2), sequence_parallel=(True,)),
    ),
    "six-blocks": (
        replace(ALTERNATING, num_layers=6, blocks=(BlockRun(num_blocks=2, window=64), BlockRun())),
        replace(TWO, zero=(1,)),
    ),
}


# blocks that are frozen below the first trained one, and between trained ones
TUNINGS = {
    "frozen-first": FineTuning(freeze=("embedding", "blocks 0-1")),
    "lora-behind-frozen": FineTuning(
        lora_rank=8, lora_targets=("qkv", "fc1"), freeze=("blocks 0-0",)
    ),
    "frozen-between": FineTuning(freeze=("blocks 1-2",)),
}
ALIKE = replace(ALTERNATING, name="alike", blocks=())
SPACES |= {
    "frozen-first": (ALIKE, TWO),
    "lora-behind-frozen": (ALIKE, replace(TWO, zero=(0, 3))),
    "frozen-between": (ALIKE, replace(TWO, zero=(1, 2))),
}


# two blocks behind a tower of two, whose patches and projector are layers too
SEEING = replace(
    ALTERNATING,
    name="seeing",
    num_layers=2,
    blocks=(),
    tower=Tower(
        num_layers=2,
        hidden_size=384,
        num_heads=6,
        ffn_hidden_size=1537,
        patches=576,
        images=2,
        patch_features=588,
        class_token=True,
        position_table=True,
        norm_last=True,
        merged=4,
        projector=(Projection(width=768, activated=True), Projection(width=512, bias=True)),
    ),
)
# two blocks that attend to a tower of two
LISTENING = replace(
    SEEING,
    name="listening",
    tower=Tower(
        name="audio",
        attended=True,
        num_layers=2,
        hidden_size=512,
        num_heads=8,
        ffn_hidden_size=2048,
        patches=300,
        patch_features=1536,
        frame_features=80,
        position_table=True,
        fixed_positions=True,
        key_bias=False,
        norm_last=True,
    ),
)
SPACES |= {
    "tower": (SEEING, TWO),
    "attended-tower": (LISTENING, TWO),
    "attended-tower-three-ranks": (LISTENING, replace(TWO, pp=(3,), zero=(0, 1))),
    "attended-tower-tensor-parallel": (LISTENING, SPACES["tensor-parallel"][1]),
    "tower-frozen": (SEEING, replace(TWO, zero=(0, 3))),
    "tower-three-ranks": (SEEING, replace(TWO, pp=(3,), zero=(0, 1))),
    "tower-interleaved": (SEEING, SPACES["interleaved"][1]),
    "tower-tensor-parallel": (SEEING, SPACES["tensor-parallel"][1]),
    "tower-divisions": (SEEING, replace(SPACES["tensor-parallel"][1], zero=(0, 1))),
    "tower-divisions-one-rank": (
        SEEING,
        replace(SPACES["tensor-parallel"][1], pp=(1,), zero=(0, 2), sequence_parallel=(False,)),
    ),
}
DIVIDING = replace(TRAINING, stack=replace(NEUTRAL, tower_divisions=tuple(TowerDivision)))
TUNINGS["tower-frozen"] = FineTuning(freeze=("tower", "embedding"))


def training_of(space: str) -> TrainingSpec:
    training = DIVIDING if space.startswith("tower-divisions") else TRAINING
    return replace(training, fine_tuning=TUNINGS.get(space))


def request_of(
    model: ModelSpec,
    pins: Constraints,
    limit: int | None = None,
    training: TrainingSpec = TRAINING,
) -> PlanRequest[ModelSpec]:
    gpus = {3: 6}.get(pins.pp[0], 4) * pins.tp[0]
    cluster = replace(CLUSTER, gpus_per_node=gpus)
    options = SearchOptions(memory_limit_bytes=limit, max_slowdown=0.2)
    return request(model, cluster, training, constraints=pins, options=options)


def prices_of(space: str, limit: int) -> BlockClassPrices:
    return BlockClassPrices(request_of(*SPACES[space], limit, training_of(space)))


def every_point(question: PlanRequest[ModelSpec]) -> list[Point]:
    """Prices all legal layouts, also those that the search drops before it begins."""
    points, prices = [], BlockClassPrices(question)
    space = with_tower_divisions(
        enumerate_candidates(question), question.model, question.training.stack
    )
    for strategy in every_strategy(space.layouts, question.constraints, prices):
        if not tied_alike(strategy, tied=prices.price_cache.tied):
            continue
        price = price_step(strategy, prices.price_cache)
        redundant = strategy.layout.mesh.ranks_per_stage * sum(
            rank.total for rank in price.redundant
        )
        peak = max(memory.total for memory in price.memory)
        points.append(Point(price.closed_form_s, price.step_s, redundant, peak, 0.0))
    return points


@pytest.mark.slow
@pytest.mark.parametrize(
    "space",
    mostly_slow(SPACES, {"alternating"}),
)
def test_every_objective_finds_what_enumeration_finds(space):
    model, pins = SPACES[space]
    points = every_point(request_of(model, pins, None, training_of(space)))
    peaks = sorted({point.peak for point in points})

    for share in (0.0, 0.1, 0.4, 1.0):
        limit = int(peaks[0] + share * (peaks[-1] - peaks[0])) + 1
        options = SearchOptions(memory_limit_bytes=limit, max_slowdown=0.2)
        found = {
            objective: search(prices_of(space, limit), objective, options)
            for objective in OBJECTIVES
        }
        fitting = [point for point in points if point.peak <= limit]
        check_objectives(found, fitting, options)
        first = replace(options, memory_slack=0.1)
        check_memory_first(
            search(prices_of(space, limit), Objective.MEMORY, first),
            fitting,
            first,
        )


@pytest.mark.slow
def test_the_bound_holds_where_gradients_come_and_go():
    """The peak depends on the order of recomputed layers, which no front of columns knows."""
    model, pins = SPACES["alternating"]
    training = replace(TRAINING, stack=load_stack("parplan"))
    points = every_point(request_of(model, pins, None, training))
    peaks = sorted({point.peak for point in points})

    for share in (0.0, 0.1, 0.4, 1.0):
        limit = int(peaks[0] + share * (peaks[-1] - peaks[0])) + 1
        options = SearchOptions(memory_limit_bytes=limit)
        session = SearchSession(
            BlockClassPrices(request_of(model, pins, limit, training)), options, None
        )
        outcome, _ = search_fastest(session.prices.space.layouts, session)
        fastest_s = min(point.step_s for point in points if point.peak <= limit)
        assert outcome.bound <= fastest_s * (1 + 1e-9)
        assert all(solved.value >= fastest_s * (1 - 1e-9) for solved in outcome.solved)


@pytest.mark.slow
@pytest.mark.parametrize("model", mostly_slow([PREFIX, ALTERNATING, SEEING], (PREFIX,)))
def test_no_random_plan_of_any_layout_is_below_the_bound(model):
    """The operators of a class may be divided in several ways, and lists of them recompute."""
    question = model, replace(CLUSTER, gpus_per_node=4), TRAINING
    pins = Constraints(micro_batch_size=(2,))
    plan = find_plan(*question, constraints=pins)
    prices = BlockClassPrices(request(*question, constraints=pins))
    rng = random.Random(1)
    layouts = [each for each in prices.space.layouts if not each.recomputes_ahead]
    tried = 0

    for layout in rng.choices(layouts, k=200):
        strategy = random_strategy(prices, layout, rng)
        if not tied_alike(strategy, tied=prices.price_cache.tied):
            continue
        assert price_step(strategy, prices.price_cache).step_s >= plan.search.bound * (1 - 1e-9)
        tried += 1

    assert tried > 100
    assert plan.search.status is Status.OPTIMAL


@pytest.mark.slow
def test_the_plan_file_has_the_classes_and_gives_the_same_price():
    model, pins = SPACES["tensor-parallel"]
    pins = replace(pins, recompute=None, megatron_sharding=False)
    plan = find_plan(model, replace(CLUSTER, gpus_per_node=8), TRAINING, constraints=pins)

    read = any_plan_from_document(plan_to_document(plan), "plan")

    assert read == plan
    assert {each.block for each in read.layer_plans.values()} == {"", "full", "window-64"}
    prices = prices_of_plan(read)
    priced = price_step(strategy_of(read, prices), prices)
    assert priced.step_s == pytest.approx(plan.search.value, abs=1e-6)


def test_a_plan_whose_layers_are_of_another_class_is_refused():
    model, pins = SPACES["alternating"]
    document = plan_to_document(
        find_plan(model, replace(CLUSTER, gpus_per_node=4), TRAINING, constraints=pins)
    )
    name = next(name for name, each in document["layer_plans"].items() if each.get("block"))
    other = {"full": "window-64", "window-64": "full"}[document["layer_plans"][name]["block"]]

    for block, message in ((other, "is of kind"), ("nope", "nope")):
        document["layer_plans"][name]["block"] = block
        with pytest.raises(ConfigError, match=message):
            any_plan_from_document(document, "plan")


def test_states_go_to_the_hosts_where_nothing_fits_without():
    pins = replace(SPACES["one-rank"][1], offload=None)
    cluster = replace(CLUSTER, gpus_per_node=4)
    alone = BlockClassPrices(
        request(PREFIX, cluster, TRAINING, constraints=replace(pins, offload=()))
    )
    limit = int(least_peak_bytes(alone)) - 32 * MIB

    plan = find_plan(
        PREFIX, cluster, TRAINING, constraints=pins, options=SearchOptions(memory_limit_bytes=limit)
    )

    assert all(each.offload == (Offload.STATES,) for each in plan.layer_plans.values())
    assert plan.predicted.memory_gib[0].host > 0
    prices = prices_of_plan(plan)
    priced = price_step(strategy_of(plan, prices), prices)
    assert priced.step_s == pytest.approx(plan.predicted.step_time_s.value, rel=1e-5)


@pytest.mark.slow
def test_the_error_says_by_how_much_the_leanest_plan_is_short_and_how_many_gpus_are_enough():
    options = SearchOptions(memory_limit_bytes=int(1.0 * GIB))
    large = replace(PREFIX, num_layers=6, hidden_size=2048, head_dim=256)
    pins = Constraints(offload=(), tp=(1,), zero=(0, 1), micro_batch_size=(1,))

    with pytest.raises(InfeasibleError, match=r"prefix does not fit on 4 x") as error:
        find_plan(
            large, replace(CLUSTER, gpus_per_node=4), TRAINING, constraints=pins, options=options
        )

    assert re.search(
        r"on stage \d \((embedding|block \d+) to (block \d+|head)\)", error.value.message
    )
    assert "GiB short; the largest part is" in error.value.message
    assert error.value.hint


@pytest.mark.parametrize(
    ("pins", "option"),
    [
        (Constraints(zero_by_operator=True), "--zero-by-operator"),
        (Constraints(weights_over_data=(True,)), "--weights-over-data"),
        (Constraints(access=(Access.BLOCK,)), "--chunk-access"),
    ],
)
def test_choices_that_need_blocks_that_are_alike_are_refused(pins, option):
    with pytest.raises(ConfigError, match=f"several classes, and {option}"):
        BlockClassPrices(request(ALTERNATING, CLUSTER, TRAINING, constraints=pins))


def test_chunks_on_the_host_are_refused():
    with pytest.raises(ConfigError, match="--offload optimizer is of described models whose"):
        request(
            ALTERNATING, CLUSTER, TRAINING, constraints=Constraints(offload=(Offload.OPTIMIZER,))
        )


@pytest.mark.parametrize(
    ("stages", "num_blocks", "counts"),
    [
        pytest.param(4, 8, (3, 2, 2, 3), id="equal"),
        pytest.param(4, 6, (2, 2, 2, 2), id="one-less-at-the-ends"),
    ],
)
def test_interleaved_stages_hold_equal_numbers_of_blocks(stages, num_blocks, counts):
    layout = ParallelLayout(
        mesh=Mesh(pp=2, dp=1, tp=1),
        schedule=Schedule.INTERLEAVED,
        virtual_stages=stages // 2,
        micro_batch_size=1,
        num_micro_batches=4,
        sequence_parallel=False,
    )

    assert tuple(end - first for first, end in given_cuts(layout, num_blocks)) == counts
    assert given_cuts(replace(layout, virtual_stages=1), num_blocks) is None


def test_blocks_that_are_left_over_are_on_the_middle_stages_of_zero_bubble_v():
    layout = ParallelLayout(
        mesh=Mesh(pp=2, dp=1, tp=1),
        schedule=Schedule.ZBV,
        virtual_stages=2,
        micro_batch_size=1,
        num_micro_batches=4,
        sequence_parallel=False,
    )

    assert given_cuts(layout, 6) == ((0, 2), (2, 4), (4, 6), (6, 8))


def test_a_plan_says_how_ranks_run_a_tower_and_gives_the_same_price():
    model, pins = SPACES["tower-divisions-one-rank"]
    pins = replace(pins, micro_batch_size=(2,), zero=(1,))
    plan = find_plan(
        model,
        replace(CLUSTER, gpus_per_node=8),
        DIVIDING,
        constraints=pins,
        options=SearchOptions(),
    )

    read = any_plan_from_document(plan_to_document(plan), "plan.yaml")
    cache = prices_of_plan(read)
    ways = {name.tower for name in read.layer_plans.values() if name.block.startswith("vision")}
    assert ways <= {TowerDivision.IMAGES, TowerDivision.REPEATED}
    assert len(ways) == 1
    assert {each.tower for each in read.layer_plans.values() if not each.block} == {None}
    step_s = price_step(strategy_of(read, cache), cache).step_s
    assert step_s == pytest.approx(plan.predicted.step_time_s.value, rel=1e-5)
