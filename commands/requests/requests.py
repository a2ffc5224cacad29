"""Turns the user's options into one request, with a phrase for every default."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from parplan.commands.options.pin_options import PinOptions
from parplan.commands.options.result_options import STDOUT
from parplan.commands.options.search_options import SearchFlags
from parplan.commands.options.target_options import TargetOptions
from parplan.commands.requests.external import load_module, narrowed
from parplan.commands.requests.images import images_phrase, require_room, with_images
from parplan.commands.requests.machine import TrainingDefaults, cluster_and_training
from parplan.costmodels.communication.mesh import MeshOrder
from parplan.costmodels.host.offload import Offload
from parplan.costmodels.host.state_location import Access, ChunkCommunication
from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.schedules.schedule import Schedule
from parplan.planner.deadline import deadline_after
from parplan.planner.forbid import parse_bans
from parplan.planner.objective import Objective, Prefer
from parplan.planner.plan.error_band import margin_text, memory_margin
from parplan.planner.plan.plan import Plan
from parplan.planner.request import (
    DEFAULT_MAX_SLOWDOWN,
    DEFAULT_MEMORY_CAP_BYTES,
    SEARCHED_OFFLOAD,
    Constraints,
    ModelT,
    PlanRequest,
    Request,
    SearchOptions,
    SolverName,
    host_contents,
    searched_offload,
    throughput_error,
)
from parplan.planner.stage_recompute import parse_stage_recompute
from parplan.profiles.documents.files import require_writable
from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.hardware import Device
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.spec import (
    ModelEntry,
    ModelSpec,
    Optimizer,
    Positions,
    TrainingSpec,
    text_alone,
)
from parplan.profiles.stack import ContextForm
from parplan.profiles.units import parse_size

FRONT = "pareto"  # this objective is a walk over the others
NO_OFFLOAD = "none"
_SLOWED = (Objective.MEMORY, Objective.PEAK)  # objectives that use --max-slowdown


def request_of(
    target: TargetOptions,
    pins: PinOptions | None = None,
    flags: SearchFlags | None = None,
    *,
    pools: bool = False,
) -> Request:
    """Returns the request for a described model.

    pools: the machine may have unequal pools
    Raises ConfigError for an option that is missing, unknown or out of range, and for a precision
    that the device lacks.
    """
    if target.model is None:
        raise ConfigError(
            "--model is missing",
            hint="for example: plan --model gpt-20b --gpus 64 (plan models lists the names)",
        )
    entry, module = load_model(target.model), load_module(target.module, target.model)
    if module:  # The tables of an external module are as large as it makes them.
        entry = replace(entry, spec=replace(text_alone(entry.spec), vocab_multiple=1))
    request = replace(request_about(entry, target, pools=pools), module=module)
    if pins is not None:
        searched = searched_offload(request.model, request.training)
        request = replace(request, constraints=constraints_of(pins, target, searched))
    return request if flags is None else with_flags(request, flags)


def request_about(
    entry: ModelEntry,
    target: TargetOptions,
    *,
    whose: str = "the model's",
    pools: bool = False,
) -> Request:
    """Returns the request for a loaded model.

    whose: the owner of the default batch and sequence length, for the phrases
    pools: the machine may have unequal pools
    Raises ConfigError.
    """
    entry = replace(
        entry, spec=with_images(entry.spec, target.images_per_sequence, target.image_tokens)
    )
    defaults = TrainingDefaults(
        global_batch_size=entry.global_batch_size,
        seq_length=entry.seq_length,
        whose=whose,
        most_stages=entry.spec.num_blocks,
    )
    cluster, training, assumed = cluster_and_training(
        target, defaults, partial(_require_trainable, entry.spec), pools=pools
    )
    images = () if target.images_per_sequence is not None else images_phrase(entry.spec)
    return PlanRequest(
        model=entry.spec, cluster=cluster, training=training, assumed=(*assumed, *images)
    )


def _require_trainable(model: ModelSpec, device: Device, training: TrainingSpec) -> None:
    """Raises ConfigError for too long sequences."""
    require_room(model, training.seq_length)
    if model.positions is Positions.LEARNED and training.seq_length > model.max_seq_length:
        raise ConfigError(
            f"--seq-length is {training.seq_length}, {model.name} learns {model.max_seq_length} "
            f"positions",
            hint=f"use at most {model.max_seq_length}, or a model file with a larger "
            f"max_seq_length",
        )


def constraints_of(
    pins: PinOptions, target: TargetOptions, searched: tuple[Offload, ...] = SEARCHED_OFFLOAD
) -> Constraints:
    """Returns the pinned and the forbidden choices.

    searched    what the host may hold where its memory is named alone
    Raises ConfigError.
    """
    constraints = Constraints(
        pp=pins.pp,
        dp=pins.dp,
        tp=pins.tp,
        cp=pins.cp,
        context_form=(
            None if pins.context_form is None else tuple(map(ContextForm, pins.context_form))
        ),
        ep=pins.ep,
        etp=pins.etp,
        tp_rows=pins.tp_rows,
        micro_batch_size=pins.micro_batch_size,
        virtual_stages=pins.virtual_stages,
        zero=pins.zero,
        zero_ranks=pins.zero_ranks,
        zero_by_operator=pins.zero_by_operator,
        tp_overlap=pins.tp_overlap,
        tp_across_nodes=pins.tp_across_nodes,
        megatron_sharding=pins.megatron_sharding,
        weights_over_data=None if pins.weights_over_data is None else (pins.weights_over_data,),
        schedule=None if pins.schedule is None else tuple(map(Schedule, pins.schedule)),
        mesh_order=None if pins.mesh_order is None else tuple(map(MeshOrder, pins.mesh_order)),
        recompute=None if pins.recompute is None else tuple(map(Recompute, pins.recompute)),
        recompute_first_stage=(
            None
            if pins.recompute_first_stage is None
            else parse_stage_recompute(pins.recompute_first_stage)
        ),
        sequence_parallel=None if pins.sequence_parallel is None else (pins.sequence_parallel,),
        access=None if pins.chunk_access is None else tuple(map(Access, pins.chunk_access)),
        forbid=parse_bans(pins.forbid),
        offload=_offload(pins.offload, _unnamed_offload(pins, target, searched)),
        chunk_communication=ChunkCommunication(
            pins.chunk_communication or ChunkCommunication.GROUP
        ),
    )
    return narrowed(constraints, load_module(target.module, target.model))


def _unnamed_offload(
    pins: PinOptions, target: TargetOptions, searched: tuple[Offload, ...]
) -> tuple[Offload, ...] | None:
    """Returns what the host may hold where --offload is not given.

    The host holds nothing of blocks whose weights are divided over data.
    """
    if pins.weights_over_data:
        return ()
    optimizer = Optimizer(target.optimizer or Optimizer.ADAM)
    return host_contents(searched, optimizer) if target.host_memory else None


def _offload(
    names: tuple[str, ...] | None, otherwise: tuple[Offload, ...] | None
) -> tuple[Offload, ...] | None:
    """Returns the allowed host contents; None allows them only where nothing fits without."""
    if names is None:
        return otherwise
    if NO_OFFLOAD in names and len(names) > 1:
        raise ConfigError(
            f"--offload {','.join(names)}: none and others exclude each other",
            hint=f"leave out {NO_OFFLOAD}",
        )
    return tuple(Offload(name) for name in names if name != NO_OFFLOAD)


def with_flags(request: PlanRequest[ModelT], flags: SearchFlags) -> PlanRequest[ModelT]:
    """Returns the request with its objective and limits; the time limit runs from here on.

    A front, which walks over the objectives, begins with throughput. Raises ConfigError.
    """
    objective = Objective.THROUGHPUT if flags.objective == FRONT else Objective(flags.objective)
    return replace(request, objective=objective, options=options_of(flags))


def options_of(flags: SearchFlags) -> SearchOptions:
    """Returns the limits of a search; the time limit runs from here on.

    Raises ConfigError for numbers out of range, a size without a unit, and a slowdown or a
    preference that the objective does not use.
    """
    if flags.max_slowdown is not None and flags.objective not in _SLOWED:
        raise ConfigError(
            f"--max-slowdown is for --objective {' or '.join(_SLOWED)}, the objective is "
            f"{flags.objective}",
            hint="leave it out",
        )
    if flags.prefer is not None and flags.objective != Objective.THROUGHPUT:
        raise throughput_error("--prefer", flags.objective)
    if flags.robust is not None and flags.objective != Objective.THROUGHPUT:
        raise throughput_error("--robust", flags.objective)
    _require_one_order(flags)
    _require_one_margin(flags)
    slowdown, limit = flags.max_slowdown, flags.memory_limit
    cap = flags.memory_cap
    return SearchOptions(
        max_slowdown=DEFAULT_MAX_SLOWDOWN if slowdown is None else slowdown,
        memory_slack=flags.memory_slack,
        memory_margin=flags.memory_margin,
        oom_risk=flags.oom_risk,
        solver=SolverName(flags.solver),
        deadline=deadline_after(flags.time_limit),
        memory_cap_bytes=(
            DEFAULT_MEMORY_CAP_BYTES if cap is None else parse_size("--memory-cap", cap)
        ),
        memory_limit_bytes=None if limit is None else parse_size("--memory-limit", limit),
        prefer=Prefer.FASTEST if flags.prefer is None else Prefer(flags.prefer),
        robust=flags.robust,
        on_program=flags.on_program,
    )


def _require_one_margin(flags: SearchFlags) -> None:
    """Raises ConfigError where a risk and another limit of the memory are both stated."""
    for name, value in (
        ("--memory-margin", flags.memory_margin),
        ("--memory-limit", flags.memory_limit),
    ):
        if flags.oom_risk is not None and value is not None:
            raise ConfigError(
                f"--oom-risk and {name} both say how much of a device stays free",
                hint="leave one of them out",
            )


def _require_one_order(flags: SearchFlags) -> None:
    """Raises ConfigError unless time or memory comes first, and only for the memory objective."""
    if flags.memory_slack is None:
        return
    if flags.objective != Objective.MEMORY:
        raise ConfigError(
            f"--memory-slack is for --objective memory, the objective is {flags.objective}",
            hint="leave it out",
        )
    if flags.max_slowdown is not None:
        raise ConfigError(
            "--memory-slack puts memory first and --max-slowdown puts time first",
            hint="leave one of them out",
        )


def offload_assumed(constraints: Constraints, plan: Plan) -> tuple[str, ...]:
    """Returns phrases where a plan uses the host, or operators of blocks, and no option asks."""
    finer: tuple[str, ...] = ()
    by_operators = plan.chunks is not None and plan.chunks.access is Access.OPERATOR
    if by_operators and constraints.access is None:
        finer = ("--chunk-access operator (nothing fits by blocks)",)
    uses_host = plan.chunks or any(
        layer.keep_on_host or layer.offload for layer in plan.layer_plans.values()
    )
    if constraints.offload is not None or not uses_host:
        return finer
    searched = host_contents(searched_offload(plan.model, plan.training), plan.training.optimizer)
    return (offload_phrase(searched), *finer)


def offload_phrase(searched: tuple[Offload, ...]) -> str:
    """Returns the phrase for the use of the host where no option asked for it."""
    return f"--offload {','.join(searched)} (nothing fits the devices alone)"


def all_assumed(request: PlanRequest[Any], flags: SearchFlags) -> tuple[str, ...]:
    """Returns a phrase for every default that a search took."""
    assumed, options = request.assumed, request.options
    if flags.memory_margin is None and flags.memory_limit is None:
        stack = request.training.stack
        assumed += (
            f"--memory-margin {memory_margin(stack, options):g} ({margin_text(stack, options)})",
        )
    if flags.objective in _SLOWED and flags.max_slowdown is None and flags.memory_slack is None:
        assumed += (f"--max-slowdown {options.max_slowdown}",)
    return assumed


def require_no_front(flags: SearchFlags, plot: Path | None) -> None:
    """Raises ConfigError for an option that only a front has."""
    for name, value in (("plot", plot), ("points", flags.points)):
        if value is not None:
            raise ConfigError(
                f"--{name} is for --objective pareto, the objective is {flags.objective}",
                hint="add --objective pareto",
            )


def is_fastest_alone(flags: SearchFlags) -> bool:
    """Returns whether a request asks the planner's own search for the fastest step alone."""
    return (
        flags.objective == Objective.THROUGHPUT
        and flags.method in (None, "ours")
        and flags.robust is None
        and flags.pools != "data"
    )


