"""A split backward pass reduces each FSDP unit beside the weight gradients of the next one."""

from __future__ import annotations

import itertools

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.pipelining._backward import stage_backward_input

from parplan.executor.measuring.update_operations import world_of_one
from parplan.executor.sharding.zero_units import settle_weight_gradients, weight_gradients

WIDTHS = (4, 5, 6, 3)


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    sizes = itertools.pairwise(WIDTHS)
    return nn.Sequential(*(nn.Sequential(nn.Linear(*size), nn.Tanh()) for size in sizes))


def test_a_unit_is_reduced_before_the_weights_of_the_next_one_have_gradients(monkeypatch):
    plain, entered = layers(), torch.ones(2, WIDTHS[0], requires_grad=True)
    plain(entered).sum().backward()
    reduced = []
    usual = FSDPParamGroup.post_backward

    def noted(group: FSDPParamGroup, *unused: object) -> None:
        there = [layer[0].weight.grad is not None for layer in body]
        usual(group, *unused)
        if any(there):
            reduced.append(there)

    with world_of_one(torch.device("cpu")):
        body, mesh = layers(), init_device_mesh("cpu", (1,))
        for layer in body:
            fully_shard(layer, mesh=mesh, reshard_after_forward=False)
        fully_shard(body, mesh=mesh)
        body.set_reshard_after_backward(False)
        body.set_is_last_backward(False)
        x = torch.ones(2, WIDTHS[0], requires_grad=True)
        out = body(x)
        parameters = list(body.parameters())
        _, groups = stage_backward_input([out], [torch.ones_like(out)], [x], iter(parameters))
        monkeypatch.setattr(FSDPParamGroup, "post_backward", noted)
        weight_gradients(body, parameters, groups)
        settle_weight_gradients(body)
        body.set_is_last_backward(True)
        settle_weight_gradients(body)
        for layer in body:
            layer.reshard()
        gradients = [each.grad.to_local() for each in body.parameters()]

    assert reduced == [[False, False, True], [False, True, False], [True, False, False]]
    for gradient, expected in zip(gradients, plain.parameters(), strict=True):
        torch.testing.assert_close(gradient, expected.grad)
