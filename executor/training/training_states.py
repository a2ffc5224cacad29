"""What a checkpoint holds of a run, as tensors by name: the same names on every mesh, pipeline
stage and ZeRO stage.

    model.block3.qkv.weight                     a parameter; a DTensor where ranks share it, whole
                                                elsewhere
    optimizer.block3.qkv.weight.exp_avg         each tensor that the optimizer keeps of it
    rng.2.cpu, rng.2.cuda                       the generators of rank 2
    loss_scale.value, loss_scale.good_steps     of an fp16 run

Masters of a 16-bit run are the fp32 parameters between steps, so precision is not part of a name
either. A tied embedding that is held twice is saved once, as the token table.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import _init_optim_state

from parplan.executor.pipeline.stages import Stage

TIED = "embedding.tokens.weight"
WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")  # of checkpoint_wrapper and torch.compile

Tensors = dict[
    str, dict[str, Tensor]
]  # the first part of the name, and the rest: torch.distributed.checkpoint joins them


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTensors:
    """The parameters of one rank by name: those it saves, and further copies that it only loads."""

    own: Mapping[str, nn.Parameter]
    copies: Mapping[str, nn.Parameter]


def held(stages: Iterable[Stage], *, tied: bool, apart: Iterable[nn.Parameter] = ()) -> RankTensors:
    """The parameters of `stages`, which must be as they are between steps; `tied`: the head's
    weight is the token table.

    apart: those that lie in chunks, which have their own names (executor/chunks/chunk_adam.py)
    """
    others = {id(parameter) for parameter in apart}
    own: dict[str, nn.Parameter] = {}
    copies: dict[str, nn.Parameter] = {}
    for stage in stages:
        for name, parameter in stage.body.named_parameters():
            name = _plain(name)
            if id(parameter) in others:
                continue
            if tied and name != TIED and parameter is stage.tied_weight():
                copies[TIED] = parameter
            else:
                own[name] = parameter
    return RankTensors(own=own, copies=copies)


def _plain(name: str) -> str:
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def training_tensors(
    parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer
) -> Tensors:
    """Parameters and their optimizer states; what is loaded into these tensors is loaded into the
    run.
    """
    states = {
        f"{name}.{key}": value
        for name, parameter in parameters.items()
        for key, value in optimizer.state[parameter].items()
    }
    return {
        "model": {name: parameter.detach() for name, parameter in parameters.items()},
        "optimizer": states,
    }


def make_optimizer_states(optimizer: torch.optim.Optimizer) -> None:
    """Let a new optimizer have its states, so that they can be loaded into: a step of zeros at
    learning rate 0.
    """
    _init_optim_state(optimizer)


def random_states(device: torch.device) -> Tensors:
    """The states of this rank's generators."""
    found = {f"{dist.get_rank()}.cpu": torch.get_rng_state()}
    if device.type == "cuda":
        found[f"{dist.get_rank()}.cuda"] = torch.cuda.get_rng_state(device)
    return {"rng": found}


def set_random_states(states: Tensors, device: torch.device) -> None:
    """Go on from `random_states`."""
    torch.set_rng_state(states["rng"][f"{dist.get_rank()}.cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states["rng"][f"{dist.get_rank()}.cuda"], device)
