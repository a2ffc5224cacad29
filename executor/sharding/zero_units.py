"""ZeRO through FSDP2: one unit per layer and one mechanism for the stages 1, 2 and 3.

Where the operators of a block have several stages, those at the highest one are the unit of the
block, and those at each lower stage are a unit inside it.

Stages 0 and 1 take one reduction per step.

stage | parameters during the step | gradients of a micro-batch
0     | whole                      | accumulate whole, all-reduced at the end of the step
1     | gathered once a step       | accumulate whole, reduce-scattered at the end of the step
2     | gathered once a step       | reduce-scattered after every micro-batch
3     | gathered per micro-batch   | reduce-scattered after every micro-batch

Gradients that are this rank's summands over the tensor-parallel axis too
(`parplan.executor.sharding.place`) are added over it at the end of the step, in the form held then:
with ZeRO the shards. Experts that are divided over data-parallel ranks are separate units; their
mesh is the ranks that hold the same experts.

Where fewer ranks than dp hold one copy of a layer's states together (hybrid sharding), the shards'
gradients are also added over the copies once, at the end of the step: FSDP2's own hybrid mesh would
do so after every micro-batch.

bf16 and fp16 run on a compute copy of fp32 shards (FSDP2's mixed precision), which for stage 0 is
torch's `replicate`. Parameters without fp32 masters are sharded and reduced in bf16. Weights that
data-parallel ranks divide have one holder: they are units of their own, which reduce nothing. Every
reduction is a sum: the loss is already this rank's share of the mean over the global batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.pipelining._backward import (
    _get_grad_fn_or_grad_acc,
    stage_backward_weight,
)
from torch.distributed.tensor import DTensor

from parplan.executor.models.adapters import frozen_parameters, in_precision
from parplan.executor.sharding.place import parameters_over_data, parameters_summed_over_tp
from parplan.executor.tensors import DTYPES, local
from parplan.profiles.models.spec import Precision, TrainingSpec
from parplan.profiles.profiler.gpus import device_of, is_gpu
from parplan.profiles.units import MIB

BUCKET_BYTES = 25 * MIB  # DistributedDataParallel's default bucket_cap_mb


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Modules that are gathered and reduced together.

    They are one layer, tied embedding and head, or the operators of a block at one ZeRO stage.

    mesh          the ranks that hold one copy together, or with ZeRO 0 the same states
    apart         modules inside the layers that are separate units
    copies        the ranks that hold the same shards of other copies, if there are any
    offloaded     whether the host holds the shards, their gradients and the optimizer's states
    casts_inputs  whether the inputs of the layers are cast to the compute precision
    over_data     whether it has the parameters that data-parallel ranks divide, or all others
    fine_tuned    whether frozen parameters are whole and apart below stage 3
    """

    layers: tuple[nn.Module, ...]
    zero: int
    mesh: DeviceMesh
    apart: tuple[nn.Module, ...] = ()
    copies: DeviceMesh | None = None
    offloaded: bool = False
    casts_inputs: bool = True
    over_data: bool = False
    fine_tuned: bool = False

    @property
    def frozen_apart(self) -> dict[nn.Parameter, None]:
        """The frozen parameters that no FSDP unit manages."""
        return frozen_parameters(self.layers) if self.fine_tuned and self.zero < 3 else {}


def compute_dtype(precision: Precision) -> torch.dtype:
    return DTYPES[precision]


