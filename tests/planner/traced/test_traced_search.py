"""The search over traced modules has described models' prices and brute force's choice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, combinations, pairwise, product

import pytest

from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.host.offload import Offload
from parplan.costmodels.layers.recompute import Recompute, RecomputedOperators
from parplan.costmodels.price_cache import PriceCache
from parplan.costmodels.schedules.schedule import Schedule
from parplan.costmodels.step import price_step
from parplan.costmodels.strategy import LayerChoice, ParallelLayout, Strategy
from parplan.planner.candidates.branch_and_bound import BranchOutcome
from parplan.planner.objective import Objective
from parplan.planner.plan.prediction import Status
from parplan.planner.request import Constraints, SearchOptions
from parplan.planner.search.fastest_layouts import search_fastest
from parplan.planner.search.find_plan import search
from parplan.planner.search.search_session import SearchSession
from parplan.planner.traced.shard_price_cache import ShardPriceCache
from parplan.planner.traced.shards import Shard, Sharded, shard
from parplan.planner.traced.stage_rules import StageRule, parse_stages
from parplan.profiles.errors import ConfigError, InfeasibleError
from parplan.profiles.machines.machine_catalog import load_cluster, load_stack
from parplan.profiles.machines.shipped_profiles import machine_for
from parplan.profiles.models.operator_graph import LayerKind
from parplan.profiles.models.spec import ModelSpec, TrainingSpec
from parplan.profiles.stack import NEUTRAL
from parplan.profiles.units import MIB
from tests.helpers.cases import mostly_slow, of_every
from tests.helpers.enumerations import (
    OBJECTIVES,
    Point,
    check_memory_first,
    check_objectives,
)
from tests.helpers.planning import find_traced_plan, traced_prices_of
from tests.helpers.traced_models import activation, join, linear, model_of, traced_spec, value

GPT = ModelSpec(
    name="gpt",
    num_layers=4,
    hidden_size=1024,
    num_heads=16,
    num_kv_heads=16,
    head_dim=64,
    ffn_hidden_size=4096,
    vocab_size=32000,
    max_seq_length=512,
    dropout=0.1,
)
LLAMA = replace(
    GPT, name="llama", tied_embeddings=False, gated_ffn=True, linear_bias=False, dropout=0.0
)
TRAINING = TrainingSpec(global_batch_size=32, seq_length=512, stack=NEUTRAL)
CLUSTER = replace(load_cluster("a100-80gb"), nodes=2)
FRAME = ParallelLayout(
    mesh=Mesh(pp=4, dp=4, tp=1),
    schedule=Schedule.ONE_F_ONE_B,
    virtual_stages=1,
    micro_batch_size=2,
    num_micro_batches=4,
    sequence_parallel=False,
)


def by_block(spec: ModelSpec) -> Sharded:
    """Returns the traced model with one shard a block, like the layers of a described model."""
    sharded = shard(traced_spec(spec, TRAINING))
    first, *halves, last = sharded.shards
    blocks = tuple(
        Shard(name="block", first=a.first, end=b.end, parameters=a.parameters + b.parameters)
        for a, b in zip(halves[::2], halves[1::2], strict=True)
    )
    return replace(sharded, shards=(first, *blocks, last))


def prices_of(sharded: Sharded) -> ShardPriceCache:
    return ShardPriceCache(sharded, TRAINING, machine_for(CLUSTER))


def strategy(
    prices: ShardPriceCache,
    layout: ParallelLayout,
    cuts: Sequence[int],
    zeros: Sequence[int],
    recomputed: Mapping[int, RecomputedOperators] | None = None,
) -> Strategy:
    """Returns the strategy with stages between cuts, a ZeRO stage each, and recomputed shards."""
    recompute = recomputed or {}
    return Strategy(
        layout=layout,
        stages=tuple(
            tuple(
                LayerChoice(
                    prices.key(number, first),
                    recompute.get(number, Recompute.NONE),
                    zero,
                )
                for number in range(first, end)
            )
            for (first, end), zero in zip(pairwise(cuts), zeros, strict=True)
        ),
    )


PIPELINES = ((Schedule.ONE_F_ONE_B, 4), (Schedule.GPIPE, 4), (Schedule.ONE_F_ONE_B, 8))
PLACED = product(
    (GPT, LLAMA), PIPELINES, range(4), (Recompute.NONE, Recompute.FULL), ((), (Offload.STATES,))
)


@pytest.mark.slow
@of_every([(spec, *pipeline, *rest) for spec, pipeline, *rest in PLACED])
def test_a_traced_model_costs_what_its_description_does(
    spec, schedule, micro_batches, zero, level, offload
):
    layout = replace(FRAME, schedule=schedule, num_micro_batches=micro_batches)
    block = LayerChoice(LayerKind.BLOCK, level, zero)
    ends = [
        LayerChoice(kind, Recompute.NONE, zero) for kind in (LayerKind.EMBEDDING, LayerKind.HEAD)
    ]
    described = Strategy(
        layout=layout, stages=((ends[0], block), (block,), (block,), (block, ends[1]))
    )
    prices = prices_of(by_block(spec)).with_states(on_host=bool(offload))
    recomputed = dict.fromkeys(range(1, 5), level)
    traced = strategy(prices, layout, (0, 2, 3, 4, 6), (zero,) * 4, recomputed)

    machine = machine_for(CLUSTER)
    expected = price_step(described, PriceCache(spec, TRAINING, machine, offload=offload))
    price = price_step(traced, prices)

    assert price.step_s == pytest.approx(expected.step_s, rel=1e-12)
    assert price.closed_form_s == pytest.approx(expected.closed_form_s, rel=1e-12)
    assert [m.total for m in price.memory] == pytest.approx(
        [m.total for m in expected.memory], rel=1e-12
    )
    assert [m.host for m in price.memory] == [m.host for m in expected.memory]
    assert any(m.host for m in price.memory) == bool(offload)
    assert [r.total for r in price.redundant] == pytest.approx(
        [r.total for r in expected.redundant], rel=1e-9
    )
    assert [r.total.value_s for r in price.ranks] == pytest.approx(
        [r.total.value_s for r in expected.ranks], rel=1e-12
    )


def test_half_blocks_reduce_and_gather_by_half_blocks():
    """With half a block a shard, ZeRO's buffers halve, and each reduction hides under its half."""
    half_blocks, whole_blocks = (
        prices_of(shard(traced_spec(GPT, TRAINING))),
        prices_of(by_block(GPT)),
    )

    halves = price_step(strategy(half_blocks, FRAME, (0, 3, 5, 7, 10), (3,) * 4), half_blocks)
    blocks = price_step(strategy(whole_blocks, FRAME, (0, 2, 3, 4, 6), (3,) * 4), whole_blocks)

    assert halves.memory[1].states == blocks.memory[1].states
    assert halves.memory[1].activations == blocks.memory[1].activations
    assert halves.memory[1].temporaries < blocks.memory[1].temporaries
    assert halves.step_s > blocks.step_s


