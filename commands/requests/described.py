"""What the user typed -> what the planner takes: specs, pins and options, with a word on every
default that filled a gap.

`Options` are the values of the command line by option name, None where the user said nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, Protocol

from parplan.commands.requests.modules import load_module, narrowed
from parplan.costmodels.communication.mesh import Mesh, illegal_expert_parallel
from parplan.costmodels.host.offload import Offload
from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.price_cache import PriceCache
from parplan.costmodels.schedules.actions import placement_of
from parplan.costmodels.schedules.schedule import Schedule
from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.candidates.enumeration import illegal_tensor_parallel
from parplan.planner.deadline import deadline_after
from parplan.planner.forbid import parse_bans
from parplan.planner.plan.error_band import margin_text, memory_margin
from parplan.planner.plan.plan import Plan
from parplan.planner.plan.prediction import Objective
from parplan.planner.request import SEARCHED_OFFLOAD, Constraints, SearchOptions, SolverName
from parplan.profiles.documents.files import require_writable
from parplan.profiles.documents.reader import Hints, read_text
from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.applied_profile import (
    applied,
    precision_of,
    profile_cluster,
    stack_of,
)
from parplan.profiles.machines.hardware import Cluster, Device
from parplan.profiles.machines.machine_catalog import load_cluster, load_stack, with_gpus
from parplan.profiles.machines.shipped_profiles import machine_for
from parplan.profiles.machines.user_profile import UserProfile, read_profile
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.module_source import ModuleSource
from parplan.profiles.models.spec import (
    FP8,
    ModelEntry,
    ModelSpec,
    Positions,
    Precision,
    TrainingSpec,
)
from parplan.profiles.stack import AttentionKernel
from parplan.profiles.units import parse_size

Options = Mapping[str, Any]
DEFAULT_GPU = "a100-80gb"
DEFAULT_STACK = "megatron-core"
NO_OFFLOAD = "none"
_SLOWED = (Objective.MEMORY, Objective.PEAK)
_OF_THE_PROFILE = " (the profile's)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The options that say what is trained on what, as given; None where the user left it open."""

    model: str | None = None
    gpus: int | None = None
    gpu: str | None = None
    cluster: str | None = None
    gpus_per_node: int | None = None
    host_memory: str | None = None
    global_batch_size: int | None = None
    seq_length: int | None = None
    precision: str | None = None
    gradient_precision: str | None = None
    fp8: bool = False
    stack: str | None = None
    attention: str | None = None
    profile: str | None = None
    force_profile: bool = False
    module: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """The model, the cluster and the training to plan for, and the defaults that were taken, one
    phrase each.
    """

    model: ModelSpec
    cluster: Cluster
    training: TrainingSpec
    assumed: tuple[str, ...]
    module: ModuleSource | None = None


class Assuming(Protocol):
    """A question, of a described model or of a traced module."""

    @property
    def training(self) -> TrainingSpec: ...

    @property
    def assumed(self) -> tuple[str, ...]: ...


def question(asked: Asked) -> Question:
    """Resolve what was asked. Raises ConfigError: something missing, unknown, or a precision the
    device lacks.
    """
    if asked.model is None:
        raise ConfigError(
            "--model is missing",
            hint="for example: plan --model gpt-20b --gpus 64 (plan models lists the names)",
        )
    entry, module = load_model(asked.model), load_module(asked.module, asked.model)
    if module:
        entry = replace(
            entry, spec=replace(entry.spec, vocab_multiple=1)
        )  # its tables are as large as it makes them
    return replace(question_about(entry, asked), module=module)


