"""The tensors of a run in a checkpoint, by name, for any mesh, pipeline stage and ZeRO stage.

    model.block3.qkv.weight                     a parameter; a DTensor if ranks share it, else whole
    optimizer.block3.qkv.weight.exp_avg         each optimizer state of a parameter
    rng.2.cpu, rng.2.cuda                       the generators of rank 2
    loss_scale.value, loss_scale.good_steps     the loss scale of an fp16 run

Masters of a 16-bit run are the fp32 parameters between steps, so a name does not depend on the
precision either. A tied embedding that is held twice is saved once, as the token table.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import _init_optim_state

from parplan.executor.pipeline.stages import Stage
from parplan.executor.sharding.tensor_boxes import Strips, checkpointed
from parplan.profiles.profiler.gpus import gpu, is_gpu

TIED = "embedding.tokens.weight"
# Prefixes of checkpoint_wrapper and torch.compile.
WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")

# By the first part of the name, then the rest: torch.distributed.checkpoint joins them.
Tensors = dict[str, dict[str, Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTensors:
    """The parameters of one rank by name.

    own     parameters that the rank saves
    copies  further copies that it only loads
    """

    own: Mapping[str, nn.Parameter]
    copies: Mapping[str, nn.Parameter]


def held(stages: Iterable[Stage], *, tied: bool, apart: Iterable[nn.Parameter] = ()) -> RankTensors:
    """Return the parameters of `stages`, which must be as they are between steps.

    tied   the head's weight is the token table
    apart  parameters in chunks, which have their own names (executor/chunks/chunk_adam.py)
    """
    in_chunks = {id(parameter) for parameter in apart}
    saved: dict[str, nn.Parameter] = {}
    copies: dict[str, nn.Parameter] = {}
    for stage in stages:
        for name, parameter in stage.body.named_parameters():
            name = _plain(name)
            if id(parameter) in in_chunks:
                continue
            if tied and name != TIED and parameter is stage.tied_weight():
                copies[TIED] = parameter
            else:
                saved[name] = parameter
    return RankTensors(own=saved, copies=copies)


def _plain(name: str) -> str:
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def training_tensors(
    parameters: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    strips: Mapping[str, Strips],
) -> Tensors:
    """Return parameters and optimizer states; loading into these tensors loads the run.

    strips   of the parameters that are several matrices each
    """
    states = {
        f"{name}.{key}": checkpointed(value, strips.get(name))
        for name, parameter in parameters.items()
        for key, value in optimizer.state[parameter].items()
    }
    return {
        "model": {
            name: checkpointed(each.detach(), strips.get(name)) for name, each in parameters.items()
        },
        "optimizer": states,
    }


def make_optimizer_states(optimizer: torch.optim.Optimizer) -> None:
    """Make the states of a new optimizer, so that a checkpoint can be loaded into them.

    torch does so by a step of zeros at learning rate 0.
    """
    _init_optim_state(optimizer)


def random_states(device: torch.device) -> Tensors:
    """Return the states of this rank's generators."""
    states = {f"{dist.get_rank()}.cpu": torch.get_rng_state()}
    if is_gpu(device):
        states[f"{dist.get_rank()}.{device.type}"] = gpu(device).get_rng_state(device)
    return {"rng": states}


def set_random_states(states: Tensors, device: torch.device) -> None:
    """Set this rank's generators to the states that `random_states` returned."""
    torch.set_rng_state(states["rng"][f"{dist.get_rank()}.cpu"])
    if is_gpu(device):
        gpu(device).set_rng_state(states["rng"][f"{dist.get_rank()}.{device.type}"], device)