def searched(
    sharded, pins=None, options=None, how=None, training=TRAINING, cluster=CLUSTER
) -> SearchSession:
    options = options or SearchOptions()
    prices = traced_prices_of(
        sharded, cluster, training, pins or Constraints(), options, how or StageRule()
    )
    return SearchSession(prices, options, None)


def fastest_of(session: SearchSession) -> BranchOutcome:
    """Returns the fastest choices of all layouts."""
    return search_fastest(session.prices.space.layouts, session)[0]


def ways(search: SearchSession, layout: ParallelLayout, shard: int) -> list[RecomputedOperators]:
    """Tries all lists of operators: those that no other beats in time, saved bytes, workspace."""
    prices, b = search.price_cache, layout.micro_batch_size
    key = prices.key(shard, shard)
    names = [operator.name for operator in prices.layer(key, b).operators]
    lists = chain.from_iterable(combinations(names, count) for count in range(len(names) + 1))
    found: dict[tuple[float, float, float], RecomputedOperators] = {}
    for each in lists:
        seconds = prices.layer_time(key, b, layout.sharding, each).total_s
        size = prices.activations(key, b, layout.sharding, each)
        found.setdefault((seconds, float(size.saved), float(size.workspace)), each)
    return [
        each
        for values, each in found.items()
        if not any(
            rival != values and all(a <= b for a, b in zip(rival, values, strict=True))
            for rival in found
        )
    ]


