"""Plans that parse and do not fit together.

One or two numbers, names or lists of a valid plan are changed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from random import Random
from typing import Any

from benchmarks.commands.fuzzing.values import INTEGERS

Edit = Callable[[Any, Random], None]
SCHEDULES = (
    "gpipe",
    "1f1b",
    "interleaved",
    "early-recompute",
    "last-no-recompute",
    "scp",
    "zbv",
    "custom",
)
OFFLOAD = ("states", "activations", "optimizer", "parameters", "lookup")
PLACED = (
    [],
    ["Shard(0)@tp"],
    ["Shard(1)@tp"],
    ["Shard(2)@tp"],
    ["Shard(7)@tp"],
    ["Partial@tp"],
    ["Shard(0)@dp"],
    ["Shard(0)@tp"] * 2,
    ["x"],
)


def number(old: int, chance: Random) -> int:
    """Return another whole number, most often a small one."""
    small = chance.choice((0, 1, 2, 3, 4, 5, 7, 8, 16, -1, old + 1, old - 1, 2 * old, old // 2))
    return chance.choice(INTEGERS) if chance.random() < 0.12 else small


def _mesh(plan: Any, chance: Random) -> None:
    axis = chance.choice(("pp", "dp", "tp", "ep"))
    plan["mesh"][axis] = number(plan["mesh"].get(axis, 1), chance)


def _traded(plan: Any, chance: Random) -> None:
    """Move a factor from one axis to another; the number of ranks stays."""
    giver, taker = chance.sample(("pp", "dp", "tp"), 2)
    if plan["mesh"][giver] % 2 == 0:
        plan["mesh"][giver] //= 2
        plan["mesh"][taker] *= 2


def _cluster(plan: Any, chance: Random) -> None:
    if chance.random() < 0.5:
        plan["cluster"]["nodes"] = number(plan["cluster"].get("nodes", 1), chance)
    else:
        plan["cluster"]["node"]["gpus"] = number(plan["cluster"]["node"]["gpus"], chance)


def _pipeline(plan: Any, chance: Random) -> None:
    pipeline = plan["pipeline"]
    key = chance.choice(
        ("virtual_stages", "micro_batch_size", "num_micro_batches", "schedule", "tp_overlap")
    )
    pipeline[key] = (
        chance.choice(SCHEDULES) if key == "schedule" else number(pipeline.get(key, 0), chance)
    )


def _actions(plan: Any, chance: Random) -> None:
    rows = list(plan["pipeline"].get("actions") or ["0F0,0B0", "1F0,1B0"])
    how, place = (
        chance.choice(("drop", "swap", "double", "cut", "foreign")),
        chance.randrange(len(rows)),
    )
    if how == "drop":
        rows.pop(place)
    elif how == "swap":
        rows.reverse()
    elif how == "double":
        rows[place] += "," + rows[place].split(",")[-1]
    elif how == "cut":
        rows[place] = rows[place].rpartition(",")[0]
    else:
        rows[place] = rows[place].replace("F", chance.choice("FBIWRX"), 1)
    plan["pipeline"]["actions"] = rows


def _training(plan: Any, chance: Random) -> None:
    key = chance.choice(("global_batch_size", "seq_length"))
    plan["training"][key] = number(plan["training"][key], chance)


def _model(plan: Any, chance: Random) -> None:
    if "model" not in plan:
        return
    model = plan["model"]
    key = chance.choice(
        [
            key
            for key, value in model.items()
            if isinstance(value, int) and not isinstance(value, bool)
        ]
    )
    model[key] = number(model[key], chance)


def _layer_plan(plan: Any, chance: Random) -> None:
    if "layer_plans" not in plan:
        return
    layer_plan = plan["layer_plans"][chance.choice(sorted(plan["layer_plans"]))]
    key = chance.choice(
        (
            "zero",
            "zero_ranks",
            "recompute",
            "keep_on_host",
            "offload",
            "layer",
            "sequence_parallel",
            "operators",
            "operators",
        )
    )
    operators = layer_plan["operators"]
    if key == "zero":
        layer_plan[key] = number(layer_plan[key], chance)
    elif key == "zero_ranks":
        layer_plan[key] = number(layer_plan[key] or 1, chance)
    elif key in ("recompute", "keep_on_host"):
        known = [*operators, "attention_core", "", "fc9", "lm_head"]
        layer_plan[key] = [chance.choice(known) for _ in range(chance.choice((1, 2, 5)))]
    elif key == "offload":
        layer_plan[key] = chance.choices(OFFLOAD, k=chance.choice((1, 2, 3)))
    elif key == "layer":
        layer_plan[key] = chance.choice(("block", "embedding", "head"))
    elif key == "sequence_parallel":
        layer_plan[key] = not layer_plan[key]
    elif operators:
        _operator(operators, chance)


def _operator(operators: Any, chance: Random) -> None:
    name = chance.choice(sorted(operators))
    how = chance.choice(("input", "output", "parameters", "drop", "rename"))
    if how in ("input", "output"):
        operators[name][how] = list(chance.choice(PLACED))
    elif how == "parameters":
        operators[name]["parameters"] = {
            chance.choice(("weight", "bias", "other")): list(chance.choice(PLACED))
        }
    elif how == "drop":
        del operators[name]
    else:
        operators[f"{name}2"] = operators.pop(name)


def _stage(plan: Any, chance: Random) -> None:
    stages = plan["stages"]
    how, place = (
        chance.choice(("rank", "drop", "double", "swap", "inner", "inner", "inner")),
        chance.randrange(len(stages)),
    )
    if how == "rank":
        stages[place]["rank"] = number(stages[place]["rank"], chance)
    elif how == "drop":
        stages.pop(place)
    elif how == "double":
        stages.append(copy.deepcopy(stages[place]))
    elif how == "swap":
        stages.reverse()
    elif "layers" in stages[place]:
        _layers(plan, stages[place]["layers"], chance)
    else:
        key = chance.choice(("first", "end", "zero", "recompute"))
        stages[place][key] = (
            [number(0, chance)] if key == "recompute" else number(stages[place][key], chance)
        )


def _layers(plan: Any, layers: list[Any], chance: Random) -> None:
    if not layers:
        return
    run, how = (
        chance.choice(layers),
        chance.choice(("blocks", "blocks", "plan", "drop", "double", "unblock")),
    )
    if how == "blocks" and run.get("blocks"):
        run["blocks"][chance.randrange(2)] = chance.choice(
            (number(run["blocks"][0], chance), 10**12)
        )
    elif how == "plan":
        run["plan"] = chance.choice([*plan["layer_plans"], "Z"])
    elif how == "drop":
        layers.remove(run)
    elif how == "double":
        layers.append(copy.deepcopy(run))
    else:
        run["blocks"] = None if run.get("blocks") else [0, 0]


def _shard(plan: Any, chance: Random) -> None:
    if "shards" not in plan:
        return
    shard = chance.choice(plan["shards"])
    key = chance.choice(("first", "end", "parameters", "starts", "layer"))
    shard[key] = number(shard[key], chance) if isinstance(shard[key], int) else "other"
    if chance.random() < 0.2:
        plan["traced"]["num_operators"] = number(plan["traced"]["num_operators"], chance)


def _chunks(plan: Any, chance: Random) -> None:
    chunks = plan.get("chunks")
    if not chunks:
        return
    part = chance.choice(("ranks", "groups"))
    each = chance.choice(chunks[part])
    key = chance.choice([key for key, value in each.items() if isinstance(value, int)])
    each[key] = number(each[key], chance)


def _predicted(plan: Any, chance: Random) -> None:
    memory = plan["predicted"]["memory_gib"]
    how = chance.choice(("drop", "double", "stage"))
    if how == "drop":
        memory.pop()
    elif how == "double":
        memory.append(copy.deepcopy(memory[-1]))
    else:
        memory[0]["stage"] = number(0, chance)


def _module(plan: Any, chance: Random) -> None:
    """Set another module; most names are no modules."""
    plan["module"] = {
        "factory": chance.choice(
            (
                "no.such:build",
                "os:getcwd",
                "json:dumps",
                "mine:build",
                "x",
                ":",
                "os:",
                "a:b:c",
                "../x:y",
                "",
            )
        )
    }


EDITS: tuple[Edit, ...] = (
    _mesh,
    _mesh,
    _traded,
    _cluster,
    _pipeline,
    _pipeline,
    _actions,
    _training,
    _model,
    _layer_plan,
    _layer_plan,
    _stage,
    _stage,
    _shard,
    _chunks,
    _predicted,
    _module,
)


def edited(plan: Any, chance: Random) -> Any:
    """Return a copy of a plan's document with one to three edits, at least one effective."""
    for _ in range(20):
        changed = copy.deepcopy(plan)
        for _ in range(chance.choice((1, 1, 1, 2, 3))):
            with suppress(
                IndexError, KeyError, TypeError, ValueError
            ):  # an earlier edit removed the target of this one
                chance.choice(EDITS)(changed, chance)
        if changed != plan:
            return changed
    raise AssertionError("no edit of this plan changes anything")
