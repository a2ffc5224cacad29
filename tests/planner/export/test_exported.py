"""A plan that is exported and read back has the same price, or the loss that is stated."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.schedules.schedule import Schedule
from parplan.planner.export.exported import export_plan
from parplan.planner.export.targets import TARGETS, target_named
from parplan.planner.export.torchtitan.torchtitan_arguments import generated_blocks, partitions
from parplan.planner.plan.plan import Plan
from parplan.profiles.errors import ConfigError
from parplan.profiles.models.fine_tuning import FineTuning
from parplan.profiles.stack import ContextForm
from tests.helpers.laid_out_plans import laid_out

TITAN = {"stack": "torchtitan"}
EXACT = 1e-9  # share of a step


def exported(plan: Plan, target: str = "megatron"):
    return export_plan(plan, target_named(target), "plan.yaml")


def require_consistent(one) -> None:
    """The costs of what is lost add up to the difference of both prices."""
    step_s = one.configured.price.step_s - one.plan.price.step_s
    peak_bytes = one.configured.peak_bytes - one.plan.peak_bytes
    assert sum(loss.step_s for loss in one.losses) == pytest.approx(
        step_s, abs=EXACT * one.plan.price.step_s
    )
    assert sum(loss.peak_bytes for loss in one.losses) == pytest.approx(peak_bytes, abs=1.0)


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(lambda: laid_out(pp=2, dp=2, tp=4), id="three-axes"),
        pytest.param(lambda: laid_out(pp=2, virtual_stages=2, dp=2), id="shorter-ends"),
        pytest.param(lambda: laid_out(pp=2, virtual_stages=3, dp=2), id="interleaved"),
        pytest.param(lambda: laid_out(pp=2, dp=2, blocks=(26, 28)), id="unequal-stages"),
        pytest.param(
            lambda: laid_out("mixtral-8x7b", dp=8, tp=2, ep=8, recompute=Recompute.FULL),
            id="experts",
        ),
        pytest.param(
            lambda: laid_out(
                "deepseek-v2-lite", pp=3, dp=2, ep=2, seq_length=2048, num_micro_batches=6
            ),
            id="latent-attention-and-dense-blocks",
        ),
        pytest.param(
            lambda: laid_out(
                "llama3-8b",
                dp=2,
                cp=4,
                context_form=ContextForm.ALL_TO_ALL,
                seq_length=16384,
                zero=3,
            ),
            id="sequences-and-fsdp",
        ),
        pytest.param(lambda: laid_out(dp=4, zero=1, zero_ranks=2), id="two-copies-of-the-states"),
    ],
)
def test_megatron_says_all_of_such_a_plan(plan):
    one = exported(plan())

    assert one.losses == ()
    assert one.configured.price.step_s == pytest.approx(one.plan.price.step_s, rel=EXACT)
    assert one.configured.peak_bytes == pytest.approx(one.plan.peak_bytes, rel=EXACT)


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(lambda: laid_out("llama3-8b", dp=4, zero=3, **TITAN), id="fsdp"),
        pytest.param(lambda: laid_out("llama3-8b", dp=4, zero_ranks=2, zero=2, **TITAN), id="two"),
        pytest.param(
            lambda: laid_out("llama3-8b", pp=4, tp=2, dp=2, virtual_stages=4, zero=0, **TITAN),
            id="interleaved",
        ),
        pytest.param(
            lambda: laid_out(
                "llama3-8b", pp=2, dp=2, virtual_stages=2, schedule=Schedule.ZBV, zero=2, **TITAN
            ),
            id="zero-bubble",
        ),
        pytest.param(
            lambda: laid_out(
                "qwen3-30b-a3b", dp=8, ep=8, zero=3, recompute=Recompute.FULL, **TITAN
            ),
            id="experts",
        ),
    ],
)
def test_torchtitan_says_all_of_such_a_plan(plan):
    one = exported(plan(), "torchtitan")

    assert one.losses == ()
    assert one.configured.price.step_s == pytest.approx(one.plan.price.step_s, rel=EXACT)


def test_a_model_without_a_configuration_in_torchtitan_is_refused():
    with pytest.raises(ConfigError, match="no configuration of gpt-2"):
        exported(laid_out(dp=2), "torchtitan")


def test_the_stages_of_torchtitan_are_dealt_as_it_deals_them():
    assert generated_blocks(4, 32, 1, 1) == (8, 9, 8, 7)
    assert generated_blocks(1, 32, 1, 1) == (32,)
    assert generated_blocks(32, 32, 2, 0) is None
    assert (8, 9, 8, 7) in partitions(4, 32)
    assert all(sum(blocks) == 32 for blocks in partitions(4, 32))


def mixed_zero(plan: Plan) -> Plan:
    """The plan with another ZeRO stage on the first of its blocks."""
    (name,) = (name for name, each in plan.layer_plans.items() if each.layer == "block")
    head, body, tail = plan.stages[0].layers
    other = replace(plan.layer_plans[name], zero=3)
    runs = (head, replace(body, last=body.first, plan="Z"), replace(body, first=body.first + 1))
    stage = replace(plan.stages[0], layers=(*runs, tail))
    return replace(plan, layer_plans={**plan.layer_plans, "Z": other}, stages=(stage,))


def test_what_megatron_cannot_say_is_listed_with_its_cost():
    one = exported(mixed_zero(laid_out(dp=4, zero=1)))

    assert [loss.what for loss in one.losses] == ["ZeRO: 3 on 1 and 1 on 53 -> 1"]
    assert one.losses[0].step_s < 0.0
    require_consistent(one)


def test_fsdp2_says_the_zero_stage_of_every_block():
    one = exported(mixed_zero(laid_out(dp=4, zero=2, **TITAN)), "fsdp2")

    assert one.losses == ()
    assert "- 1 true\n  - 53 false\n" in one.files["fsdp2.yaml"]


def test_a_schedule_that_megatron_lacks_is_replaced_by_one_that_it_has():
    plan = laid_out(pp=4, virtual_stages=2, schedule=Schedule.ZBV, zero=0, stack="parplan")
    one = exported(plan)

    assert one.losses[0].what.startswith("schedule: zbv, 2 virtual stages")
    assert one.losses[-1].what.startswith("training: ")
    require_consistent(one)


def test_a_model_that_the_arguments_do_not_say_is_refused_by_its_parts():
    with pytest.raises(ConfigError, match=r"gemma-2-9b has .*attention_soft_cap"):
        exported(laid_out("gemma-2-9b", dp=2))


def test_a_model_with_a_tower_is_refused():
    with pytest.raises(ConfigError, match="gemma-3-4b has a tower, which settings of deepspeed"):
        exported(laid_out("gemma-3-4b", dp=2), "deepspeed")


def test_a_plan_of_adapters_is_refused():
    plan = laid_out(dp=2)
    adapters = FineTuning(lora_rank=8, lora_targets=("qkv",))
    training = replace(plan.training, fine_tuning=adapters)

    with pytest.raises(ConfigError, match=r"trains a part of gpt-2\.5b, and no file of megatron"):
        exported(replace(plan, training=training))


def test_the_head_says_the_plan_and_both_prices():
    one = exported(mixed_zero(laid_out(dp=4, zero=1)))
    head = next(iter(one.files.values())).splitlines()[1:8]

    assert head[0] == "# gpt-2.5b on 4 x h100-80gb, exported by parplan from plan.yaml"
    assert head[2].startswith("# the plan: ")
    assert head[3].startswith("# this file: ")
    assert head[4].startswith("# lost: ZeRO: 3 on 1 and 1 on 53 -> 1: -")
    assert head[5] == "# read back with --gpu h100-80gb --gpus 4 --gpus-per-node 4"


def test_the_command_offers_every_target():
    from parplan.commands.export import JOBS as OFFERED_JOBS
    from parplan.commands.options.option_values import LAUNCHERS as OFFERED
    from parplan.planner.export.files.jobs import JOBS

    assert tuple(TARGETS) == OFFERED
    assert tuple(JOBS) == OFFERED_JOBS


# by target: a model that it has, and unequal stages of it
MODELS = {
    "megatron": ("gpt-2.5b", (26, 28)),
    "megatron-bridge": ("gpt-2.5b", (26, 28)),
    "torchtitan": ("llama3-8b", (15, 17)),
    "deepspeed": ("gpt-2.5b", (26, 28)),
    "galvatron": ("llama3-8b", (15, 17)),
    "fsdp2": ("gpt-2.5b", (26, 28)),
    "huggingface": ("llama3-8b", (15, 17)),
    "accelerate": ("llama3-8b", (15, 17)),
}
# by target: an axis that it refuses here, and why
REFUSED = {
    "deepspeed": ("cp", "for sequences"),
    "huggingface": ("pp", "does not say pp"),
    "accelerate": ("pp", "does not say pp"),
}


def many_plans():
    """Every kind of schedule, recompute, ZeRO stage and mesh, as far as they go together."""
    meshes = (
        {"dp": 4},
        {"pp": 4, "dp": 2},
        {"pp": 2, "dp": 2, "tp": 2, "virtual_stages": 2},
        {"dp": 2, "cp": 2, "tp": 2, "context_form": ContextForm.RING},
        {"pp": 2, "dp": 2, "unequal": True},
    )
    yield from (
        {"zero": zero, "recompute": level, **mesh}
        for mesh, zero, level in product(meshes, (0, 1, 2, 3), Recompute)
    )
    for schedule in (Schedule.ZBV, Schedule.DUALPIPEV):
        yield {"pp": 4, "virtual_stages": 2, "schedule": schedule, "zero": 0, "stack": "parplan"}
    yield {"pp": 4, "schedule": Schedule.EARLY_RECOMPUTE, "zero": 0, "stack": "parplan"}


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("layout", tuple(many_plans()), ids=str)
def test_the_round_trip_is_exact_or_its_loss_is_the_difference(layout, target):
    model, blocks = MODELS[target]
    plain = {name: value for name, value in layout.items() if name != "unequal"}
    plan = laid_out(model, blocks=blocks if "unequal" in layout else None, **plain)
    axis, reason = REFUSED.get(target, ("", ""))
    if axis in layout:
        with pytest.raises(ConfigError, match=reason):
            exported(plan, target)
        return
    require_consistent(exported(plan, target))
