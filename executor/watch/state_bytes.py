"""Predicted against measured bytes of parameters, gradients and optimizer states on one rank.

Parameters are the bytes held at the end of a micro-batch's backward pass, shards and gathered
copies; gradients are the most that is held then. In bf16 the fp32 shard is the master copy and
counts as optimizer state. Tensors count by their own size: FSDP's padding to equal shares is left
out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from parplan.costmodels.host.offload import Offload
from parplan.costmodels.layers.chunked_layer import state_widths, writes_over_parameters
from parplan.costmodels.layers.model_states import (
    StateBytes,
    chunk_elements,
    chunk_shape,
    frozen_bytes,
    states_of,
    whole_tensor,
)
from parplan.costmodels.operators.optimizers import WholeTensor, moments_bytes
from parplan.costmodels.operators.sharding import Sharding
from parplan.executor.placed_layers import (
    PlacedLayer,
    effective_zero,
    expert_shards,
    local_stages,
    stage_layers,
    zero_ranks,
)
from parplan.executor.rules.divisions import Entries, local_shape, tp_degrees
from parplan.executor.tensors import part
from parplan.planner.plan.plan import OVER_DATA, Plan
from parplan.planner.plan.traced_plan import AnyPlan
from parplan.profiles.models.operator_graph import LayerKind, Operator, Parameter
from parplan.profiles.models.spec import Precision, TrainingSpec
from parplan.profiles.models.transformer import build_graph
from parplan.profiles.units import format_bytes


def predicted_state_bytes(
    plan: Plan, pipeline_rank: int, replica: int, tp_rank: int = 0
) -> StateBytes:
    """Return the state bytes of a rank that the planner's memory model predicts.

    Shapes are divided by the plan's placements. Tensor-parallel ranks hold the same bytes, except
    where they hold unlike shards of experts.

    replica   number among the data-parallel and context-parallel ranks, the latter innermost
    """
    graph = build_graph(plan.model, plan.training, plan.pipeline.micro_batch_size)
    stages = stage_layers(plan)
    total = chunk_state_bytes(plan, pipeline_rank)
    if plan.chunks is not None:  # only chunks have 16-bit gradients
        plan = replace(plan, training=replace(plan.training, gradient_precision=Precision.FP32))
    for layer in (layer for k in local_stages(plan, pipeline_rank) for layer in stages[k]):
        if plan.chunks is not None and layer.kind is LayerKind.BLOCK:
            continue
        shares_weight = layer.kind is LayerKind.HEAD and plan.mesh.pp == 1
        for operator in graph.layer_class(graph.key(layer.index)).operators:
            for parameter in operator.parameters:
                if parameter.of_experts:
                    inside = replica * plan.mesh.tp + tp_rank
                    total += _expert_states(plan, layer, operator, parameter, inside)
                elif not (parameter.tied and shares_weight):
                    total += _parameter_states(plan, layer, operator, parameter, replica)
    return total


def chunk_state_bytes(plan: AnyPlan, pipeline_rank: int) -> StateBytes:
    """Return the bytes of a rank's chunks with their padding, on device and host."""
    total = StateBytes()
    training = plan.training
    over = writes_over_parameters(training, plan.pipeline.num_micro_batches)
    for group in plan.chunks.groups if plan.chunks is not None else ():
        if group.stage == pipeline_rank:
            elements = group.num_chunks // plan.mesh.dp * group.chunk_elements
            for widths in state_widths(group.home, training, over):
                total += StateBytes(
                    widths.parameters * elements,
                    widths.gradients * elements,
                    widths.optimizer * elements,
                )
    return total


