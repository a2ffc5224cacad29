"""Small seeded requests of every family of models, stack and objective.

A request is the options of `plan`. Models are cut to a few blocks, so that a search takes seconds.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import yaml

from benchmarks.search.attacks.requests import option_text
from parplan.commands.options.failure_options import FailureOptions
from parplan.commands.options.pin_options import PinOptions
from parplan.commands.options.search_options import SearchFlags
from parplan.commands.options.target_options import TargetOptions
from parplan.profiles.machines.machine_catalog import stack_names
from parplan.profiles.models.model_catalog import load_model


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Models of one kind, and the options that requests for them draw from.

    layers     blocks that the models are cut to
    targets    options of a request, one of which is drawn
    pins       pins of a request, one of which is drawn
    """

    models: tuple[str, ...]
    layers: tuple[int, ...]
    gpu: tuple[str, ...]
    gpus: tuple[int, ...] = (4, 8, 16)
    lengths: tuple[int, ...] = (2048, 4096)
    batches: tuple[int, ...] = (16, 32, 64)
    targets: tuple[Mapping[str, Any], ...] = ({},)
    pins: tuple[Mapping[str, Any], ...] = ({},)
    stacks: tuple[str, ...] = ()


SMALL = ("l4-24gb", "rtx4090-24gb", "v100-32gb", "a10g-24gb")
MIDDLE = ("a100-40gb", "l40s-48gb", "h100-80gb", "a100-80gb")
FAMILIES: Mapping[str, Family] = {
    "dense": Family(
        models=("llama3-8b", "qwen3-8b", "gpt-7.5b", "mistral-7b", "gemma-2-9b", "phi-4"),
        layers=(6, 8, 12),
        gpu=SMALL,
        pins=({}, {}, {"offload": ("none",)}, {"pp": (2, 4)}, {"zero": (0, 1)}),
    ),
    "olmo": Family(
        models=("olmo-2-7b", "olmo-2-13b", "olmo-3-7b"),
        layers=(6, 8),
        gpu=SMALL,
        pins=({}, {"tp": (2, 4)}, {"offload": ("none",)}),
    ),
    "experts": Family(
        models=(
            "mixtral-8x7b",
            "qwen3-30b-a3b",
            "deepseek-v2-lite",
            "gpt-oss-20b",
            "moonlight-16b-a3b",
        ),
        layers=(4, 6),
        gpu=("a100-40gb", "h100-80gb", "l40s-48gb"),
        gpus=(8, 16),
        pins=({}, {}, {"ep": (2, 4)}, {"pp": (2,)}, {"zero": (1,)}),
    ),
    "hybrid": Family(
        models=("granite-4-h-tiny", "qwen3.5-9b", "nemotron-h-tiny", "qwen3-next-80b-a3b"),
        layers=(8,),
        gpu=MIDDLE,
        gpus=(4, 8),
        pins=({}, {"pp": (2,)}),
    ),
    "towers": Family(
        models=(
            "gemma-3-4b",
            "gemma-3-12b",
            "llama4-scout",
            "whisper-large-v3",
            "qwen2.5-vl-7b",
            "mistral-small-3.1-24b",
        ),
        layers=(6, 12),
        gpu=("a100-40gb", "h100-80gb", "l40s-48gb", "a10g-24gb"),
        pins=({}, {}, {"pp": (2, 4)}, {"tp": (2,)}),
    ),
    "pools": Family(
        models=("llama3-8b", "qwen3-8b", "gpt-7.5b", "mixtral-8x7b", "gemma-2-9b"),
        layers=(8, 12),
        gpu=(
            "a100-40gb:4+h100-80gb:4",
            "v100-32gb:4+a100-40gb:4",
            "a100-80gb:8+h100-80gb:8",
            "l4-24gb:4+a10g-24gb:4",
        ),
        pins=({}, {"zero": (0, 1)}),
    ),
    "host": Family(
        models=("llama3-8b", "gpt-7.5b", "qwen3-8b", "gpt-2.5b"),
        layers=(16, 24, 32),
        gpu=("v100-32gb", "rtx4090-24gb", "v100-16gb", "l4-24gb"),
        gpus=(2, 4),
        batches=(8, 16),
        targets=({}, {"host_memory": "400GiB"}),
        pins=({}, {"offload": ("optimizer", "parameters")}, {"offload": ("activations",)}),
    ),
    "context": Family(
        models=("llama3-8b", "qwen3-8b", "llama3-70b", "gemma-3-4b"),
        layers=(4, 6),
        gpu=("h100-80gb", "a100-40gb", "rtx4090-24gb", "a100-80gb"),
        gpus=(8, 16),
        lengths=(16384, 32768),
        batches=(2, 4, 8),
        pins=({}, {"cp": (2,)}, {"cp": (1, 2, 4)}),
        stacks=("parplan", "megatron-core", "torchtitan", "nemo", "internevo"),
    ),
    "tuned": Family(
        models=("llama3-8b", "mistral-7b", "qwen3-8b"),
        layers=(8, 12),
        gpu=SMALL,
        gpus=(4, 8),
        batches=(16, 32),
        targets=(
            {"lora_rank": 16, "lora_targets": ("qkv", "proj")},
            {"freeze": ("embedding",)},
            {"freeze": ("embedding", "norms")},
            {"freeze": ("blocks:0-3",)},
        ),
    ),
}