def require_method(flags: SearchFlags, *, described: bool) -> None:
    """Raises ConfigError for options that another search method than the planner's lacks."""
    if flags.method in (None, "ours"):
        if flags.seed is not None:
            raise ConfigError("--seed is for --search", hint="add --search mcmc, or leave it out")
        return
    lacking = {
        "--for": flags.launchers is not None,
        "--prefer": flags.prefer is not None,
        "--robust": flags.robust is not None,
        "--explain": flags.explain,
        "--pools data": flags.pools == "data",
        f"--objective {flags.objective}": flags.objective != Objective.THROUGHPUT,
        "a traced module": not described,
    }
    for what, given in lacking.items():
        if given:
            raise ConfigError(
                f"--search {flags.method} does not go with {what}", hint="leave out one of them"
            )


def require_shares(flags: SearchFlags, *, failures: bool) -> None:
    """Raises ConfigError for options that pools which divide the batch lack."""
    if flags.pools != "data":
        return
    lacking = {
        "--for": flags.launchers is not None,
        "--robust": flags.robust is not None,
        "--explain": flags.explain,
        "--mtbf": failures,
        f"--objective {flags.objective}": flags.objective not in ("throughput", "memory"),
    }
    for what, given in lacking.items():
        if given:
            raise ConfigError(f"--pools data does not go with {what}", hint="leave out one of them")


def require_front(flags: SearchFlags, output: Path, plot: Path | None) -> None:
    """Raises ConfigError for options that a front lacks and files that cannot be written.

    It is called before the searches, so that none of them is lost.
    """
    from parplan.planner.search.pareto import plan_paths
    from parplan.report.plots.scatter_plot import require_plot

    if output == STDOUT:
        raise ConfigError(
            "--output - is one plan, a front is several",
            hint="leave out --output for plan-01.yaml, ..., or use --json",
        )
    if flags.max_slowdown is not None:
        raise ConfigError(
            "--max-slowdown is for --objective memory or peak, a front goes through many",
            hint="leave it out",
        )
    for path in (output, *plan_paths(output, 1)):  # The name of a point is longer.
        require_writable(path, hint="choose another file with --output")
    if plot is not None:
        require_plot(plot)