def every_recompute(
    search: SearchSession, layout: ParallelLayout
) -> Iterator[dict[int, RecomputedOperators]]:
    """Yields every choice of a list for every shard."""
    every = [ways(search, layout, shard) for shard in range(search.price_cache.num_layers)]
    return (dict(enumerate(chosen)) for chosen in product(*every))


def every_plan(
    search: SearchSession, layout: ParallelLayout, zeros: tuple[int, ...]
) -> list[tuple[float, float]]:
    """Prices all cuts, ZeRO stages and recompute lists: closed-form seconds and peak bytes."""
    size, pp = search.price_cache.num_layers, layout.mesh.pp
    plans = []
    for inner in combinations(range(1, size), pp - 1):
        for chosen, recomputed in product(
            product(zeros, repeat=pp), every_recompute(search, layout)
        ):
            cuts = (0, *inner, size)
            made = strategy(search.price_cache, layout, cuts, chosen, recomputed)
            price = price_step(made, search.price_cache)
            plans.append((price.closed_form_s, max(memory.total for memory in price.memory)))
    return plans


def uneven() -> Sharded:
    """Returns five unlike parts with more inside than they read; two parts read the second."""
    operators, x = [], value("batch_x", 128)
    for number, width in enumerate((192, 512, 256, 384, 128)):
        path, wide = f"part.{number}", value(f"h{number}", width)
        more = (value("y1", 128),) if number > 2 else ()
        operators += [
            linear(f"{path}.in", x, wide.name, width),
            activation(path, wide, f"a{number}"),
            linear(f"{path}.out", value(f"a{number}", width), f"o{number}", 128),
            join(path, (value(f"o{number}", 128), x, *more), f"y{number}"),
        ]
        x = value(f"y{number}", 128)
    return shard(
        model_of(*operators, join("loss", (x,), "loss", 1), inputs=(value("batch_x", 128),))
    )


@pytest.mark.parametrize(
    "schedule", mostly_slow([Schedule.ONE_F_ONE_B, Schedule.GPIPE], {Schedule.ONE_F_ONE_B})
)
def test_the_search_finds_what_brute_force_finds(schedule):
    sharded, training = uneven(), TrainingSpec(global_batch_size=65536, seq_length=1, stack=NEUTRAL)
    cluster = replace(CLUSTER, nodes=1, gpus_per_node=4)
    pins = Constraints(pp=(2,), schedule=(schedule,), micro_batch_size=(8192,), zero=(0, 2))
    first = searched(sharded, pins, training=training, cluster=cluster)
    (layout,) = first.prices.space.layouts
    plans = every_plan(first, layout, (0, 2))
    peaks, counts = sorted({peak for _, peak in plans}), set()

    for limit in (
        peaks[-1],
        *(peaks[round(share * (len(peaks) - 1))] for share in (0.5, 0.2, 0.05, 0.0)),
        peaks[0] - MIB,
    ):
        options = SearchOptions(memory_limit_bytes=int(limit) + 1)
        result = fastest_of(searched(sharded, pins, options, training=training, cluster=cluster))
        expected = min((step_s for step_s, peak in plans if peak <= int(limit) + 1), default=None)

        assert result.finished
        assert [solved.value for solved in result.solved] == (
            [] if expected is None else [pytest.approx(expected, rel=1e-9)]
        )
        assert result.bound <= (expected or float("inf"))
        counts |= {
            sum(
                count
                for column in solved.choice.columns
                for option, count in column.mix
                if option.recompute is not Recompute.NONE
            )
            for solved in result.solved
        }
    assert len(counts) > 1, "some of the limits ask for recompute"


