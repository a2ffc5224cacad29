"""The launchers that plans are exported to, by name."""

from __future__ import annotations

from collections.abc import Mapping

from parplan.planner.export.deepspeed.deepspeed import DEEPSPEED
from parplan.planner.export.deepspeed.gpt_neox import GPT_NEOX
from parplan.planner.export.fields.launcher import Target
from parplan.planner.export.fsdp2.fsdp2 import FSDP2
from parplan.planner.export.galvatron.galvatron import GALVATRON
from parplan.planner.export.hugging_face.accelerate import ACCELERATE
from parplan.planner.export.hugging_face.hf_trainer import HUGGINGFACE
from parplan.planner.export.megatron.megatron import MEGATRON
from parplan.planner.export.megatron.swift_megatron import SWIFT_MEGATRON
from parplan.planner.export.megatron_bridge.bridge import MEGATRON_BRIDGE
from parplan.planner.export.torchtitan.torchtitan import TORCHTITAN
from parplan.profiles.errors import unknown_name_error

TARGETS: Mapping[str, Target] = {
    target.name: target
    for target in (
        MEGATRON,
        MEGATRON_BRIDGE,
        TORCHTITAN,
        DEEPSPEED,
        FSDP2,
        HUGGINGFACE,
        GALVATRON,
        ACCELERATE,
    )
}

# programs whose files are read, and to which no plan is exported
READERS: Mapping[str, Target] = {
    **TARGETS,
    **{target.name: target for target in (SWIFT_MEGATRON, GPT_NEOX)},
}


def target_of(stack: str) -> Target | None:
    """Returns the first launcher that a stack describes, None where there is none."""
    return next((target for target in TARGETS.values() if stack in target.stacks), None)


def target_named(name: str) -> Target:
    """Returns a launcher. Raises ConfigError for an unknown name."""
    if name not in TARGETS:
        raise unknown_name_error("target", name, TARGETS)
    return TARGETS[name]
