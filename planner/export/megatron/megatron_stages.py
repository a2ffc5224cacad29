"""Settings that Megatron-LM derives of its arguments: dp, virtual stages, blocks of every stage.

The rules are those of `validate_args` (megatron/training/arguments.py of NVIDIA/Megatron-LM at
d98e8a64dd) and of `get_num_layers_to_build` (megatron/core/transformer/transformer_block.py).
"""

from __future__ import annotations

from dataclasses import replace

from parplan.costmodels.schedules.schedule import Schedule
from parplan.planner.export.fields.arguments import Facts
from parplan.planner.export.fields.settings import Settings
from parplan.planner.export.fields.switches import require_legal
from parplan.planner.export.megatron.megatron_arguments import DEFAULTS
from parplan.planner.export.megatron.megatron_switches import EXCHANGE_OVERLAP, FLEX
from parplan.profiles.errors import ConfigError
from parplan.profiles.stack import ContextForm

_DERIVED = (
    "layers_per_virtual_stage",
    "first_less",
    "last_less",
    "first",
    "last",
    "instances",
    "method",
    "offloads",
)


def finished(facts: Facts, num_gpus: int) -> Settings:
    """Returns the settings that facts say, with what `validate_args` derives of them.

    facts   with `num_layers` of the model
    Raises ConfigError where the arguments contradict one another.
    """
    facts = dict(facts)
    for fact, name in (("seq_length", "--seq-length"), ("micro_batch_size", "--micro-batch-size")):
        if fact not in facts:
            raise ConfigError(f"{name} is not among the arguments", hint=f"add {name}")
    plain = {name: facts.pop(name) for name in _DERIVED if name in facts}
    settings = replace(DEFAULTS, **facts)
    inside = settings.pp * settings.cp * settings.tp
    if num_gpus % inside:
        raise ConfigError(
            f"pp {settings.pp} x cp {settings.cp} x tp {settings.tp} does not divide the "
            f"{num_gpus} GPUs",
            hint="change a degree or --gpus",
        )
    virtual = _virtual_stages(settings, plain)
    form = settings.context_form or ContextForm.RING
    settings = replace(
        settings,
        dp=num_gpus // inside,
        etp=(settings.etp or settings.tp) if settings.has_experts else 1,
        context_form=form if settings.cp > 1 else None,
        virtual_stages=virtual,
        # arguments.py: one micro-batch on each data-parallel rank
        global_batch_size=facts.get(
            "global_batch_size", settings.micro_batch_size * (num_gpus // inside)
        ),
        schedule=Schedule.INTERLEAVED if virtual > 1 else Schedule.ONE_F_ONE_B,
        sequence_parallel=settings.sequence_parallel and settings.tp > 1,
    )
    if not settings.sequence_parallel:  # there is no such collective to hide
        settings = replace(settings, tp_overlap=False)
    require_legal(settings, (FLEX, EXCHANGE_OVERLAP))
    if "instances" in plain:
        settings = replace(settings, zero_ranks=settings.replicas // plain["instances"])
    return replace(settings, blocks=settings.blocks or _blocks(settings, plain))


def _virtual_stages(settings: Settings, plain: Facts) -> int:
    if settings.blocks:
        return max(1, len(settings.blocks) // settings.pp)
    per_stage: int | None = plain.get("layers_per_virtual_stage")
    if per_stage is None:
        return settings.virtual_stages
    counted: int = settings.num_layers + plain.get("first_less", 0) + plain.get("last_less", 0)
    return max(1, counted // settings.pp // per_stage)


def _blocks(settings: Settings, plain: Facts) -> tuple[int, ...]:
    """Returns the blocks of each virtual stage. Raises ConfigError where they are not whole."""
    stages, layers = settings.num_stages, settings.num_layers
    first, last = plain.get("first"), plain.get("last")
    if first is not None or last is not None:
        return _with_stated_ends(settings, first, last)
    less = (plain.get("first_less", 0), plain.get("last_less", 0))
    if (layers + sum(less)) % stages:
        raise ConfigError(
            f"{layers} blocks do not divide into {stages} stages",
            hint="say the stages with --pipeline-model-parallel-layout",
        )
    blocks = [(layers + sum(less)) // stages] * stages
    blocks[0] -= less[0]
    blocks[-1] -= less[1]
    return tuple(blocks)


def _with_stated_ends(settings: Settings, first: int | None, last: int | None) -> tuple[int, ...]:
    """Returns the blocks of stages where the first or the last rank has its own number.

    The ranks between them divide the rest, and every rank its blocks over its virtual stages
    (megatron/core/transformer/transformer_block.py, get_num_layers_to_build).
    """
    ends = [count for count in (first, last) if count is not None]
    rest, ranks = settings.num_layers - sum(ends), settings.pp - len(ends)
    if ranks < 1 or rest % ranks:
        raise ConfigError(
            f"{rest} blocks do not divide over {ranks} pipeline ranks",
            hint="change --decoder-first-pipeline-num-layers or --decoder-last-pipeline-num-layers",
        )
    by_rank = [rest // ranks] * settings.pp
    by_rank[0] = first if first is not None else by_rank[0]
    by_rank[-1] = last if last is not None else by_rank[-1]
    virtual = settings.virtual_stages
    if any(count % virtual for count in by_rank):
        raise ConfigError(
            f"ranks of {by_rank} blocks do not divide over {virtual} virtual stages",
            hint="say the stages with --pipeline-model-parallel-layout",
        )
    return tuple(count // virtual for _ in range(virtual) for count in by_rank)