FRAME_OF_TWO = ParallelLayout(
    mesh=Mesh(pp=2, dp=2, tp=1),
    schedule=Schedule.ONE_F_ONE_B,
    virtual_stages=1,
    micro_batch_size=8192,
    num_micro_batches=4,
    sequence_parallel=False,
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "schedule", [Schedule.ONE_F_ONE_B, Schedule.INTERLEAVED, Schedule.EARLY_RECOMPUTE, Schedule.SCP]
)
def test_what_the_columns_say_is_what_the_step_costs(schedule):
    sharded = shard(traced_spec(GPT, TRAINING))
    pins = Constraints(pp=(4,), schedule=(schedule,), micro_batch_size=(1, 2))
    search = searched(sharded, pins, SearchOptions(memory_limit_bytes=int(1.9 * 1024 * MIB)))

    result = fastest_of(search)

    assert result.solved
    for solved in result.solved:
        made = search.prices.strategy(solved.layout, solved.choice.columns)
        price = price_step(made, search.price_cache)
        assert max(memory.total for memory in price.memory) <= search.limit_bytes
        if schedule in (Schedule.ONE_F_ONE_B, Schedule.INTERLEAVED):
            assert price.closed_form_s == pytest.approx(solved.value, rel=1e-9)


@pytest.mark.slow
def test_recompute_ahead_of_the_gradient_is_faster_than_1f1b_where_memory_needs_recompute():
    model, options = (
        traced_spec(GPT, TRAINING),
        SearchOptions(memory_limit_bytes=int(1.9 * 1024 * MIB)),
    )
    pins = Constraints(pp=(4,), micro_batch_size=(2,))

    plain = find_traced_plan(
        model,
        CLUSTER,
        TRAINING,
        constraints=replace(pins, schedule=(Schedule.ONE_F_ONE_B,)),
        options=options,
    ).plan
    early = find_traced_plan(
        model,
        CLUSTER,
        TRAINING,
        constraints=replace(pins, schedule=(Schedule.EARLY_RECOMPUTE,)),
        options=options,
    ).plan

    assert plain.stages[0].recompute or plain.stages[0].recompute_lists
    assert early.stages[0].recompute or early.stages[0].recompute_lists
    assert early.predicted.step_time_s.value < plain.predicted.step_time_s.value


@pytest.mark.slow
def test_the_same_request_gives_the_same_plan():
    model = traced_spec(GPT, TRAINING)

    first = find_traced_plan(model, CLUSTER, TRAINING)
    second = find_traced_plan(model, CLUSTER, TRAINING)

    assert first.plan == second.plan
    assert first.plan.search.status is Status.OPTIMAL
    assert first.plan.search.bound <= first.plan.search.value * (1 + 1e-6)


@pytest.mark.slow
def test_nothing_fits_and_the_error_says_what_binds_by_how_much_and_what_would_help():
    large = replace(
        GPT,
        name="large",
        num_layers=12,
        hidden_size=16384,
        num_heads=256,
        num_kv_heads=256,
        ffn_hidden_size=65536,
    )
    cluster = replace(CLUSTER, nodes=1)

    with pytest.raises(
        InfeasibleError, match=r"large does not fit on 8 x a100-80gb: the leanest plan \(pp \d"
    ) as error:
        find_traced_plan(traced_spec(large, TRAINING), cluster, TRAINING)

    assert "GiB short" in error.value.message
    assert "the largest part is states" in error.value.message
    assert error.value.hint is not None
    assert "GPUs are enough" in error.value.hint