def question_about(entry: ModelEntry, asked: Asked, *, whose: str = "the model's") -> Question:
    """The question for a model that is at hand; `whose` batch and sequence are taken where none
    were asked for. Raises ConfigError.
    """
    own = None if asked.profile is None else read_profile(Path(asked.profile))
    cluster, assumed_cluster = asked_cluster(asked, own)
    training, assumed_training = asked_training(
        asked, entry.global_batch_size, entry.seq_length, own, cluster.device, whose=whose
    )
    cluster.device.peak(training.precision)
    if training.fp8_matmuls and FP8 not in cluster.device.peak_flops_per_s:
        raise ConfigError(
            f"{cluster.device.name} has no fp8 arithmetic",
            hint="leave out --fp8, or plan for a device of Hopper or later",
        )
    _check_positions(entry.spec, training)
    if own and asked.profile is not None:
        cluster, training = applied(
            own, cluster, training, asked.profile, force=asked.force_profile
        )
    return Question(
        model=entry.spec,
        cluster=cluster,
        training=training,
        assumed=(*assumed_cluster, *assumed_training),
    )


def _check_positions(model: ModelSpec, training: TrainingSpec) -> None:
    if model.positions is Positions.LEARNED and training.seq_length > model.max_seq_length:
        raise ConfigError(
            f"--seq-length is {training.seq_length}, {model.name} learns {model.max_seq_length} positions",
            hint=f"use at most {model.max_seq_length}, or a model file with a larger max_seq_length",
        )


def asked_cluster(asked: Asked, own: UserProfile | None) -> tuple[Cluster, tuple[str, ...]]:
    """The machine to plan for, and the defaults that were taken. Raises ConfigError."""
    cluster, assumed = _cluster(asked, own)
    if asked.host_memory is None:
        return cluster, assumed
    return replace(
        cluster, host_memory_bytes=parse_size("--host-memory", asked.host_memory)
    ), assumed


def _cluster(asked: Asked, own: UserProfile | None) -> tuple[Cluster, tuple[str, ...]]:
    if asked.cluster is not None:
        return _cluster_of_file(asked, asked.cluster), ()
    if asked.gpus is None:
        raise ConfigError(
            "--gpus is missing",
            hint="say how many: --gpus 64, or describe the machine with --cluster FILE",
        )
    whole, assumed = _device(asked, own)
    cluster = with_gpus(whole, asked.gpus, asked.gpus_per_node)
    return cluster, assumed if asked.gpus_per_node else (
        *assumed,
        f"--gpus-per-node {cluster.gpus_per_node}",
    )


def _device(asked: Asked, own: UserProfile | None) -> tuple[Cluster, tuple[str, ...]]:
    """The kind of machine: the one asked for, else that of the profile, else the default."""
    measured_on = None if asked.gpu or own is None else profile_cluster(own, str(asked.profile))
    if measured_on is not None:
        return measured_on, (f"--gpu {measured_on.device.name}{_OF_THE_PROFILE}",)
    return load_cluster(asked.gpu or DEFAULT_GPU, what="GPU"), () if asked.gpu else (
        f"--gpu {DEFAULT_GPU}",
    )


def _cluster_of_file(asked: Asked, name: str) -> Cluster:
    if asked.gpu is not None:
        raise ConfigError("--gpu and --cluster both name the device", hint="leave out --gpu")
    cluster = load_cluster(name)
    if asked.gpus is None and asked.gpus_per_node is None:
        return cluster
    return with_gpus(
        cluster, cluster.num_gpus if asked.gpus is None else asked.gpus, asked.gpus_per_node
    )


