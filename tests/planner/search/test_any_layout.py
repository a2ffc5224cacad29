"""Any combination of options gives a plan with numbers or one error with a hint."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator

import pytest

from parplan.costmodels.layers.recompute import Recompute
from parplan.planner.request import SEARCHED_OFFLOAD, Constraints
from parplan.profiles.machines.machine_catalog import load_cluster, with_gpus
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.spec import TrainingSpec
from parplan.profiles.stack import NEUTRAL
from tests.helpers.cases import mostly_slow
from tests.helpers.command_runs import fail, run
from tests.helpers.planning import find_plan

SEED = 20
LAYOUTS = 40
ALL_LAYOUTS = 1000
SCHEDULES = ("gpipe", "1f1b", "interleaved", "early-recompute", "last-no-recompute", "scp", "zbv")
TINY = ("--model", "gpt-tiny", "--gpus", "8")
TRAINING = TrainingSpec(global_batch_size=16, seq_length=64, stack=NEUTRAL)


def layout(chance: random.Random) -> list[str]:
    """Returns options of `plan estimate` on a small model, most of them legal together."""

    def maybe(share: float, name: str, values: tuple[object, ...] = ()) -> list[str]:
        if chance.random() >= share:
            return []
        return [name, str(chance.choice(values))] if values else [name]

    model, gpus = (
        chance.choice(("gpt-tiny", "gpt-tiny", "mixtral-tiny")),
        chance.choice((1, 2, 4, 8, 8, 16)),
    )
    pp = chance.choice([degree for degree in (1, 2, 4) if gpus % degree == 0])
    tp = chance.choice([degree for degree in (1, 1, 2, 4) if gpus // pp % degree == 0])
    chosen = chance.sample(
        ("states", "activations", "lookup")
        if chance.random() < 0.5
        else ("optimizer", "parameters"),
        1,
    )
    chunks = chosen[0] in ("optimizer", "parameters")
    offload = maybe(0.4, "--offload", (",".join(chosen),))
    return [
        "--model",
        model,
        "--gpus",
        str(gpus),
        "--pp",
        str(pp),
        "--tp",
        str(tp),
        *offload,
        *(maybe(0.8, "--schedule", SCHEDULES) if pp > 1 else []),
        *maybe(0.25 * (pp > 1), "--virtual-stages", (2, 3, 4)),
        *maybe(0.7, "--zero", (0, 1, 2, 3)),
        *maybe(0.1, "--zero-ranks", (2, 4)),
        *maybe(0.6, "--recompute", ("none", "selective", "full")),
        *(
            maybe(0.3, "--memory-limit", ("1MiB", "2GiB", "3GiB", "80GiB"))
            if chunks and offload
            else []
        ),
        *(maybe(0.3, "--eviction", ("opt", "lru", "fifo")) if chunks and offload else []),
        *maybe(0.15, "--keep-on-host", ("all", "fc1", "fc1,fc2", "nonsense")),
        *maybe(0.7, "--micro-batch-size", (1, 2, 4)),
        *maybe(0.3 * (tp > 1), "--sequence-parallel"),
        *maybe(0.3 * (tp > 1), "--tp-overlap", (0, 1, 2, 3)),
        *maybe(0.3 * (model != "gpt-tiny"), "--ep", (1, 2, 4)),
        *maybe(0.5, "--global-batch-size", (16, 32, 48, 64)),
        *maybe(0.2, "--seq-length", (1, 2, 64, 127, 128)),
        *maybe(0.2, "--gpu", ("v100-32gb", "cpu", "h100-80gb")),
        *maybe(0.1, "--stack", ("parplan", "torchtitan", "nanotron")),
        *maybe(0.1, "--host-memory", ("1GiB", "100MiB")),
        *maybe(0.1, "--gpus-per-node", (1, 2, 4)),
        *maybe(0.1, "--attention", ("flash", "unfused")),
    ]


def numbers(value: object) -> Iterator[float]:
    """Yields all numbers in a JSON value."""
    if isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from numbers(part)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield value


@pytest.mark.parametrize("count", [LAYOUTS, pytest.param(ALL_LAYOUTS, marks=pytest.mark.slow)])
def test_any_layout_is_a_plan_with_numbers_or_one_error(count):
    chance, plans = random.Random(SEED), 0
    for _ in range(count):
        arguments = layout(chance)
        result = run("estimate", *arguments, "--json")
        assert result.exit_code in (0, 2, 3), (arguments, result.exception)
        if result.exit_code:
            fail(result.exit_code, "estimate", *arguments, "--json")
            continue
        plans += 1
        predicted = json.loads(result.stdout)["predicted"]
        del predicted["redundancy_gib"]  # less than none where states lie on the host
        assert all(math.isfinite(number) and number >= 0 for number in numbers(predicted)), (
            arguments
        )
        assert predicted["step_time_s"]["value"] > 0, arguments

    assert plans > count / 5


@pytest.mark.parametrize("schedule", ["scp", "early-recompute", "last-no-recompute", "zbv"])
def test_a_schedule_without_a_price_for_zero_3_is_refused_as_the_search_refuses_it(schedule):
    arguments = (
        "--pp",
        "2",
        "--dp",
        "4",
        "--schedule",
        schedule,
        "--zero",
        "3",
        "--stack",
        "parplan",
    )

    assert "with ZeRO 3" in fail(2, "estimate", *TINY, *arguments)
    assert "no legal way" in fail(2, *TINY, *arguments)


@pytest.mark.slow
@pytest.mark.parametrize("level", mostly_slow(Recompute, {Recompute.FULL}))
def test_one_level_of_recompute_is_searched_where_activations_may_go_to_the_host(level):
    pins = Constraints(recompute=(level,), offload=SEARCHED_OFFLOAD, tp=(1,), micro_batch_size=(1,))

    plan = find_plan(
        load_model("gpt-tiny").spec,
        with_gpus(load_cluster("a100-80gb"), 2),
        TRAINING,
        constraints=pins,
    )

    assert plan.predicted.step_time_s.value > 0