@pytest.mark.parametrize(
    ("pins", "match"),
    [
        (Constraints(ep=(2,)), "--ep is pinned"),
        (Constraints(recompute=(Recompute.SELECTIVE,)), "selective"),
        (Constraints(schedule=(Schedule.ZBV,)), "zbv does not run"),
        (Constraints(pp=(16,)), "no legal way"),
        (
            Constraints(pp=(2,), tp=(1,), schedule=(Schedule.EARLY_RECOMPUTE,), zero=(3,)),
            "early-recompute has no price with ZeRO 3",
        ),
    ],
)
def test_pins_that_no_traced_module_can_have(pins, match):
    with pytest.raises(ConfigError, match=match):
        searched(uneven(), pins)


@pytest.mark.slow
def test_stages_by_counts_are_kept_and_cost_no_less_than_those_of_the_search():
    model, pins = traced_spec(GPT, TRAINING), Constraints(pp=(4,), schedule=(Schedule.ONE_F_ONE_B,))

    plans = {
        text: find_traced_plan(
            model, CLUSTER, TRAINING, constraints=pins, how=parse_stages(text)
        ).plan
        for text in ("ilp", "uniform", "parameters", "1,3,3,3")
    }

    assert [stage.end - stage.first for stage in plans["1,3,3,3"].stages] == [1, 3, 3, 3]
    assert [stage.end - stage.first for stage in plans["uniform"].stages] == [3, 3, 2, 2]
    assert all(
        plans["ilp"].search.value <= plan.search.value * (1 + 1e-9) for plan in plans.values()
    )


def test_a_parameter_that_all_shards_hold_is_counted_once_a_stage_and_summed_over_stages():
    parts = [
        linear(f"part.{k}", value(f"y{k - 1}") if k else value("batch_x"), f"y{k}", weight="w")
        for k in range(4)
    ]
    sharded = shard(model_of(*parts))
    prices = prices_of(sharded)
    layout = replace(FRAME_OF_TWO, micro_batch_size=2)

    def states(first: int, end: int) -> int:
        cuts = (0, first or end, 4)
        price = price_step(strategy(prices, layout, cuts, (0, 0)), prices)
        assert price.ranks[0].dp_comm.value_s > 0
        return price.memory[0 if first == 0 else 1].states.total

    assert len(sharded.shards) == 4
    assert states(0, 1) == states(0, 2) == states(2, 4) == 18 * 64


def of_classes(pattern: str, scale: int = 1, *, whole: bool = False) -> Sharded:
    """Returns parts in the order of `pattern`, those with one letter alike, and a loss.

    scale: factor of all widths; the states grow with its square
    whole: each part has a skip connection, so that it is one shard
    A part "d" has two activations, each of which may run again.
    """
    size = 128 * scale
    base = {"a": 192, "b": 512, "c": 320, "d": 256}
    widths = {letter: scale * width for letter, width in base.items()}
    operators, x = [], value("batch_x", size)
    for number, letter in enumerate(pattern):
        path, wide = f"part{letter}.{number}", value(f"h{number}", widths[letter])
        before = x
        if letter == "d":
            inner = value(f"i{number}", 448)
            operators += [
                linear(f"{path}.first", x, inner.name, 448),
                activation(f"{path}.first", inner, f"j{number}"),
            ]
            x = value(f"j{number}", 448)
        operators += [
            linear(f"{path}.in", x, wide.name, widths[letter]),
            activation(path, wide, f"a{number}"),
            linear(f"{path}.out", value(f"a{number}", widths[letter]), f"y{number}", size),
        ]
        if whole:
            operators.append(join(path, (value(f"y{number}", size), before), f"z{number}"))
        x = value(f"z{number}" if whole else f"y{number}", size)
    return shard(
        model_of(*operators, join("loss", (x,), "loss", 1), inputs=(value("batch_x", size),))
    )