def shard_unit(unit: Unit, training: TrainingSpec) -> None:
    """Applies the unit's ZeRO stage; parameters without masters at stage 0 need nothing.

    Frozen parameters lie whole on every rank below stage 3, in the precision of their products.
    """
    if unit.fine_tuned:
        in_precision(unit.layers, compute_dtype(training.precision))
    policy = MixedPrecisionPolicy()
    if training.has_masters:
        policy = MixedPrecisionPolicy(
            param_dtype=compute_dtype(training.precision),
            reduce_dtype=torch.float32,
            cast_forward_inputs=unit.casts_inputs,
        )
    offload = (
        CPUOffloadPolicy(pin_memory=is_gpu(unit.mesh.device_type))
        if unit.offloaded
        else OffloadPolicy()
    )
    modules = list(unit.layers) if len(unit.layers) > 1 else unit.layers[0]
    ignored = {parameter for module in unit.apart for parameter in module.parameters()}
    ignored.update(_parameters(unit, others=True))
    ignored.update(unit.frozen_apart)
    if unit.fine_tuned and ignored.issuperset(_parameters(unit)):
        return
    if unit.zero:
        fully_shard(
            modules,
            mesh=unit.mesh,
            reshard_after_forward=unit.zero == 3,
            mp_policy=policy,
            offload_policy=offload,
            ignored_params=ignored,
        )
    elif training.has_masters or unit.offloaded:
        replicate(
            modules,
            mesh=unit.mesh,
            mp_policy=policy,
            offload_policy=offload,
            ignored_params=ignored,
        )
    for module in _fsdp_modules(unit):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def shard_root(
    body: nn.Module, units: Sequence[Unit], dp_mesh: DeviceMesh, apart: Sequence[nn.Parameter] = ()
) -> None:
    """Joins the units of a stage under one FSDP root, which shares their streams.

    The root manages no parameter itself, and the parameters `apart` stay out of FSDP.
    """
    managed = [unit for unit in units if _fsdp_modules(unit)]
    if not managed:
        return
    ignored = {*apart, *(p for unit in units if unit not in managed for p in _parameters(unit))}
    for unit in managed:
        ignored.update(unit.frozen_apart)
    fully_shard(body, mesh=dp_mesh, ignored_params=ignored)
    # no layer comes before the first; by default it would gather the last layer of another
    # micro-batch
    for layer in managed[0].layers:
        for module in layer.modules():
            if isinstance(module, FSDPModule):
                module.set_modules_to_backward_prefetch([module])


def begin_step(body: nn.Module, units: Sequence[Unit]) -> None:
    """Sets the action of FSDP after each micro-batch's backward pass."""
    for unit in units:
        for module in _fsdp_modules(unit):
            module.set_requires_gradient_sync(unit.zero >= 2, recurse=False)
            module.set_reshard_after_backward(unit.zero == 3, recurse=False)
    if isinstance(body, FSDPModule):
        body.set_is_last_backward(False)


@contextmanager
def gathered(units: Sequence[Unit]) -> Iterator[None]:
    """Gathers the parameters of `units` for a computation outside FSDP's own passes."""
    sharded = [(module, unit.zero == 3) for unit in units for module in _fsdp_modules(unit)]
    for module, _ in sharded:
        module.unshard()
    yield
    for module, frees in sharded:
        if frees:
            module.reshard()


def settle_weight_gradients(body: nn.Module) -> None:
    """Runs FSDP's end of a backward pass for the units that `weight_gradients` has not ended."""
    if isinstance(body, FSDPModule):
        body._get_fsdp_state()._root_post_backward_final_callback()


def weight_gradients(
    body: nn.Module, weights: Iterable[nn.Parameter], groups: Sequence[dict[str, Any]]
) -> None:
    """Computes the gradients of a stage's weights, from its last FSDP unit to its first.

    Each unit is reduced, or accumulates in fp32 (see `begin_step`), before the gradients of the
    next one, so that its reduction runs beside them. FSDP's own hook runs with the gradient of the
    unit's input, before those of the weights are there.

    groups   weights whose gradients are computed together, of torch's `stage_backward_input`
    """
    by_node = {_get_grad_fn_or_grad_acc(weight): weight for weight in weights}

    def compute(some: Sequence[dict[str, Any]]) -> None:
        needed = [by_node[node] for group in some for node in group["params"]]
        stage_backward_weight(iter(needed), list(some))

    left = list(groups)
    states = body._get_fsdp_state()._state_ctx.all_states if isinstance(body, FSDPModule) else ()
    for state in reversed(states):
        own = {
            _get_grad_fn_or_grad_acc(each.unsharded_param)
            for unit in state._fsdp_param_groups
            for each in unit.fsdp_params
            if hasattr(each, "_unsharded_param")  # a unit that the forward pass has used
        }
        compute([group for group in left if not own.isdisjoint(group["params"])])
        left = [group for group in left if own.isdisjoint(group["params"])]
        for unit in reversed(state._fsdp_param_groups):
            unit.post_backward()
    compute(left)


