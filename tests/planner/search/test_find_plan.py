"""The search equals a full enumeration, keeps its bound, gap and status, and is reproducible."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parplan.planner.candidates.branch_and_bound import WORTH_REPLAYING
from parplan.planner.candidates.lower_bounds import redundancy_bound_bytes, time_bound
from parplan.planner.deadline import NEVER
from parplan.planner.objective import Objective
from parplan.planner.plan.oom_risk import RiskMargin
from parplan.planner.plan.plan_file import plan_to_yaml
from parplan.planner.plan.prediction import Status
from parplan.planner.plan.ratio_band import plan_shape, ratio_share
from parplan.planner.request import Constraints, SearchOptions, SolverName
from parplan.planner.stage_columns.mix_table import MixTable
from parplan.profiles.errors import ConfigError, InfeasibleError
from parplan.profiles.machines.machine_catalog import load_cluster, with_gpus
from parplan.profiles.models.documents import Documents
from parplan.profiles.models.fine_tuning import FineTuning
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.spec import Optimizer, TrainingSpec
from parplan.profiles.stack import NEUTRAL, AttentionKernel, Stack
from parplan.profiles.units import GIB
from tests.helpers.cases import mostly_slow
from tests.helpers.instances import (
    PINS,
    Instance,
    every_price,
    peak_bytes,
    random_instance,
    redundant_bytes,
)
from tests.helpers.planning import find_plan

SLOWDOWN = 0.2
MEMORY_SLACK = 0.1
OTHERS = tuple(optimizer for optimizer in Optimizer if optimizer is not Optimizer.ADAM)
# Every optimizer has its own instance; Adam has those of all seeds.
TUNINGS = {
    "lora": FineTuning(lora_rank=4, lora_targets=("qkv", "fc2")),
    "lora-8-bit": FineTuning(lora_rank=8, lora_targets=("proj",), base_bits=8),
    "norms": FineTuning(freeze=("embedding", "norms")),
}
TRAINED = mostly_slow(
    [
        *((seed, Optimizer.ADAM) for seed in range(5)),
        *enumerate(OTHERS),
        *((seed, "lora") for seed in (0, 4)),
        (4, "norms"),
        (3, "lora-8-bit"),
        *((seed, "documents") for seed in (0, 2)),
    ],
    {(4, Optimizer.ADAM)},
)


def instance_of(seed: int, trained: Optimizer | str) -> Instance:
    """Returns an instance with an optimizer, a fine-tuning of TUNINGS, or packed documents."""
    instance = random_instance(seed)
    if trained == "documents":
        few = Documents(lengths=((16, 9), (instance.training.seq_length // 2, 1)))
        fused = replace(instance.training, documents=few, attention=AttentionKernel.FLASH)
        return replace(instance, training=fused)
    if isinstance(trained, Optimizer):
        return replace(instance, training=replace(instance.training, optimizer=trained))
    return replace(instance, training=replace(instance.training, fine_tuning=TUNINGS[trained]))


def search(instance: Instance, objective: Objective = Objective.THROUGHPUT, **options: object):
    return find_plan(
        instance.model,
        instance.cluster,
        instance.training,
        objective,
        constraints=PINS,
        options=SearchOptions(**options),
    )


@pytest.mark.parametrize(("seed", "trained"), TRAINED)
def test_search_equals_brute_force_under_both_objectives_with_memory_binding(seed, trained):
    instance = instance_of(seed, trained)
    everything = every_price(instance, mixed=40)
    peaks = sorted(peak_bytes(price) for _, price in everything)
    limit = int(peaks[len(peaks) // 10])  # nine in ten strategies do not fit
    fitting = [(s, p) for s, p in everything if peak_bytes(p) <= limit]
    fastest_s = min(p.closed_form_s for _, p in fitting)

    plan = search(instance, memory_limit_bytes=limit)

    assert plan.search.status is Status.OPTIMAL
    assert (
        plan.search.bound <= fastest_s * (1 + 1e-5) + 2e-6
    )  # nothing that was enumerated is below it
    assert (
        plan.search.fastest_step_time_s <= fastest_s * (1 + 1e-5) + 2e-6
    )  # nor better than what was found
    assert plan.search.value <= WORTH_REPLAYING * fastest_s + 1e-6
    simulated_s = min(p.step_s for _, p in fitting)
    assert plan.predicted.step_time_s.value <= 1.05 * simulated_s

    slowest_s = fastest_s * (1 + SLOWDOWN)
    leanest = min(redundant_bytes(s, p) for s, p in fitting if p.closed_form_s <= slowest_s)
    lean = search(instance, Objective.MEMORY, memory_limit_bytes=limit, max_slowdown=SLOWDOWN)

    assert lean.search.status is Status.OPTIMAL
    assert lean.search.value <= leanest / GIB * (1 + 1e-5) + 1e-5
    assert lean.predicted.redundancy_gib.total == pytest.approx(
        lean.search.value, rel=1e-4, abs=1e-3
    )
    assert lean.search.value * (1 - lean.search.gap) <= leanest / GIB * (1 + 1e-5) + 1e-5

    least = min(redundant_bytes(s, p) for s, p in fitting)
    within = [
        p.closed_form_s for s, p in fitting if redundant_bytes(s, p) <= least * (1 + MEMORY_SLACK)
    ]
    first = search(instance, Objective.MEMORY, memory_limit_bytes=limit, memory_slack=MEMORY_SLACK)

    assert first.search.status is Status.OPTIMAL
    assert first.search.value <= least / GIB * (1 + 1e-5) + 1e-5
    assert first.predicted.redundancy_gib.total <= first.search.value * (1 + MEMORY_SLACK) + 1e-3
    if first.search.value >= least / GIB * (1 - 1e-5):  # mixes that the enumeration lacks
        assert first.search.memory_first.step_s <= min(within) * (1 + 1e-5) + 2e-6
    assert first.search.memory_first.step_bound_s <= first.search.memory_first.step_s


@pytest.mark.parametrize(("seed", "trained"), TRAINED)
def test_bounds_never_exceed_the_optimum_of_their_frame(seed, trained):
    instance = instance_of(seed, trained)
    table = MixTable(instance.price_cache(), PINS)
    best_s, best_bytes = {}, {}
    for strategy, price in every_price(instance):
        layout = strategy.layout
        best_s[layout] = min(best_s.get(layout, float("inf")), price.closed_form_s)
        best_bytes[layout] = min(
            best_bytes.get(layout, float("inf")), redundant_bytes(strategy, price)
        )

    for layout, optimum_s in best_s.items():
        assert time_bound(layout, table).step_s <= optimum_s * (1 + 1e-9)
        assert redundancy_bound_bytes(layout, table) <= best_bytes[layout] * (1 + 1e-9) + 1


def gpt_2_5b_on_16():
    entry = load_model("gpt-2.5b")
    training = TrainingSpec(
        global_batch_size=entry.global_batch_size, seq_length=entry.seq_length, stack=NEUTRAL
    )
    return entry.spec, with_gpus(load_cluster("a100-80gb"), 16), training


def gpt_20b_on_64():
    entry = load_model("gpt-20b")
    training = TrainingSpec(
        global_batch_size=entry.global_batch_size, seq_length=entry.seq_length, stack=NEUTRAL
    )
    return entry.spec, with_gpus(load_cluster("a100-80gb"), 64), training


@pytest.fixture(scope="module")
def whole():
    return find_plan(*gpt_2_5b_on_16())


@pytest.fixture(scope="module")
def in_14_gib():
    return find_plan(*gpt_2_5b_on_16(), options=SearchOptions(memory_limit_bytes=14 * GIB))


@pytest.mark.slow
def test_the_same_request_gives_the_same_bytes_twice(whole):
    assert plan_to_yaml(find_plan(*gpt_2_5b_on_16())) == plan_to_yaml(whole)


@pytest.mark.slow
def test_cbc_and_highs_find_the_same_optimum(in_14_gib):
    highs = find_plan(
        *gpt_2_5b_on_16(),
        options=SearchOptions(memory_limit_bytes=14 * GIB, solver=SolverName.HIGHS),
    )

    assert in_14_gib.search.bound == pytest.approx(highs.search.bound, rel=1e-6)


@pytest.mark.slow
def test_the_plan_fits_the_memory_limit_and_says_what_was_proven(in_14_gib):
    plan = in_14_gib

    assert max(stage.total for stage in plan.predicted.memory_gib) <= 14.0
    assert plan.search.bound <= plan.search.value
    assert plan.search.gap == pytest.approx(1 - plan.search.bound / plan.search.value, abs=1e-5)
    assert (
        plan.search.candidates.considered
        == plan.search.candidates.pruned + plan.search.candidates.solved
    )


@pytest.mark.slow
def test_the_memory_objective_is_leaner_and_within_the_slowdown(whole):
    fast = whole
    lean = find_plan(*gpt_2_5b_on_16(), Objective.MEMORY, options=SearchOptions(max_slowdown=0.1))

    assert lean.predicted.redundancy_gib.total < fast.predicted.redundancy_gib.total
    assert (
        lean.predicted.step_time_s.value <= 1.1 * fast.predicted.step_time_s.value * 1.02
    )  # simulated against closed form


@pytest.mark.slow
def test_a_time_limit_returns_the_best_so_far_with_an_honest_gap(in_14_gib):
    plan, ended = (
        find_plan(
            *gpt_2_5b_on_16(),
            options=SearchOptions(memory_limit_bytes=14 * GIB, deadline=NEVER.first_plan()),
        ),
        in_14_gib,
    )

    assert plan.search.status is Status.FEASIBLE
    assert plan.search.bound <= ended.search.bound <= plan.search.value
    assert plan.search.gap == pytest.approx(1 - plan.search.bound / plan.search.value, abs=1e-5)


def test_an_interrupt_after_the_first_plan_returns_it_as_feasible():
    calls = []

    def interrupt(progress):
        calls.append(progress)
        if progress.incumbent is not None:
            raise KeyboardInterrupt

    plan = find_plan(*gpt_2_5b_on_16(), on_progress=interrupt)

    assert plan.search.status is Status.FEASIBLE
    assert plan.search.bound <= plan.search.value
    assert calls


@pytest.mark.slow
def test_runners_up_inside_the_error_band_are_marked_and_no_others(whole):
    plan = whole
    band, best_s = plan.predicted.error_band, plan.predicted.step_time_s.value

    assert plan.search.runners_up
    for runner_up in plan.search.runners_up:
        assert runner_up.inside_error_band is (
            abs(runner_up.step_time_s.value / best_s - 1)
            <= ratio_share(band, plan_shape(plan), plan_shape(runner_up))
        )


@pytest.mark.slow
def test_the_margin_of_the_stack_is_what_a_search_keeps_free(monkeypatch):
    monkeypatch.setattr(
        "parplan.planner.plan.error_band.default_margin",
        lambda stack: RiskMargin(share=0.6 if stack == "s" else 0.0, rows=50, stack=stack),
    )
    model, cluster, training = gpt_2_5b_on_16()

    kept = find_plan(model, cluster, replace(training, stack=Stack(name="s")))
    full = find_plan(model, cluster, training)

    assert (
        max(stage.total for stage in kept.predicted.memory_gib)
        <= 0.4 * cluster.device.memory_bytes / GIB
    )
    assert (
        max(stage.total for stage in full.predicted.memory_gib)
        > 0.4 * cluster.device.memory_bytes / GIB
    )


def test_pins_are_respected():
    plan = find_plan(*gpt_2_5b_on_16(), constraints=Constraints(tp=(2,), pp=(1, 2), zero=(1,)))

    assert plan.mesh.tp == 2
    assert plan.mesh.pp in (1, 2)
    assert {layer.zero for layer in plan.layer_plans.values()} == {1}


@pytest.mark.slow
def test_a_model_too_large_says_how_much_where_and_how_many_gpus_would_do():
    entry = load_model("gpt-175b")
    training = TrainingSpec(
        global_batch_size=entry.global_batch_size, seq_length=entry.seq_length, stack=NEUTRAL
    )
    cluster = with_gpus(load_cluster("a100-80gb"), 8)

    with pytest.raises(
        InfeasibleError,
        match=r"does not fit on 8 x a100-80gb.*needs [\d.]+ GiB on stage \d+, .* GiB short",
    ) as error:
        find_plan(entry.spec, cluster, training)

    enough = int(error.value.hint.split()[0])
    find_plan(entry.spec, with_gpus(load_cluster("a100-80gb"), enough), training)  # they are enough
    with pytest.raises(InfeasibleError):
        find_plan(entry.spec, with_gpus(load_cluster("a100-80gb"), enough - 8), training)


def test_no_legal_mesh_names_the_commonest_reason():
    model, _, training = gpt_20b_on_64()

    with pytest.raises(ConfigError, match=r"no legal way to use 53 GPUs.*most are ruled out"):
        find_plan(model, with_gpus(load_cluster("a100-80gb"), 53, 53), training)


@pytest.mark.slow
def test_an_interrupt_in_the_memory_search_falls_back_to_the_fastest_plan(whole, monkeypatch):
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("parplan.planner.master.Master.leanest", interrupt)
    plan = find_plan(*gpt_2_5b_on_16(), "memory")

    assert plan.search.status is Status.FEASIBLE
    assert plan.search.bound <= plan.search.value
    assert plan.mesh == whole.mesh