def asked_training(
    asked: Asked,
    global_batch_size: int,
    seq_length: int,
    own: UserProfile | None,
    device: Device,
    *,
    whose: str = "the model's",
    default_stack: str = DEFAULT_STACK,
) -> tuple[TrainingSpec, tuple[str, ...]]:
    """One step, of the batch and sequence that are `whose` where none were asked for, and the
    defaults. Raises ConfigError.

    The precision is bf16 by default, fp16 on a device that has no bf16.
    """
    measured_at, run_by = (
        (precision_of(own, str(asked.profile)), stack_of(own)) if own else (None, None)
    )
    stack = load_stack(asked.stack or run_by or default_stack)
    attention = stack.attention_on(device.compute_capability)
    whose_attention = (
        "the stack's"
        if attention is stack.attention
        else "the stack has no fused kernel for the device"
    )
    has_bf16 = (
        Precision.BF16 in device.peak_flops_per_s or Precision.FP16 not in device.peak_flops_per_s
    )
    usual, why = (Precision.BF16, "") if has_bf16 else (Precision.FP16, " (the device has no bf16)")
    training = TrainingSpec(
        global_batch_size=global_batch_size
        if asked.global_batch_size is None
        else asked.global_batch_size,
        seq_length=seq_length if asked.seq_length is None else asked.seq_length,
        precision=Precision(asked.precision or measured_at or usual),
        gradient_precision=Precision(asked.gradient_precision or Precision.FP32),
        attention=AttentionKernel(asked.attention or attention),
        overlap_grad_reduce=stack.overlap_grad_reduce,
        fp8_matmuls=asked.fp8,
        stack=stack,
    )
    taken = {
        "global_batch_size": f"{training.global_batch_size} ({whose})",
        "seq_length": f"{training.seq_length} ({whose})",
        "precision": f"{training.precision}{_OF_THE_PROFILE if measured_at else why}",
        "gradient_precision": training.gradient_precision,
        "stack": f"{stack.name}{_OF_THE_PROFILE if run_by else ''}",
        "attention": f"{training.attention} ({whose_attention})",
    }
    return training, tuple(
        f"--{name.replace('_', '-')} {value}"
        for name, value in taken.items()
        if getattr(asked, name) is None
    )


def question_of(options: Options) -> Question:
    """The question that the options ask. Raises ConfigError, as `question` does."""
    return question(Asked(**{field.name: options[field.name] for field in fields(Asked)}))


def constraints(options: Options) -> Constraints:
    """The pinned and the forbidden choices."""
    sequence_parallel = options["sequence_parallel"]
    alike = (
        "pp",
        "dp",
        "tp",
        "ep",
        "micro_batch_size",
        "virtual_stages",
        "zero",
        "zero_ranks",
        "tp_overlap",
        "tp_across_nodes",
        "megatron_sharding",
    )
    asked = Constraints(
        **{name: options[name] for name in alike},
        schedule=options["schedule"] and tuple(map(Schedule, options["schedule"])),
        recompute=options["recompute"] and tuple(map(Recompute, options["recompute"])),
        sequence_parallel=None if sequence_parallel is None else (sequence_parallel,),
        forbid=parse_bans(options["forbid"]),
        offload=_offload(options),
    )
    return narrowed(asked, load_module(options["module"], options["model"]))


def _offload(options: Options) -> tuple[Offload, ...] | None:
    """What the host may keep: what is named, else all where the size of its memory is given, else
    only what nothing fits without.
    """
    named = options["offload"]
    if named is None:
        return None if options["host_memory"] is None else SEARCHED_OFFLOAD
    if NO_OFFLOAD in named and len(named) > 1:
        raise ConfigError(
            f"--offload {','.join(named)}: none and others exclude each other",
            hint=f"leave out {NO_OFFLOAD}",
        )
    return tuple(Offload(name) for name in named if name != NO_OFFLOAD)


def offload_assumed(pins: Constraints, plan: Plan) -> tuple[str, ...]:
    """That a plan uses the host's memory though nobody asked for it."""
    if pins.offload is not None or not (
        plan.chunks
        or any(found.keep_on_host or found.offload for found in plan.layer_plans.values())
    ):
        return ()
    return (f"--offload {','.join(SEARCHED_OFFLOAD)} (nothing fits the devices alone)",)


def search_options(options: Options) -> SearchOptions:
    """How to search; the time limit runs from here on.

    Raises ConfigError for numbers out of range, a size without a unit, and a slowdown that the
    objective does not use.
    """
    if options["max_slowdown"] is not None and options["objective"] not in _SLOWED:
        raise ConfigError(
            f"--max-slowdown is for --objective {' or '.join(_SLOWED)}, the objective is {options['objective']}",
            hint="leave it out",
        )
    given = {
        name: options[name]
        for name in ("max_slowdown", "memory_margin")
        if options[name] is not None
    }
    limit = options["memory_limit"]
    return SearchOptions(
        **given,
        solver=SolverName(options["solver"]),
        deadline=deadline_after(options["time_limit"]),
        memory_limit_bytes=None if limit is None else parse_size("--memory-limit", limit),
    )