def every_price(search: SearchSession) -> list[Point]:
    """Prices all layouts with all cuts, ZeRO stages and recompute lists."""
    size, points = search.price_cache.num_layers, []
    for layout in search.prices.space.layouts:
        prices = search.price_cache.with_states(on_host=layout.states_on_host)
        for inner, zeros, recomputed in product(
            combinations(range(1, size), layout.num_virtual_stages - 1),
            product((0, 2), repeat=layout.mesh.pp),
            every_recompute(search, layout),
        ):
            of_stages = zeros * layout.virtual_stages
            price = price_step(
                strategy(prices, layout, (0, *inner, size), of_stages, recomputed), prices
            )
            redundant = layout.mesh.ranks_per_stage * sum(rank.total for rank in price.redundant)
            peak = max(memory.total for memory in price.memory)
            host = max(memory.host for memory in price.memory)
            points.append(Point(price.closed_form_s, price.step_s, redundant, peak, host))
    return points


@pytest.mark.slow
@pytest.mark.parametrize("pattern", mostly_slow(["abab", "aabb", "abcab", "abc"], {"abab", "abc"}))
@pytest.mark.parametrize("share", mostly_slow([0.0, 0.1, 0.6], {0.1}))
def test_every_objective_over_two_and_three_classes_finds_what_enumeration_finds(pattern, share):
    """The memory limit is `share` of the way from the least to the largest peak of any plan."""
    training = TrainingSpec(global_batch_size=65536, seq_length=1, stack=NEUTRAL)
    cluster = replace(CLUSTER, nodes=1, gpus_per_node=4)
    pins = Constraints(
        pp=(2,), schedule=(Schedule.ONE_F_ONE_B,), micro_batch_size=(8192,), zero=(0, 2)
    )
    sharded = of_classes(pattern)
    free = searched(sharded, pins, training=training, cluster=cluster)
    plans = every_price(free)
    peaks = sorted({plan.peak for plan in plans})
    limit = int(peaks[0] + share * (peaks[-1] - peaks[0])) + 1
    options = SearchOptions(memory_limit_bytes=limit, max_slowdown=0.2)

    found = {
        objective: search(
            searched(sharded, pins, options, training=training, cluster=cluster).prices,
            objective,
            options,
        )
        for objective in OBJECTIVES
    }

    fitting = [plan for plan in plans if plan.peak <= limit]
    check_objectives(found, fitting, options)

    first = replace(options, memory_slack=0.1)
    prices = searched(sharded, pins, first, training=training, cluster=cluster).prices
    memory_first = search(prices, Objective.MEMORY, first)

    check_memory_first(memory_first, fitting, first)


INTERLEAVED = Constraints(
    pp=(2,),
    schedule=(Schedule.INTERLEAVED,),
    virtual_stages=(2,),
    micro_batch_size=(8192,),
    zero=(0, 2),
)
ONE_PART = replace(INTERLEAVED, schedule=(Schedule.ONE_F_ONE_B,), virtual_stages=(1,), zero=(2,))
FOUR_GPUS = replace(CLUSTER, nodes=1, gpus_per_node=4)


def within_limits(
    pattern: str, training: TrainingSpec, pins: Constraints = INTERLEAVED
) -> Iterator[tuple[SearchSession, BranchOutcome, float]]:
    """Yields searches of one layout, and the seconds of the fastest plan within the same limit.

    The limits are between the least and the largest peak of any plan.
    """
    sharded = of_classes(pattern, whole=True)
    free = searched(sharded, pins, training=training, cluster=FOUR_GPUS)
    plans = every_price(free)
    peaks = sorted({plan.peak for plan in plans})
    for share in (0.0, 0.1, 0.5):
        limit = int(peaks[0] + share * (peaks[-1] - peaks[0])) + 1
        options = SearchOptions(memory_limit_bytes=limit)
        session = searched(sharded, pins, options, training=training, cluster=FOUR_GPUS)
        fastest_s = min(plan.step_s for plan in plans if plan.peak <= limit)
        yield session, fastest_of(session), fastest_s