def reduce_gradients(body: nn.Module, units: Sequence[Unit], tp_mesh: DeviceMesh | None) -> None:
    """Ends the step's backward passes.

    Reduces the gradients that accumulated whole and frees the gathered parameters.
    """
    if isinstance(body, FSDPModule):
        body.set_requires_gradient_sync(True)
        body.set_reshard_after_backward(True)
        body.set_is_last_backward(True)
        # as torch.distributed.pipelining ends a step (PipelineStage.perform_reduce_grad)
        body._get_fsdp_state()._root_post_backward_final_callback()
    for unit in units:
        if not _fsdp_modules(unit):
            _settle(_parameters(unit))
    for mesh, summed in _summed_after(units).items():
        # a parameter that no loss depends on, or that is not trained, has no gradient
        gradients = [local(parameter.grad) for parameter in summed if parameter.grad is not None]
        all_reduce(gradients, mesh.get_group())
    if tp_mesh is not None:
        # embedding and head may share a table
        summed_over_tp = dict.fromkeys(_summed_over_tp(units))
        gradients = [local(parameter.grad) for parameter in summed_over_tp]
        all_reduce(gradients, tp_mesh.get_group())


def _summed_after(units: Sequence[Unit]) -> dict[DeviceMesh, list[nn.Parameter]]:
    """Returns by mesh the parameters whose gradients are added at the end of the step.

    They are the parameters that no FSDP unit reduces, and the shards of several copies.
    """
    by_mesh: dict[DeviceMesh, list[nn.Parameter]] = {}
    for unit in units:
        mesh = unit.copies if _fsdp_modules(unit) else unit.mesh
        if mesh is not None and mesh.size() > 1:
            by_mesh.setdefault(mesh, []).extend(_parameters(unit))
    return by_mesh


def _summed_over_tp(units: Sequence[Unit]) -> list[nn.Parameter]:
    modules = (module for unit in units for layer in unit.layers for module in layer.modules())
    once = dict.fromkeys(modules)  # a unit inside a layer has its modules too
    return [parameter for module in once for parameter in parameters_summed_over_tp(module)]


def _fsdp_modules(unit: Unit) -> list[FSDPModule]:
    return [layer for layer in unit.layers if isinstance(layer, FSDPModule)]


def _parameters(unit: Unit, *, others: bool = False) -> list[nn.Parameter]:
    """Returns the parameters of a unit, or the `others` of its layers that are not apart."""
    apart = {parameter for module in unit.apart for parameter in module.parameters()}
    in_order = dict.fromkeys(
        parameter
        for layer in unit.layers
        for module in layer.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if ((name in parameters_over_data(module)) == unit.over_data) != others
    )
    return [parameter for parameter in in_order if parameter not in apart]


def _settle(parameters: Iterable[nn.Parameter]) -> None:
    """Redistributes the gradients of operators on DTensors to their parameter's placement."""
    for parameter in parameters:
        gradient = parameter.grad
        if isinstance(gradient, DTensor) and gradient.placements != parameter.placements:
            parameter.grad = gradient.redistribute(placements=parameter.placements)


def all_reduce(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Sums every tensor over `group`, in buckets of one device.

    Tensors on the host are copied to the device of `group` for it.
    """
    by_device = sorted(tensors, key=lambda tensor: tensor.device.type)
    for bucket in _buckets(by_device):
        flat = _flatten_dense_tensors(bucket).to(device_of(group))
        dist.all_reduce(flat, group=group)
        for tensor, reduced in zip(bucket, _unflatten_dense_tensors(flat, bucket), strict=True):
            tensor.copy_(reduced)


def _buckets(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    buckets: list[list[Tensor]] = []
    room = 0
    for tensor in tensors:
        if not buckets or tensor.nbytes > room or tensor.device != buckets[-1][0].device:
            buckets.append([])
            room = BUCKET_BYTES
        buckets[-1].append(tensor)
        room -= tensor.nbytes
    return buckets
