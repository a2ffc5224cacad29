"""The best plans of launchers side by side."""

from __future__ import annotations

import pytest

from parplan.planner.launchers.best_of_each import search_each, table_of
from parplan.planner.objective import Prefer
from parplan.profiles.errors import ConfigError, InfeasibleError, OutOfTimeError
from tests.planner.launchers.test_launcher_ties import plan_of, slower


@pytest.fixture(scope="module")
def plan():
    return plan_of("megatron-core")


def raising(error):
    def find():
        raise error

    return find


@pytest.mark.slow
def test_the_fastest_plan_is_first_and_refusals_are_last(plan):
    finds = {
        "megatron": lambda: slower(plan, 1.5),
        "torchtitan": raising(ConfigError("it does not say the model")),
        "fsdp2": lambda: plan,
        "deepspeed": raising(InfeasibleError("nothing fits")),
    }

    entries, unsearched = search_each(finds, lambda: False)
    table = table_of(entries, unsearched, Prefer.FASTEST)

    assert [each.launcher for each in table.entries[:2]] == ["fsdp2", "megatron"]
    assert {each.launcher for each in table.entries[2:]} == {"torchtitan", "deepspeed"}
    assert table.chosen == "fsdp2"
    assert table.plan == plan
    assert unsearched == ()


def test_an_interrupt_leaves_the_other_launchers_without_a_search(plan):
    interrupts = []

    def interrupted():
        interrupts.append(1)
        return plan

    entries, unsearched = search_each(
        {"megatron": interrupted, "fsdp2": lambda: plan}, lambda: bool(interrupts)
    )

    assert [each.launcher for each in entries] == ["megatron"]
    assert unsearched == ("fsdp2",)


@pytest.mark.parametrize("error", [OutOfTimeError("over", hint="more"), KeyboardInterrupt()])
def test_an_end_after_the_first_plan_keeps_it_and_before_it_is_an_error(plan, error):
    entries, unsearched = search_each(
        {"megatron": lambda: plan, "fsdp2": raising(error)}, lambda: False
    )

    assert [each.launcher for each in entries] == ["megatron"]
    assert unsearched == ("fsdp2",)
    with pytest.raises(type(error)):
        search_each({"fsdp2": raising(error), "megatron": lambda: plan}, lambda: False)
