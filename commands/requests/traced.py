"""What the user typed -> what a plan of a traced module takes (planner/traced/), with a word on
every default that filled a gap.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from parplan.commands.requests.described import Asked, Options, asked_cluster, asked_training
from parplan.planner.plan.traced_plan import TracedPlan
from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.applied_profile import applied
from parplan.profiles.machines.hardware import Cluster
from parplan.profiles.machines.user_profile import read_profile
from parplan.profiles.models.huggingface import described
from parplan.profiles.models.model_catalog import find_config
from parplan.profiles.models.module_source import ModuleSource
from parplan.profiles.models.spec import TrainingSpec

GLOBAL_BATCH_SIZE = 512  # sequences, or samples: as a Hugging Face model that is described gets
LONGEST_SEQ_LENGTH = 8192
EXECUTORS_STACK = "parplan"  # no other runs a module as it was traced
SEQ_LENGTH = 1024  # of a module that says no number of positions
_POSITIONS = ("max_position_embeddings", "n_positions")
_WHOLE, _FASTEST = (
    "a traced module is not divided inside a stage",
    "a traced module is planned for throughput",
)
_ON_DEVICE = "a traced module stays on its device"
_REFUSED = {  # what a traced module cannot have, and why
    "module": "the traced module is what runs",
    "fp8": "products of a traced module run in --precision",
    "points": _FASTEST,
    "max_slowdown": _FASTEST,
    "plot": _FASTEST,
    "ep": _WHOLE,
    "sequence_parallel": _WHOLE,
    "tp_overlap": _WHOLE,
    "tp_across_nodes": _WHOLE,
    "megatron_sharding": _WHOLE,
    "offload": _ON_DEVICE,
    "host_memory": _ON_DEVICE,
    "zero_ranks": "all data parallel ranks hold one copy of a traced module's states",
    "explain": "its candidates are not listed",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleQuestion:
    """The module, the cluster and the training to plan for, and the defaults that were taken, one
    phrase each.
    """

    source: ModuleSource
    cluster: Cluster
    training: TrainingSpec
    assumed: tuple[str, ...]


def traced_source(model: str | None, *, trace: bool) -> ModuleSource | None:
    """The module that --model names where that has to be traced: a function, or a config.json that
    nothing describes; else None.

    trace: also one that is described. Raises ConfigError: a model that is no module, and files that
    cannot be read.
    """
    if model is not None and re.fullmatch(r"[\w.]+:\w+", model) and not Path(model).exists():
        return ModuleSource(factory=model)
    config = find_config(model) if model is not None else None
    if config is not None and (trace or not described(config)):
        return ModuleSource(huggingface=dict(config))
    if trace:
        raise ConfigError(
            f"--trace needs a module, --model is {model}",
            hint="give a config.json or package.module:function",
        )
    return None


def module_question(options: Options, source: ModuleSource) -> ModuleQuestion:
    """Resolve what was asked. Raises ConfigError, as parplan.commands.requests.described.question
    does, and for what no traced module can have.
    """
    _require_plain(options)
    asked = Asked(**{field.name: options[field.name] for field in fields(Asked)})
    own = None if asked.profile is None else read_profile(Path(asked.profile))
    cluster, assumed_cluster = asked_cluster(asked, own)
    defaults = GLOBAL_BATCH_SIZE, _seq_length(source.huggingface or {})
    training, assumed = asked_training(
        asked, *defaults, own, cluster.device, whose="a default", default_stack=EXECUTORS_STACK
    )
    cluster.device.peak(training.precision)
    if own and asked.profile is not None:
        cluster, training = applied(
            own, cluster, training, asked.profile, force=asked.force_profile
        )
    return ModuleQuestion(
        source=source, cluster=cluster, training=training, assumed=(*assumed_cluster, *assumed)
    )


def assumed_of(plan: TracedPlan, question: ModuleQuestion) -> ModuleQuestion:
    """The question with the defaults that matter to the plan that was found: samples have no
    length.
    """
    if plan.training.seq_length == question.training.seq_length:
        return question
    return replace(
        question,
        assumed=tuple(text for text in question.assumed if not text.startswith("--seq-length ")),
    )


def _require_plain(options: Options) -> None:
    if options["objective"] != "throughput":
        raise ConfigError(f"--objective {options['objective']}: {_FASTEST}", hint="leave it out")
    if options["tp"] and max(options["tp"]) > 1:
        raise ConfigError(
            f"--tp {max(options['tp'])}: {_WHOLE}",
            hint="use --tp 1, or a model that is described (plan models)",
        )
    for name, why in _REFUSED.items():
        if options.get(name) not in (None, False, ()):
            raise ConfigError(f"--{name.replace('_', '-')}: {why}", hint="leave it out")


def _seq_length(config: Mapping[str, Any]) -> int:
    """The positions of a Hugging Face config, as far as they are usual."""
    found = next(
        (config[name] for name in _POSITIONS if isinstance(config.get(name), int)), SEQ_LENGTH
    )
    return min(found, LONGEST_SEQ_LENGTH)
