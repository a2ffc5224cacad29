"""Predicted against measured bytes of parameters, gradients and optimizer states on one rank.

Parameters are what is held at the end of a micro-batch's backward pass, shards and gathered copies;
gradients the most that is held then. In bf16 the fp32 shard is the master copy and counts as
optimizer state. Tensors count by their own
size: what FSDP pads to give every rank an equal share is left out.
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
from parplan.costmodels.layers.model_states import StateBytes, chunk_elements, states_of
from parplan.executor.placed_layers import (
    PlacedLayer,
    effective_zero,
    local_stages,
    stage_layers,
    zero_ranks,
)
from parplan.executor.rules.divisions import local_shape
from parplan.executor.tensors import part
from parplan.planner.plan.plan import Plan
from parplan.profiles.models.operator_graph import LayerKind, Parameter
from parplan.profiles.models.spec import Precision
from parplan.profiles.models.transformer import build_graph
from parplan.profiles.units import format_bytes


def predicted_state_bytes(plan: Plan, pipeline_rank: int, dp_rank: int) -> StateBytes:
    """What the planner's memory model says a rank holds, of shapes divided as the plan's placements
    say.

    Every tensor-parallel rank holds the same.
    """
    graph = build_graph(plan.model, plan.training, plan.pipeline.micro_batch_size)
    stages = stage_layers(plan)
    total = _in_chunks(plan, pipeline_rank)
    if plan.chunks is not None:  # gradients of 16 bits are of chunks alone
        plan = replace(plan, training=replace(plan.training, gradient_precision=Precision.FP32))
    for layer in (layer for k in local_stages(plan, pipeline_rank) for layer in stages[k]):
        if plan.chunks is not None and layer.kind is LayerKind.BLOCK:
            continue
        shares_weight = layer.kind is LayerKind.HEAD and plan.mesh.pp == 1
        for operator in graph.layer_class(layer.kind).operators:
            for parameter in operator.parameters:
                if not (parameter.tied and shares_weight):
                    total += _parameter_states(plan, layer, operator.name, parameter, dp_rank)
    return total


def _in_chunks(plan: Plan, pipeline_rank: int) -> StateBytes:
    """Of the own chunks of a rank, their padding included, on device and host."""
    total, training = StateBytes(), plan.training
    over = writes_over_parameters(training, plan.pipeline.num_micro_batches)
    for group in plan.chunks.groups if plan.chunks is not None else ():
        if group.stage == pipeline_rank:
            own = group.num_chunks // plan.mesh.dp * group.chunk_elements
            for widths in state_widths(group.home, training, over):
                total += StateBytes(
                    widths.parameters * own, widths.gradients * own, widths.optimizer * own
                )
    return total


def _parameter_states(
    plan: Plan, layer: PlacedLayer, operator: str, parameter: Parameter, dp_rank: int
) -> StateBytes:
    if parameter.of_experts:
        return _expert_states(plan, layer, operator, parameter, dp_rank)
    if (
        Offload.LOOKUP in layer.plan.offload and operator == "tokens"
    ):  # columns, in fp32 at any precision
        own = math.prod(parameter.shape) // plan.mesh.dp
        return states_of(own, own, 3, plan.training)
    shards, zero = zero_ranks(layer, plan.mesh), effective_zero(layer, plan.mesh)
    entries = (
        layer.plan.operators[operator].parameters.get(parameter.name, ())
        if plan.mesh.tp > 1
        else ()
    )
    shape = local_shape(parameter.shape, entries, plan.mesh.tp)
    return _shard_states(plan, layer, shape, shards, dp_rank % shards, zero)


def _expert_states(
    plan: Plan, layer: PlacedLayer, operator: str, parameter: Parameter, dp_rank: int
) -> StateBytes:
    """Of the matrices of a rank's experts, which its neighbours in the expert-parallel group do not
    hold.
    """
    experts, features, contracted = parameter.shape
    shape, same = (experts // plan.mesh.ep * features, contracted), plan.mesh.expert_dp
    zero = layer.plan.zero if same > 1 else 0
    return _shard_states(plan, layer, shape, same, dp_rank // plan.mesh.ep, zero)


def _shard_states(
    plan: Plan, layer: PlacedLayer, shape: tuple[int, ...], shards: int, index: int, zero: int
) -> StateBytes:
    """Of a tensor that `shards` ranks hold together, on the rank of shard `index`."""
    elements = math.prod(shape)
    if (
        not zero and Offload.STATES in layer.plan.offload
    ):  # the whole is held as one shard, which is gathered
        return states_of(elements, elements, 1, plan.training)
    return states_of(elements, chunk_elements(shape, shards, index), zero, plan.training)


class Meter:
    """Collects the bytes that this rank really holds; `sample` is called after each micro-batch's
    backward pass.
    """

    def __init__(self, precision: Precision) -> None:
        self.precision = precision
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
        """`shards` are the parameters between steps, which the optimizer holds; `stages` show the
        gathered ones; chunks have `apart`.
        """
        self.stages = stages
        self.shards = shards
        self.apart = apart

    def sample(self) -> None:
        if not self.active:
            return
        own = 0 if self.precision is not Precision.FP32 else _held_bytes(self.shards)
        self.most_parameters = max(self.most_parameters, own + _held_bytes(self.gathered()))
        self.most_gradients = max(self.most_gradients, _held_bytes(self.gradients()))

    def recomputed(self) -> None:
        """Called after each recompute ahead of a backward pass, which is of no state."""

    def gathered(self) -> Sequence[nn.Parameter]:
        """The parameters of the stages that are not the shards between steps."""
        others = {id(parameter) for parameter in (*self.shards, *self.apart)}
        return tuple(
            {
                id(p): p for stage in self.stages for p in stage.parameters() if id(p) not in others
            }.values()
        )

    def gradients(self) -> Iterator[Tensor | None]:
        """All gradients there are, of shards and of gathered parameters."""
        yield from (parameter.grad for parameter in (*self.shards, *self.gathered()))
        yield from _accumulated_gradients(self.stages)

    def measured(self, optimizer: torch.optim.Optimizer) -> StateBytes:
        """The bytes by class, once the optimizer has made its states; its step counters are left
        out.
        """
        masters = 0 if self.precision is Precision.FP32 else _held_bytes(self.shards)
        return StateBytes(
            self.most_parameters,
            self.most_gradients,
            _held_bytes(optimizer_states(optimizer)) + masters,
        )


def optimizer_states(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """What the optimizer keeps of every parameter, without its step counters."""
    return (value for state in optimizer.state.values() for value in state.values() if value.ndim)


def _held_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of this rank's part of every tensor that has memory (FSDP empties the storage of what
    it frees).
    """
    parts = [part(tensor) for tensor in tensors if tensor is not None]
    return sum(held.nbytes for held in parts if held.untyped_storage().size())