def all_assumed(question: Assuming, options: Options, how: SearchOptions) -> tuple[str, ...]:
    """Every default that a search took: those of the question, and the shares that bound it."""
    assumed = question.assumed
    if options["memory_margin"] is None and options["memory_limit"] is None:
        stack = question.training.stack
        assumed += (f"--memory-margin {memory_margin(stack, how):g} ({margin_text(stack)})",)
    if options["objective"] in _SLOWED and options["max_slowdown"] is None:
        assumed += (f"--max-slowdown {how.max_slowdown}",)
    return assumed


def action_rows(path: Path) -> tuple[str, ...]:
    """The lines of a schedule file, torch's compute-only CSV. Raises ConfigError."""
    lines = read_text(
        path, hints=Hints("choose another --schedule-file", "choose another --schedule-file")
    ).splitlines()
    # torch writes an empty entry where a rank waits
    return tuple(
        ",".join(entry.strip() for entry in line.split(",") if entry.strip())
        for line in lines
        if line.strip()
    )


def _custom(path: Path, options: Options) -> tuple[Schedule, int, tuple[str, ...]]:
    """A schedule from a file: its virtual stages per rank, and what each rank runs. Raises
    ConfigError.
    """
    if options["schedule"] is not None or options["virtual_stages"] > 1:
        raise ConfigError(
            "--schedule-file says the schedule and its virtual stages",
            hint="drop --schedule and --virtual-stages",
        )
    rows = action_rows(path)
    if options["pp"] < 2 or len(rows) != options["pp"]:
        raise ConfigError(
            f"{path} is of {len(rows)} pipeline ranks, --pp is {options['pp']}",
            hint=f"--pp {max(2, len(rows))}",
        )
    return Schedule.CUSTOM, len(placement_of(rows)[0]), rows


