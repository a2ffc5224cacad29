"""The request to the planner: model, cluster, training, constraints and options in one record."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from parplan.costmodels.communication.mesh import MeshOrder
from parplan.costmodels.host.offload import Offload
from parplan.costmodels.host.state_location import Access, ChunkCommunication
from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.operators.optimizers import PLAIN_OPTIMIZERS
from parplan.costmodels.schedules.schedule import Schedule
from parplan.costmodels.strategy import TP_OVERLAP_LEVELS
from parplan.planner.deadline import NEVER, Deadline
from parplan.planner.forbid import NAMES, Ban, Value
from parplan.planner.objective import Objective, Prefer
from parplan.planner.stage_recompute import OPTION, RecomputeRule, illegal_pins
from parplan.profiles.divisors import divisors
from parplan.profiles.documents.ranges import require_range
from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.hardware import Cluster
from parplan.profiles.models.module_source import ModuleSource
from parplan.profiles.models.spec import ModelSpec, Optimizer, TrainingSpec
from parplan.profiles.models.transformer import has_unlike_blocks
from parplan.profiles.stack import EVERY_RECOMPUTE, NEUTRAL, ContextForm, Stack
from parplan.profiles.units import GIB

if TYPE_CHECKING:
    from parplan.profiles.models.traced_model import TracedModel

ZERO_STAGES = (0, 1, 2, 3)
DEGREES = ("pp", "dp", "tp", "cp", "ep", "etp", "tp_rows", "micro_batch_size", "virtual_stages")
MAX_MICRO_BATCH_SIZE = 64  # the largest that a search tries without a pin
SEARCHED_OFFLOAD = (Offload.OPTIMIZER, Offload.PARAMETERS, Offload.ACTIVATIONS, Offload.LOOKUP)
# what a search of a traced module may leave to the host
UNLIKE_OFFLOAD = (Offload.STATES,)  # of described models whose blocks are of several classes
TRACED_OFFLOAD = (Offload.STATES, Offload.OPTIMIZER, Offload.PARAMETERS)
STAGE_LEVELS = (Recompute.NONE, Recompute.FULL)  # of the layers of a stage under a rule
DEFAULT_MEMORY_CAP_BYTES = 2 * GIB  # fixed, so that answers do not depend on the machine
_EVERY: Mapping[str, tuple[Value, ...]] = {
    "zero": ZERO_STAGES,
    "recompute": tuple(Recompute),
    "tp_overlap": TP_OVERLAP_LEVELS,
}


class SolverName(StrEnum):
    CBC = "cbc"
    HIGHS = "highs"


def sizes_of(training: TrainingSpec) -> tuple[int, ...]:
    """Returns the micro-batch sizes that a search of a training may try without a pin."""
    sizes = divisors(training.global_batch_size)
    return tuple(size for size in sizes if size <= MAX_MICRO_BATCH_SIZE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraints:
    """Pinned choices; None leaves a choice to the search.

    Tuples list the allowed values, `forbid` the forbidden ones.

    recompute           levels; None also allows any list of operators
    cp                  degrees of context parallelism; None for those that are tried at the length
                        of the sequences (planner/candidates/meshes.py)
    context_form        forms of context parallelism; None for those that the stack runs
    tp_rows             rows of a grid of tensor-parallel ranks (EQUATIONS T7); None for one row
    mesh_order          orders of the axes; None for those that the stack can start in
    recompute_first_stage   a rule for the recompute of the pipeline stages, which then have whole
                        layers at the levels none and full
    zero_ranks          neighbouring ranks that hold one copy of sharded states together, on meshes
                        whose dp it divides
    tp_overlap          levels of sub-pipelined tensor parallelism where tp > 1; None for those that
                        the stack runs
    zero_by_operator    operators of a block may have two ZeRO stages
    megatron_sharding   tensor parallelism divides every operator as Megatron does
    weights_over_data   blocks divide weights over data-parallel ranks; None where the stack runs it
    offload             allowed host contents, of SEARCHED_OFFLOAD or for a traced module of
                        TRACED_OFFLOAD; None allows all of them where nothing fits without
    chunk_communication   how data-parallel ranks gather and reduce the chunks of a group
    access              the units of blocks in chunks that have to be on the device together; None
                        for blocks, and for operators where nothing fits by blocks
    """

    pp: tuple[int, ...] | None = None
    dp: tuple[int, ...] | None = None
    tp: tuple[int, ...] | None = None
    cp: tuple[int, ...] | None = None
    context_form: tuple[ContextForm, ...] | None = None
    ep: tuple[int, ...] | None = None
    etp: tuple[int, ...] | None = None
    tp_rows: tuple[int, ...] | None = None
    micro_batch_size: tuple[int, ...] | None = None
    virtual_stages: tuple[int, ...] | None = None
    schedule: tuple[Schedule, ...] | None = None
    mesh_order: tuple[MeshOrder, ...] | None = None
    sequence_parallel: tuple[bool, ...] | None = None
    recompute: tuple[Recompute, ...] | None = None
    recompute_first_stage: RecomputeRule | None = None
    zero: tuple[int, ...] | None = None
    zero_ranks: int | None = None
    tp_overlap: tuple[int, ...] | None = None
    tp_across_nodes: bool = False
    zero_by_operator: bool = False
    megatron_sharding: bool = False
    weights_over_data: tuple[bool, ...] | None = None
    offload: tuple[Offload, ...] | None = ()
    chunk_communication: ChunkCommunication = ChunkCommunication.GROUP
    access: tuple[Access, ...] | None = None
    forbid: tuple[Ban, ...] = ()

    def __post_init__(self) -> None:
        for name in DEGREES:
            for value in getattr(self, name) or ():
                require_range(name, value, f"--{name.replace('_', '-')}")
        for value in self.zero or ():
            if value not in ZERO_STAGES:
                raise ConfigError(f"--zero is {value}, it must be 0, 1, 2 or 3")
        for value in self.tp_overlap or ():
            if value not in TP_OVERLAP_LEVELS:
                raise ConfigError(f"--tp-overlap is {value}, it must be 0, 1, 2 or 3")
        if self.recompute_first_stage is not None:
            reason = illegal_pins(
                self.recompute_first_stage, self.pp, self.schedule, self.virtual_stages
            )
            if reason:
                raise ConfigError(reason, hint=f"drop that pin, or {OPTION}")
            self._levels_of_stages()
        self._require_something_left()

    def _levels_of_stages(self) -> tuple[Recompute, ...]:
        """Returns the levels that a rule for the stages deals out. Raises ConfigError."""
        excluded = [
            level
            for level in STAGE_LEVELS
            if level not in (self.recompute or STAGE_LEVELS) or self.ban(recompute=level)
        ]
        if excluded:
            raise ConfigError(
                f"{OPTION} needs the recompute levels none and full, {excluded[0]} is excluded",
                hint="drop --recompute and its bans, or drop " + OPTION,
            )
        return STAGE_LEVELS

    def _require_something_left(self) -> None:
        for name in NAMES:
            every = getattr(self, name) or _EVERY.get(name)
            if every and all(self.ban(**{name: value}) for value in every):
                raise ConfigError(
                    f"--forbid leaves nothing of --{name.replace('_', '-')}",
                    hint="forbid less, or pin another value",
                )

    def ban(self, **values: Value) -> Ban | None:
        """Returns the first ban that one of the values meets, for example `ban(tp=8)`."""
        return next(
            (ban for ban in self.forbid if ban.name in values and ban.value == values[ban.name]),
            None,
        )

    def resolved(self, stack: Stack = NEUTRAL) -> Constraints:
        """Returns these constraints with bans and the stack's limits as pins.

        Only ZeRO and recompute are resolved, because prices of layers know only pins of these.
        Raises ConfigError where nothing is left.
        """
        pins = self
        if any(ban.name == "zero" for ban in self.forbid):
            pins = replace(
                pins,
                zero=tuple(stage for stage in self.zero or ZERO_STAGES if not self.ban(zero=stage)),
            )
        if any(ban.name == "recompute" for ban in self.forbid):
            pins = replace(
                pins,
                recompute=tuple(
                    level for level in self.recompute or Recompute if not self.ban(recompute=level)
                ),
            )
        if self.recompute_first_stage is not None:
            pins = replace(pins, recompute=self._levels_of_stages())
        return (
            pins
            if set(stack.recompute) == set(EVERY_RECOMPUTE)
            else pins._as_the_stack_recomputes(stack)
        )

    def _as_the_stack_recomputes(self, stack: Stack) -> Constraints:
        levels = tuple(
            level for level in self.recompute or Recompute if level.value in stack.recompute
        )
        if not levels:
            raise ConfigError(
                f"--recompute and --forbid leave nothing that the stack {stack.name} runs: "
                f"{', '.join(stack.recompute)}",
                hint="forbid less, or choose another --stack",
            )
        if self.recompute_first_stage is not None and len(levels) < len(STAGE_LEVELS):
            raise ConfigError(
                f"{OPTION} needs whole layers with and without recompute, the stack {stack.name} "
                f"runs {', '.join(stack.recompute)}",
                hint="choose another --stack",
            )
        return replace(self, recompute=levels)


# receives a CertifyingProgram and its Problem, which are made of requests
OnProgram = Callable[[Any, Any], None]
DEFAULT_MAX_SLOWDOWN = 0.10
ANY_SLOWDOWN = 99.0  # finite for the solver's sake: steps up to 100 times the fastest


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions:
    """Limits of a search.

    max_slowdown: bound of the step for the objectives memory and peak, over the fastest
    memory_slack: bound of the redundant bytes over the least of all plans, within which the
    objective memory takes the fastest plan; None for the least redundant plan within the slowdown
    memory_margin: share of the device that stays free; None for the margin from the measured runs
    of the stack (planner/plan/error_band.py)
    oom_risk: the probability that a plan needs more memory than its device, in place of the margin
    memory_limit_bytes: limit that replaces capacity minus margin
    deadline: end of all work with these options together
    memory_cap_bytes: what the tables of one search may hold, at which it stops with its best plan
    prefer: the choice among plans inside the error band of the fastest
    robust: share by which compute, links or memory may be off; the plans are then priced where one
    of them is, and None leaves that out
    on_program: receives the program that certifies a plan, with its record
    """

    max_slowdown: float = DEFAULT_MAX_SLOWDOWN
    memory_slack: float | None = None
    memory_margin: float | None = None
    oom_risk: float | None = None
    memory_limit_bytes: int | None = None
    deadline: Deadline = NEVER
    memory_cap_bytes: int = DEFAULT_MEMORY_CAP_BYTES
    solver: SolverName = SolverName.CBC
    prefer: Prefer = Prefer.FASTEST
    robust: float | None = None
    on_program: OnProgram | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.max_slowdown <= 1000:
            raise ConfigError(
                f"--max-slowdown is {self.max_slowdown}, it must be from 0 to 1000",
                hint="0.1 is 10 %",
            )
        if self.memory_slack is not None and not 0 <= self.memory_slack <= 1000:
            raise ConfigError(
                f"--memory-slack is {self.memory_slack}, it must be from 0 to 1000",
                hint="0.05 is 5 %",
            )
        if self.memory_margin is not None and not 0 <= self.memory_margin < 1:
            raise ConfigError(
                f"--memory-margin is {self.memory_margin}, it must be in [0, 1)",
                hint="0.08 keeps 8 % free",
            )
        if self.oom_risk is not None and not 0 < self.oom_risk < 1:
            raise ConfigError(
                f"--oom-risk is {self.oom_risk:g}, it must be above 0 and below 1",
                hint="1% or 0.01 is one run in a hundred",
            )
        if self.robust is not None and not 0 < self.robust < 1:
            raise ConfigError(
                f"--robust is {self.robust:g}, it must be above 0 and below 1",
                hint="20% or 0.2 is usual",
            )


def searched_offload(model: object, training: TrainingSpec) -> tuple[Offload, ...]:
    """Returns the contents that the host may have in a search for a model.

    States of a model that is fine-tuned stay on the device.
    """
    if not isinstance(model, ModelSpec):
        return TRACED_OFFLOAD
    unlike = has_unlike_blocks(model, training)
    if training.fine_tuning is not None:
        return () if unlike else (Offload.ACTIVATIONS,)
    return UNLIKE_OFFLOAD if unlike else SEARCHED_OFFLOAD


def throughput_error(flag: str, objective: str) -> ConfigError:
    """Returns the error of an option about step times with an objective that does not rank them."""
    return ConfigError(
        f"{flag} is for --objective {Objective.THROUGHPUT}, the objective is {objective}",
        hint="leave it out",
    )


def host_contents(every: tuple[Offload, ...], optimizer: Optimizer) -> tuple[Offload, ...]:
    """Returns those of `every` that the host may hold with an optimizer.

    Host memory has model states with Adam's moments alone.
    """
    if optimizer is Optimizer.ADAM:
        return every
    return tuple(what for what in every if what is Offload.ACTIVATIONS)


def require_host_contents(contents: Iterable[Offload], optimizer: Optimizer) -> None:
    """Raises ConfigError where the host would hold the states of another optimizer than Adam."""
    contents = tuple(contents)
    states = [each for each in contents if each not in host_contents(contents, optimizer)]
    if states:
        raise ConfigError(
            f"--offload {','.join(states)}: states on the host are updated there, which is planned "
            f"and executed for --optimizer {Optimizer.ADAM} alone, not for {optimizer}",
            hint=f"leave it out, or use --optimizer {Optimizer.ADAM}",
        )


ModelT = TypeVar("ModelT", ModelSpec, ModuleSource, "TracedModel")
OtherT = TypeVar("OtherT", ModelSpec, ModuleSource, "TracedModel")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest(Generic[ModelT]):
    """One question to the planner.

    model         a described model, or for a traced module its source and then its trace
    objective     the quantity to minimise
    constraints   pinned and forbidden choices
    options       limits of the search
    module        the external module that runs in place of the executor's own, if any
    assumed       one phrase for each default in the request
    """

    model: ModelT
    cluster: Cluster
    training: TrainingSpec
    objective: Objective = Objective.THROUGHPUT
    constraints: Constraints = Constraints()
    options: SearchOptions = SearchOptions()
    module: ModuleSource | None = None
    assumed: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.objective is not Objective.THROUGHPUT:
            if self.options.prefer is not Prefer.FASTEST:
                raise throughput_error("--prefer", self.objective)
            if self.options.robust is not None:
                raise throughput_error("--robust", self.objective)
        if self.options.robust is not None and not isinstance(self.model, ModelSpec):
            raise ConfigError(
                "--robust is for described models: no error band tells the plans of a traced "
                "module apart",
                hint="leave it out",
            )
        searched = searched_offload(self.model, self.training)
        known = f"{', '.join(searched)} and none" if searched else "none"
        for what in self.constraints.offload or ():
            if what not in searched:
                raise ConfigError(
                    f"--offload {what} is for estimate"
                    if what is Offload.STATES
                    else f"--offload {what} is of described models whose blocks are alike",
                    hint=f"this search has {known}",
                )
        optimizer = self.training.optimizer
        require_host_contents(self.constraints.offload or (), optimizer)
        if not isinstance(self.model, ModelSpec) and optimizer not in PLAIN_OPTIMIZERS:
            raise ConfigError(
                f"--optimizer {optimizer} is of described models: a traced module does not say "
                "which of its tensors are matrices of blocks",
                hint=f"use --optimizer {', '.join(PLAIN_OPTIMIZERS)}",
            )

    def of_model(self, model: OtherT) -> PlanRequest[OtherT]:
        """Returns the same request for another model."""
        return PlanRequest(
            model=model,
            cluster=self.cluster,
            training=self.training,
            objective=self.objective,
            constraints=self.constraints,
            options=self.options,
            module=self.module,
            assumed=self.assumed,
        )

    def with_offload(self, offload: tuple[Offload, ...]) -> PlanRequest[ModelT]:
        """Returns the same request where the host may hold exactly `offload`."""
        return replace(self, constraints=replace(self.constraints, offload=offload))

    def until(self, deadline: Deadline) -> PlanRequest[ModelT]:
        """Returns the same request with another deadline."""
        return replace(self, options=replace(self.options, deadline=deadline))


Request = PlanRequest[ModelSpec]
ModuleRequest = PlanRequest[ModuleSource]
TracedRequest = PlanRequest["TracedModel"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """State of one pass of the search: candidates finished, best value and proven bound.

    The unit is seconds for throughput, redundant bytes for memory, and bytes of the fullest device
    for peak.
    """

    objective: Objective
    done: int
    total: int
    incumbent: float | None
    bound: float | None


OnProgress = Callable[[Progress], None]
