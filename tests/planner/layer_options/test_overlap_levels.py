"""Sub-pipelined tensor parallelism: the levels that apply, and no loss by those not searched."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import pytest

from parplan.commands.requests.external import narrowed
from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.host.offload import Offload
from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.schedules.schedule import Schedule
from parplan.costmodels.step import price_step
from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.candidates.lower_bounds import time_bound
from parplan.planner.forbid import parse_bans
from parplan.planner.layer_options.overlap_levels import illegal_overlap, paying_layouts
from parplan.planner.plan.plan import Plan
from parplan.planner.plan.plan_file import plan_from_document, plan_to_document
from parplan.planner.plan.reprice import reprice
from parplan.planner.request import Constraints
from parplan.planner.search.search_session import DescribedPrices
from parplan.planner.stage_columns.mix_table import MixTable
from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.machine_catalog import load_cluster, load_stack, with_gpus
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.module_source import ModuleSource
from parplan.profiles.models.spec import TrainingSpec
from parplan.profiles.stack import Stack
from parplan.report.names import pipeline_phrases
from tests.helpers.cases import mostly_slow
from tests.helpers.instances import PINS, Instance, every_strategy, random_instance, same_sharding
from tests.helpers.planning import enumerate_candidates, estimate_plan, find_plan, request

LLAMA, MIXTRAL = load_model("llama3-8b").spec, load_model("mixtral-8x7b").spec
FRAME = ParallelLayout(
    mesh=Mesh(pp=2, dp=1, tp=4),
    schedule=Schedule.ONE_F_ONE_B,
    virtual_stages=1,
    micro_batch_size=2,
    num_micro_batches=8,
    sequence_parallel=False,
    tp_overlap=3,
)
CLUSTER = with_gpus(load_cluster("a100-40gb-pcie"), 8)


def training(stack: str = "parplan") -> TrainingSpec:
    return TrainingSpec(global_batch_size=16, seq_length=2048, stack=load_stack(stack))


@pytest.mark.parametrize(
    ("changes", "model", "reason"),
    [
        pytest.param(
            {"mesh": Mesh(pp=2, dp=4, tp=1)}, LLAMA, "tp is 1", id="no-tensor-parallelism"
        ),
        pytest.param(
            {"micro_batch_size": 1}, LLAMA, "two halves, its size is 1", id="odd-micro-batch"
        ),
        pytest.param(
            {"sequence_parallel": True}, LLAMA, "sends twice between halves", id="sequence-parallel"
        ),
        pytest.param(
            {"schedule": Schedule.ZBV, "virtual_stages": 2},
            LLAMA,
            "zbv splits them",
            id="split-backward",
        ),
        pytest.param({}, MIXTRAL, "tokens of experts", id="mixture-of-experts"),
        pytest.param(
            {
                "mesh": Mesh(pp=2, dp=1, tp=4),
                "schedule": Schedule.INTERLEAVED,
                "virtual_stages": 16,
            },
            LLAMA,
            "hold one",
            id="one-block",
        ),
        pytest.param(
            {}, load_model("qwen3-8b").spec, "blocks that have qk_norm", id="norms-of-heads"
        ),
    ],
)
def test_a_level_that_does_not_apply_says_why(changes, model, reason):
    layout = replace(FRAME, **changes)

    assert reason in str(illegal_overlap(layout, model, training()))
    assert illegal_overlap(replace(layout, tp_overlap=0), model, training()) is None
    assert illegal_overlap(FRAME, LLAMA, training()) is None


def test_where_dropout_draws_masks_a_block_at_level_3_is_not_recomputed_in_full():
    model, full = replace(LLAMA, dropout=0.1), (Recompute.FULL,)
    pins = replace(
        PINS,
        tp=(4,),
        pp=(2,),
        micro_batch_size=(2,),
        schedule=(Schedule.ONE_F_ONE_B,),
        sequence_parallel=(False,),
        tp_rows=(1,),
    )

    prices = {
        tried: DescribedPrices(
            request(model, CLUSTER, training(), constraints=replace(pins, recompute=tried))
        )
        for tried in (tuple(Recompute), full)
    }
    assert [layout.tp_overlap for layout in prices[full].space.layouts] == [0, 2]
    assert [layout.tp_overlap for layout in prices[tuple(Recompute)].space.layouts] == [0, 2, 3]
    options = {
        layout.tp_overlap: [
            option.recompute for option in prices[tuple(Recompute)].table.options(layout)
        ]
        for layout in prices[tuple(Recompute)].space.layouts
    }
    everything = tuple(
        operator.name for operator in prices[full].price_cache.graph(1).block.operators
    )
    assert everything in options[2]
    assert everything not in options[3]
    with pytest.raises(
        ConfigError, match="does not recompute blocks in full where dropout draws other masks"
    ):
        estimate_plan(model, CLUSTER, training(), FRAME, recompute=Recompute.FULL)
    with pytest.raises(ConfigError, match="in full where the host keeps activations"):
        estimate_plan(
            LLAMA,
            CLUSTER,
            training(),
            FRAME,
            recompute=Recompute.FULL,
            offload=(Offload.ACTIVATIONS,),
        )
    assert estimate_plan(model, CLUSTER, training(), FRAME).pipeline.tp_overlap == 3


def test_a_stage_of_one_block_runs_at_level_2():
    alone = replace(FRAME, schedule=Schedule.INTERLEAVED, virtual_stages=16, tp_overlap=2)

    assert illegal_overlap(alone, LLAMA, training()) is None


def test_only_a_stack_that_runs_halves_is_offered_them_unless_they_are_pinned():
    def levels(stack: str, pins: Constraints = PINS) -> set[int]:
        return {
            layout.tp_overlap
            for layout in enumerate_candidates(LLAMA, CLUSTER, training(stack), pins).layouts
        }

    assert levels("parplan") == {0, 1, 2, 3}
    assert levels("megatron-core") == {0}
    assert levels("megatron-core", replace(PINS, tp_overlap=(0, 2))) == {0, 2}
    assert levels("parplan", replace(PINS, forbid=parse_bans(["tp-overlap=3,1"]))) == {0, 2}
    assert {
        layout.mesh.tp
        for layout in enumerate_candidates(
            LLAMA, CLUSTER, training(), replace(PINS, tp_overlap=(3,))
        ).layouts
        if layout.tp_overlap == 0
    } == {1}


def test_a_module_of_ones_own_runs_without_halves():
    module = ModuleSource(factory="package.module:function")

    assert narrowed(Constraints(), module).tp_overlap == (0,)
    with pytest.raises(ConfigError, match="only the executor's own blocks run as two halves"):
        narrowed(Constraints(tp_overlap=(3,)), module)


def test_no_level_is_searched_that_another_beats():
    prices = DescribedPrices(
        request(
            LLAMA,
            CLUSTER,
            training(),
            constraints=replace(PINS, tp=(4,), micro_batch_size=(2,)),
        )
    )
    by_level = Counter(layout.tp_overlap for layout in prices.space.layouts)

    assert by_level[3] > 0
    assert by_level[0] > 0
    assert by_level[1] == 0  # over PCIe communication is all that counts
    assert all(
        LLAMA.num_layers < 2 * layout.num_virtual_stages
        for layout in prices.space.layouts
        if layout.tp_overlap == 2
    )
    layouts, dropped = paying_layouts([replace(FRAME, tp_overlap=2)], prices.price_cache)
    assert layouts  # pinned
    assert not dropped


def slow_instance(seed: int) -> Instance:
    """Returns an instance on a network so slow that halves pay, with a stack that runs them."""
    instance = random_instance(seed)
    cluster = with_gpus(load_cluster("a100-80gb"), 4, 2)
    link = replace(cluster.intra_node, bytes_per_s=3e9, latency_s=1e-7)
    model = replace(
        instance.model,
        num_layers=3,
        hidden_size=1024,
        head_dim=256,
        num_heads=4,
        num_kv_heads=4,
        ffn_hidden_size=4096,
    )
    return Instance(
        model,
        replace(cluster, intra_node=link),
        replace(instance.training, seq_length=512, stack=Stack(host_operator_s=1e-7, tp_overlap=3)),
    )


@pytest.mark.slow
@pytest.mark.parametrize("seed", mostly_slow([1, 2], {2}))
def test_the_search_over_levels_equals_brute_force_and_no_bound_is_above_a_price(seed):
    instance = slow_instance(seed)
    pins = replace(
        PINS,
        tp=(2,),
        micro_batch_size=(2, 4),
        sequence_parallel=(False,),
        schedule=(Schedule.ONE_F_ONE_B,),
    )
    question = instance.model, instance.cluster, instance.training
    price_cache = instance.price_cache()
    table = MixTable(instance.price_cache(), pins)
    best = dict[ParallelLayout, float]()
    for layout in enumerate_candidates(*question, pins).layouts:
        strategies = itertools.islice(
            every_strategy(layout, instance.model.num_layers),
            0,
            None,
            1 if layout.tp_overlap else 3,
        )
        best[layout] = min(
            price_step(made, price_cache).closed_form_s
            for made in strategies
            if same_sharding(made) or not price_cache.tied
        )

    for layout, best_s in best.items():
        assert time_bound(layout, table).step_s <= best_s * (1 + 1e-9)
    fastest = min(best, key=best.__getitem__)
    plan = find_plan(*question, constraints=replace(pins, tp_overlap=None))
    without = find_plan(*question, constraints=replace(pins, tp_overlap=(0,)))
    assert plan.pipeline.tp_overlap == fastest.tp_overlap == 3
    assert (
        plan.search.bound <= best[fastest] * (1 + 1e-5) + 2e-6
    )  # brute force has one ZeRO stage a plan
    assert plan.predicted.step_time_s.value < without.predicted.step_time_s.value


def estimated(level: int, **changes: object) -> Plan:
    layout = replace(FRAME, tp_overlap=level, **changes)
    return estimate_plan(LLAMA, CLUSTER, training(), layout, recompute=Recompute.FULL)


def test_a_plan_carries_its_level_and_is_priced_again_alike():
    plans = {level: estimated(level) for level in (0, 3)}

    assert plans[3].predicted.step_time_s.value < plans[0].predicted.step_time_s.value
    reread = plan_from_document(plan_to_document(plans[3]), "plan")
    assert reread == plans[3]
    assert reprice(reread).plan.predicted == plans[3].predicted
    assert pipeline_phrases(reread.pipeline, reread.mesh)[-1] == "sub-pipelined at level 3"
    assert pipeline_phrases(plans[0].pipeline, plans[0].mesh)[-1] == "micro-batch 2 x 8"


def test_a_layout_made_by_hand_is_refused_where_halves_do_not_apply():
    with pytest.raises(ConfigError, match="sends twice between halves"):
        estimated(2, sequence_parallel=True)
    with pytest.raises(ConfigError, match="tp_overlap is 4"):
        plan_from_document(
            {
                **plan_to_document(estimated(0)),
                "pipeline": {**plan_to_document(estimated(0))["pipeline"], "tp_overlap": 4},
            },
            "plan",
        )
    with pytest.raises(ConfigError, match="--tp-overlap is 4"):
        Constraints(tp_overlap=(4,))