def layout(question: Question, options: Options) -> ParallelLayout:
    """The layout of a layout made by hand; what does not divide is left to the planner's check,
    which says why.
    """
    pp, tp, micro_batch_size = options["pp"], options["tp"], options["micro_batch_size"]
    dp = options["dp"] or max(1, question.cluster.num_gpus // (pp * tp))
    virtual_stages = options["virtual_stages"]
    schedule = Schedule(
        options["schedule"]
        or (Schedule.INTERLEAVED if virtual_stages > 1 else Schedule.ONE_F_ONE_B)
    )
    actions: tuple[str, ...] = ()
    if schedule is Schedule.ZBV and virtual_stages == 1:  # it has no other number
        virtual_stages = 2
    if options["schedule_file"]:
        schedule, virtual_stages, actions = _custom(options["schedule_file"], options)
    return ParallelLayout(
        mesh=Mesh(pp=pp, dp=dp, tp=tp, ep=options["ep"]),
        schedule=schedule,
        virtual_stages=virtual_stages,
        micro_batch_size=micro_batch_size,
        num_micro_batches=max(1, question.training.global_batch_size // (micro_batch_size * dp)),
        sequence_parallel=options["sequence_parallel"],
        actions=actions,
        tp_overlap=options["tp_overlap"],
    )


def layout_prices(question: Question, options: Options) -> tuple[ParallelLayout, PriceCache]:
    """One pipeline stage of tensor parallelism by hand, and the prices for it. Raises ConfigError:
    the degree is not legal.
    """
    tp, gpus = options["tp"], question.cluster.num_gpus
    reason = illegal_tensor_parallel(tp, question.model, question.cluster, across_nodes=True)
    if reason or gpus % tp:
        raise ConfigError(
            reason or f"tp {tp} does not divide the {gpus} GPUs", hint="choose another --tp"
        )
    made = ParallelLayout(
        mesh=Mesh(pp=1, dp=gpus // tp, tp=tp),
        schedule=Schedule.ONE_F_ONE_B,
        virtual_stages=1,
        micro_batch_size=options["micro_batch_size"],
        num_micro_batches=1,
        sequence_parallel=False,
    )
    return made, PriceCache(question.model, question.training, machine_for(question.cluster))


def require_possible(question: Question, pins: Constraints) -> None:
    """Raises ConfigError for pins that exclude every mesh, with the one that does it: clearer than
    a count of candidates.
    """
    num_gpus, batch = question.cluster.num_gpus, question.training.global_batch_size
    _require_tensor_parallel(question, pins)
    _require_expert_parallel(question, pins)
    _require_divisor({"tp": pins.tp}, num_gpus, "GPUs")
    _require_divisor({"pp": pins.pp}, num_gpus, "GPUs")
    _require_divisor({"dp": pins.dp}, num_gpus, "GPUs")
    _require_divisor(
        {"dp": pins.dp, "micro-batch-size": pins.micro_batch_size},
        batch,
        "sequences of the global batch",
    )
    if (
        pins.pp
        and pins.dp
        and pins.tp
        and num_gpus not in map(prod, product(pins.pp, pins.dp, pins.tp))
    ):
        raise ConfigError(
            f"no --pp x --dp x --tp that is pinned makes {num_gpus} GPUs",
            hint="leave --dp to the search",
        )


def _require_tensor_parallel(question: Question, pins: Constraints) -> None:
    reasons = [
        illegal_tensor_parallel(
            tp, question.model, question.cluster, across_nodes=pins.tp_across_nodes
        )
        for tp in pins.tp or ()
    ]
    if reasons and all(reasons):
        raise ConfigError(
            f"--tp is pinned: {reasons[0]}", hint="pin another --tp, or leave it to the search"
        )


def _require_expert_parallel(question: Question, pins: Constraints) -> None:
    reasons = [
        illegal_expert_parallel(Mesh(pp=1, dp=ep, tp=1, ep=ep), question.model)
        for ep in pins.ep or ()
    ]
    if reasons and all(reasons):
        raise ConfigError(
            f"--ep is pinned: {reasons[0]}", hint="pin another --ep, or leave it to the search"
        )
    _require_divisor({"ep": pins.ep}, question.cluster.num_gpus, "GPUs")


def _require_divisor(pins: Mapping[str, tuple[int, ...] | None], whole: int, what: str) -> None:
    """Raises ConfigError when no product of one value of each pin divides `whole`; an open pin
    counts as 1.
    """
    if all(
        whole % prod(values) for values in product(*(allowed or (1,) for allowed in pins.values()))
    ):
        named = " x ".join(
            f"--{name} {_listed(allowed)}" for name, allowed in pins.items() if allowed
        )
        raise ConfigError(
            f"{named} does not divide the {whole} {what}", hint=f"pin a divisor of {whole}"
        )


def _listed(values: tuple[int, ...]) -> str:
    return ",".join(map(str, values))


def require_no_front(options: Options) -> None:
    """Raises ConfigError for an option that only a front has."""
    for name in ("plot", "points"):
        if options[name] is not None:
            raise ConfigError(
                f"--{name} is for --objective pareto, the objective is {options['objective']}",
                hint="add --objective pareto",
            )


def require_front(options: Options) -> None:
    """Raises ConfigError for what a front cannot do or cannot write: found before its searches, not
    after them.
    """
    from parplan.planner.search.pareto import plan_paths
    from parplan.report.plots.scatter_plot import require_plot

    output: Path = options["output"]
    if output == Path("-"):
        raise ConfigError(
            "--output - is one plan, a front is several",
            hint="leave out --output for plan-01.yaml, ..., or use --json",
        )
    if options["max_slowdown"] is not None:
        raise ConfigError(
            "--max-slowdown is for --objective memory or peak, a front goes through many",
            hint="leave it out",
        )
    for path in (output, *plan_paths(output, 1)):  # a point's name is longer
        require_writable(path, hint="choose another file with --output")
    if options["plot"] is not None:
        require_plot(options["plot"])