def _parameter_states(
    plan: Plan, layer: PlacedLayer, operator: Operator, parameter: Parameter, replica: int
) -> StateBytes:
    looks_up = Offload.LOOKUP in layer.plan.offload and not plan.model.tied_embeddings
    whole, name = whole_tensor(operator, parameter), operator.name
    if looks_up and name == "tokens":
        # The host holds columns, in fp32 at any precision.
        columns = (parameter.shape[0], parameter.shape[1] // plan.mesh.replicas)
        return shard_states(columns, (0, 1), 3, plan.training, whole, on_host=False)
    shards, zero = zero_ranks(layer, plan.mesh), effective_zero(layer, plan.mesh, name)
    entries: Entries = ()
    if layer.plan.operators:
        entries = layer.plan.operators[name].parameters.get(parameter.name, ())
    shape = local_shape(parameter.shape, entries, dp=plan.mesh.dp, **tp_degrees(plan.mesh))
    if any(entry.endswith(OVER_DATA) for entry in entries):
        return shard_states(shape, (0, 1), 0, plan.training, whole, on_host=False)
    on_host = Offload.STATES in layer.plan.offload
    if Offload.LOOKUP in layer.plan.offload:
        on_host = on_host or name in ("tokens", "lm_head")
    shard = replica % shards, shards
    if not parameter.trained:
        return frozen_states(shape, shard, zero, plan.training, quantised=parameter.quantised)
    return shard_states(shape, shard, zero, plan.training, whole, on_host=on_host)


def frozen_states(
    shape: tuple[int, ...],
    shard: tuple[int, int],
    zero: int,
    training: TrainingSpec,
    *,
    quantised: bool = False,
) -> StateBytes:
    """Return the bytes of a frozen parameter, `shard` being its number and how many there are.

    ZeRO 3 shards it, ZeRO 1 and 2 leave it whole.
    """
    index, shards = shard
    held = chunk_elements(shape, shards, index) if zero == 3 else math.prod(shape)
    return StateBytes(frozen_bytes(held, training, quantised=quantised))


def _expert_states(
    plan: Plan, layer: PlacedLayer, operator: Operator, parameter: Parameter, stage_rank: int
) -> StateBytes:
    """Return the bytes of a rank's experts, of which neighbours hold others.

    stage_rank  number of the rank among those of its stage
    """
    mesh, whole = plan.mesh, whole_tensor(operator, parameter)
    shape = Sharding(tp=mesh.tp, ep=mesh.ep, etp=mesh.etp).parameter_shape(operator, parameter)
    shards = expert_shards(zero_ranks(layer, mesh), mesh)
    zero, on_host = layer.plan.zero if shards > 1 else 0, Offload.STATES in layer.plan.offload
    index = stage_rank // (mesh.ep * mesh.etp) % shards
    if not parameter.trained:
        return frozen_states(shape, (index, shards), zero, plan.training)
    return shard_states(shape, (index, shards), zero, plan.training, whole, on_host=on_host)


def shard_states(
    shape: tuple[int, ...],
    shard: tuple[int, int],
    zero: int,
    training: TrainingSpec,
    whole: WholeTensor,
    *,
    on_host: bool,
) -> StateBytes:
    """Return the bytes of one shard of a tensor, given its index and the number of shards.

    shape    of the part of the tensor `whole` that is cut into shards
    on_host  the host holds the states
    """
    if not zero and on_host:
        # The whole tensor is one shard on the host and is gathered to the device.
        shard, zero = (0, 1), 1
    index, shards = shard
    part = chunk_shape(shape, shards, index)
    moments = moments_bytes(
        training.optimizer, part if zero else shape, whole, training.stack.moment_bytes
    )
    return states_of(math.prod(shape), math.prod(part), zero, training, moments)


class Meter:
    """Measures the state bytes that this rank holds.

    `sample` is called after each micro-batch's backward pass.
    """

    def __init__(self, *, masters: bool) -> None:
        """`masters`: the parameters between steps are copies of those that compute."""
        self.masters = masters
        self.most_parameters = 0
        self.most_gradients = 0
        self.active = True
        self.stages: Sequence[nn.Module] = ()
        self.shards: Sequence[nn.Parameter] = ()
        self.apart: Sequence[nn.Parameter] = ()

    def watch(
        self,
        stages: Sequence[nn.Module],
        shards: Sequence[nn.Parameter],
        apart: Sequence[nn.Parameter] = (),
    ) -> None:
        """Set the tensors to measure.

        stages  modules whose parameters are the gathered ones
        shards  parameters between steps, which the optimizer holds
        apart   parameters in chunks, which are left out
        """
        self.stages = stages
        self.shards = shards
        self.apart = apart

    def sample(self) -> None:
        if not self.active:
            return
        shards = 0 if self.masters else _held_bytes(self.shards)
        self.most_parameters = max(self.most_parameters, shards + _held_bytes(self.gathered()))
        self.most_gradients = max(self.most_gradients, _held_bytes(self.gradients()))

    def recomputed(self) -> None:
        """Do nothing after a recompute ahead of a backward pass, which changes no state."""

    def gathered(self) -> Sequence[nn.Parameter]:
        """Return the parameters of the stages that are not the shards between steps."""
        excluded = {id(parameter) for parameter in (*self.shards, *self.apart)}
        parameters = {id(p): p for stage in self.stages for p in stage.parameters()}
        return tuple(p for key, p in parameters.items() if key not in excluded)

    def gradients(self) -> Iterator[Tensor | None]:
        """Yield all gradients, of shards and of gathered parameters."""
        yield from (parameter.grad for parameter in (*self.shards, *self.gathered()))
        yield from _accumulated_gradients(self.stages)

    def measured(self, optimizer: torch.optim.Optimizer) -> StateBytes:
        """Return the bytes by class, once the optimizer has states.

        Step counters and states of parameters `apart` are left out.
        """
        masters = _held_bytes(self.shards) if self.masters else 0
        return StateBytes(
            self.most_parameters,
            self.most_gradients,
            _held_bytes(optimizer_states(optimizer, self.apart)) + masters,
        )


def optimizer_states(
    optimizer: torch.optim.Optimizer, apart: Iterable[nn.Parameter] = ()
) -> Iterator[Tensor]:
    """Return the optimizer states of every parameter not `apart`, without the step counters."""
    excluded = set(apart)
    for parameter, state in optimizer.state.items():
        if parameter not in excluded:
            yield from (value for value in state.values() if value.ndim)


def _held_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Return bytes of this rank's parts of the tensors that have memory.

    FSDP empties the storage of parameters that it frees.
    """
    parts = [part(tensor) for tensor in tensors if tensor is not None]
    return sum(held.nbytes for held in parts if held.untyped_storage().size())


def _accumulated_gradients(stages: Sequence[nn.Module]) -> Iterator[Tensor | None]:
    """Yield the fp32 gradients that FSDP accumulates beside a bf16 parameter until it reduces them.

    FSDP has no public name for them.
    """
    modules = {id(m): m for stage in stages for m in stage.modules() if isinstance(m, FSDPModule)}
    states = {id(m._get_fsdp_state()): m._get_fsdp_state() for m in modules.values()}
    for state in states.values():
        for group in state._fsdp_param_groups:
            yield from (parameter.unsharded_accumulated_grad for parameter in group.fsdp_params)


Row = tuple[tuple[int, int, int], StateBytes, StateBytes]


def table(rows: Sequence[Row], *, compared: bool = True) -> list[str]:
    """Return the head and one line per rank with predicted and measured bytes of each class.

    A line says whether they are equal, unless `compared` is false.
    """
    classes = "".join(f"{name:>24}" for name in ("parameters", "gradients", "optimizer"))
    lines = [f"{'pp dp tp':<10}{classes}  (predicted / measured)"]
    for (pp, dp, tp), predicted, measured in rows:
        pairs = zip(_classes(predicted), _classes(measured), strict=True)
        cells = "".join(f"{format_bytes(p) + ' / ' + format_bytes(m):>24}" for p, m in pairs)
        verdict = "equal" if predicted == measured else "DIFFERS"
        if not compared:
            verdict = "not compared: dp does not divide the module evenly"
        lines.append(f"{pp:>2} {dp:>2} {tp:>2}  {cells}  {verdict}")
    return lines


def _classes(states: StateBytes) -> tuple[int, int, int]:
    return states.parameters, states.gradients, states.optimizer