LIMITS_GIB = (8, 11, 14, 19)  # most devices have room for more
SLOWDOWNS = (None, 0.0, 0.02, 0.3)
_NAMES = {"launchers": "for"}  # of fields that are not called as their options
ROUNDS = ("throughput", "memory", "peak", "throughput", "goodput")  # of one family in turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The options of a `plan` command."""

    family: str
    target: TargetOptions
    pins: PinOptions
    flags: SearchFlags
    failing: FailureOptions = field(default_factory=FailureOptions)

    @property
    def objective(self) -> str:
        return self.flags.objective

    def __str__(self) -> str:
        """Return the request as on the command line."""
        parts = self.target, self.pins, self.flags, self.failing
        words = [
            option_text(_NAMES.get(each.name, each.name), getattr(part, each.name))
            for part in parts
            for each in fields(part)
            if getattr(part, each.name) != each.default
        ]
        return " ".join(words)


def asked_requests(
    first: int, count: int, folder: Path, time_limit_s: float, only: Sequence[str] = ()
) -> Iterator[Asked]:
    """Yield requests by number, families and objectives in turn; equal numbers, equal requests."""
    names = [name for name in FAMILIES if not only or name in only]
    for number in range(first, first + count):
        name = names[number % len(names)]
        objective = ROUNDS[number // len(names) % len(ROUNDS)]
        yield _drawn(number, name, objective, folder, time_limit_s)


def _drawn(number: int, name: str, objective: str, folder: Path, time_limit_s: float) -> Asked:
    family, chance = FAMILIES[name], random.Random(f"{number} {name}")
    if name == "pools" and objective == "goodput":
        objective = "throughput"  # spare nodes are of equal ones
    length = chance.choice(family.lengths)
    model = cut_model(chance.choice(family.models), chance.choice(family.layers), folder)
    target = TargetOptions(
        model=str(model),
        gpus=None if name == "pools" else chance.choice(family.gpus),
        gpu=chance.choice(family.gpu),
        gpus_per_node=2 if objective == "goodput" else None,
        global_batch_size=chance.choice(family.batches),
        seq_length=min(length, load_model(str(model)).seq_length),
        stack=chance.choice(family.stacks or (*stack_names(), "parplan", "parplan")),
    )
    limit_gib = chance.choice((None, *LIMITS_GIB))
    flags = SearchFlags(
        objective=objective,
        time_limit=time_limit_s,
        memory_limit=limit_gib and f"{limit_gib}GiB",
    )
    if objective in ("memory", "peak"):
        flags = replace(flags, max_slowdown=chance.choice(SLOWDOWNS))
    return Asked(
        family=name,
        target=replace(target, **chance.choice(family.targets)),
        pins=PinOptions(**chance.choice(family.pins)),
        flags=flags,
        failing=FailureOptions(mtbf="20000h") if objective == "goodput" else FailureOptions(),
    )


def cut_model(name: str, layers: int, folder: Path) -> Path:
    """Return a file of the model with fewer blocks."""
    entry = load_model(name)
    path = folder / f"{entry.spec.name}-{layers}.yaml"
    if not path.exists():
        shipped = Path(__file__).parents[3] / "configs" / "models" / f"{name}.yaml"
        body = yaml.safe_load(shipped.read_text(encoding="utf-8"))
        body["model"]["num_layers"] = min(layers, body["model"]["num_layers"])
        path.write_text(yaml.safe_dump(body), encoding="utf-8")
    return path
