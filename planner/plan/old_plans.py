"""Documents of plans that an older parplan wrote, as documents of today's version.

Version 1 said the layers of a described stage as numbers of blocks, with nothing for embedding and
head, and those of a traced stage as shards [first, end).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from parplan.planner.plan.plan import PLAN_VERSION
from parplan.profiles.documents.schema import parse

OLD_VERSION = 1
# Keys of `training.stack` in older files: the key and the value that they have today. A stack once
# had a single attention kernel, which was priced on every device.
RENAMED_STACK_KEYS: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    "flash_kernel": ("flash_kernels", lambda kernel: [{"kernel": kernel}])
}
_FORBID = {"extra": "forbid"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _OldRun:
    """Consecutive layers of version 1; `blocks` has the first and the last, None for an end."""

    __pydantic_config__ = _FORBID

    plan: str
    blocks: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _OldStage:
    __pydantic_config__ = _FORBID

    rank: int
    layers: tuple[_OldRun, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _OldShardStage:
    __pydantic_config__ = _FORBID

    rank: int
    first: int
    end: int
    zero: int
    recompute: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Described:
    stages: tuple[_OldStage, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Traced:
    stages: tuple[_OldShardStage, ...]


def in_todays_form(body: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Returns a document of any version that is read in today's form; a missing stack is neutral.

    Raises ConfigError with `where` for stages that are none of their version.
    """
    training = body.get("training")
    if isinstance(training, dict):
        stack = training.get("stack", {})
        if isinstance(stack, dict):
            stack = dict(_present_key(key, value, stack) for key, value in stack.items())
        body = {**body, "training": {**_present_products(training), "stack": stack}}
    if body["plan_version"] != OLD_VERSION or "stages" not in body:
        return {**body, "plan_version": PLAN_VERSION}
    old = {"stages": body["stages"]}
    if "traced" in body:
        stages = [_shard_stage(stage) for stage in parse(_Traced, old, where).stages]
    else:
        stages = _described_stages(parse(_Described, old, where))
    return {**body, "plan_version": PLAN_VERSION, "stages": stages}


def _described_stages(old: _Described) -> list[dict[str, Any]]:
    """Returns stages of a described model; embedding and head are the layers that come next."""
    stages, following = [], 0
    for stage in old.stages:
        layers = []
        for run in stage.layers:
            first, last = (
                (following, following)
                if run.blocks is None
                else (run.blocks[0] + 1, run.blocks[1] + 1)
            )
            following = last + 1
            layers.append({"first": first, "last": last, "plan": run.plan})
        stages.append({"rank": stage.rank, "layers": layers})
    return stages


def _shard_stage(old: _OldShardStage) -> dict[str, Any]:
    return {
        "rank": old.rank,
        "layers": [{"first": old.first, "last": old.end - 1}],
        "zero": old.zero,
        "recompute": list(old.recompute),
    }


def _present_products(training: Mapping[str, Any]) -> dict[str, Any]:
    """Returns training with a format where older files said that products are in fp8."""
    kept = {key: value for key, value in training.items() if key != "fp8_matmuls"}
    return {**kept, "products": "fp8-current"} if training.get("fp8_matmuls") is True else kept


def _present_key(key: str, value: Any, stack: Mapping[str, Any]) -> tuple[str, Any]:
    name, convert = RENAMED_STACK_KEYS.get(key, (key, None))
    if convert is None or name in stack:
        return key, value
    return name, convert(value)