def _accumulated_gradients(stages: Sequence[nn.Module]) -> Iterator[Tensor | None]:
    """The fp32 gradients that FSDP keeps beside a bf16 parameter until they are reduced; it has no
    public name for them.
    """
    modules = {id(m): m for stage in stages for m in stage.modules() if isinstance(m, FSDPModule)}
    states = {id(m._get_fsdp_state()): m._get_fsdp_state() for m in modules.values()}
    for state in states.values():
        for group in state._fsdp_param_groups:
            yield from (parameter.unsharded_accumulated_grad for parameter in group.fsdp_params)


Row = tuple[tuple[int, int, int], StateBytes, StateBytes]


def table(rows: Sequence[Row], *, compared: bool = True) -> str:
    """One line per rank: predicted and measured bytes of each class, and whether they are equal if
    they are to be `compared`.
    """
    lines = [
        f"{'pp dp tp':<10}{'parameters':>24}{'gradients':>24}{'optimizer':>24}  (predicted / measured)"
    ]
    for (pp, dp, tp), predicted, measured in rows:
        pairs = zip(_classes(predicted), _classes(measured), strict=True)
        cells = "".join(f"{format_bytes(p) + ' / ' + format_bytes(m):>24}" for p, m in pairs)
        verdict = "equal" if predicted == measured else "DIFFERS"
        lines.append(
            f"{pp:>2} {dp:>2} {tp:>2}  {cells}  {verdict if compared else 'not compared: dp does not divide the module evenly'}"
        )
    return "\n".join(lines)


def _classes(states: StateBytes) -> tuple[int, int, int]:
    return states.parameters, states.gradients, states.optimizer