@pytest.mark.slow
@pytest.mark.parametrize(
    "pattern",
    mostly_slow(["aabab", "abcab", "abbaab"], {"aabab"}),
)
def test_parts_that_share_their_ranks_are_those_that_enumeration_finds(pattern):
    training, cuts = TrainingSpec(global_batch_size=65536, seq_length=1, stack=NEUTRAL), set()

    for session, outcome, expected_s in within_limits(pattern, training):
        (layout,) = session.prices.space.layouts
        least_s = session.prices.closer(layout, session.limit_bytes).least_s
        (solved,) = outcome.solved
        assert solved.value == pytest.approx(expected_s, rel=1e-9)
        assert least_s <= outcome.bound * (1 + 1e-9) <= expected_s * (1 + 2e-9)
        made = session.prices.strategy(layout, solved.choice.columns)
        cuts.add(tuple(len(stage) for stage in made.stages))
    assert any(len(set(sizes)) > 1 for sizes in cuts), "some parts have more shards than others"


@pytest.mark.slow
@pytest.mark.parametrize("pattern", ["aabab"])
@pytest.mark.parametrize(
    "pins",
    [
        pytest.param(INTERLEAVED, id="interleaved"),
        pytest.param(ONE_PART, id="one part"),
    ],
)
def test_bounds_hold_where_gradients_come_and_go(pattern, pins):
    """The peak depends on the order of recomputed layers, which no front of columns knows."""
    training = TrainingSpec(global_batch_size=65536, seq_length=1, stack=load_stack("parplan"))

    for session, outcome, expected_s in within_limits(pattern, training, pins):
        (solved,) = outcome.solved
        price = price_step(
            session.prices.strategy(solved.layout, solved.choice.columns), session.price_cache
        )
        assert outcome.bound <= expected_s * (1 + 1e-9)
        assert solved.value >= expected_s * (1 - 1e-9)
        assert solved.value == pytest.approx(price.closed_form_s, rel=1e-9)
        assert max(memory.total for memory in price.memory) <= session.limit_bytes


@pytest.mark.slow
@pytest.mark.parametrize("pattern", ["aabab", "abcab"])
def test_parts_that_share_their_ranks_hold_the_least_redundant_bytes_in_time(pattern):
    training = TrainingSpec(global_batch_size=65536, seq_length=1, stack=NEUTRAL)
    sharded, options = of_classes(pattern, whole=True), SearchOptions(max_slowdown=0.2)
    session = searched(sharded, INTERLEAVED, options, training=training, cluster=FOUR_GPUS)
    plans = every_price(session)
    slowest_s = 1.2 * min(plan.step_s for plan in plans) * (1 + 1e-9)

    found = search(session.prices, Objective.MEMORY, options)

    leanest = min(plan.redundant for plan in plans if plan.step_s <= slowest_s)
    assert found.best.value == pytest.approx(leanest, rel=1e-6)
    assert found.plan.search.status is Status.OPTIMAL


@pytest.mark.slow
def test_no_parts_that_share_their_ranks_fit_below_the_least_peak():
    training = TrainingSpec(global_batch_size=65536, seq_length=1, stack=NEUTRAL)
    sharded = of_classes("abab", whole=True)
    free = searched(sharded, INTERLEAVED, training=training, cluster=FOUR_GPUS)
    least = min(plan.peak for plan in every_price(free))

    def found(limit: int) -> bool:
        options = SearchOptions(memory_limit_bytes=limit)
        within = searched(sharded, INTERLEAVED, options, training=training, cluster=FOUR_GPUS)
        outcome = fastest_of(within)
        assert outcome.finished
        return bool(outcome.solved)

    assert found(int(least) + 1)
    assert not found(int(least) - 1)
