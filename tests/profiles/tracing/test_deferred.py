"""Deferred initialisation: modules without memory, then values one parameter at a time."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from parplan.profiles.tracing.deferred import Deferred


class Everything(nn.Module):
    """Makes its values in many ways."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 32)
        self.scaled = nn.Parameter(torch.randn(40, 50) * 0.02)
        self.orthogonal = nn.Linear(24, 48)
        nn.init.orthogonal_(self.orthogonal.weight)
        self.truncated = nn.Parameter(torch.empty(50, 60))
        nn.init.trunc_normal_(self.truncated, std=0.5, a=-1.0, b=1.0)
        self.identity = nn.Parameter(torch.empty(16, 16))
        nn.init.eye_(self.identity)
        self.twice = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.twice[1].load_state_dict(self.twice[0].state_dict())
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, 3)]
        self.register_buffer("visible", torch.tril(torch.ones(9, 9)))
        with torch.no_grad():
            self.linear.weight[0].zero_()


@pytest.fixture(scope="module")
def made() -> tuple[Everything, Deferred]:
    deferred = Deferred(at_least_bytes=0, seed=5)
    with deferred:
        module = Everything()
    return module, deferred


def values(made: tuple[Everything, Deferred], seed: int = 5) -> dict[str, torch.Tensor]:
    module, deferred = made
    return {
        name: deferred.value(tensor, seed)
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
    }


def test_nothing_has_memory(made):
    assert all(parameter.is_meta for parameter in made[0].parameters())


def test_values_are_what_the_constructors_draw(made):
    drawn = values(made)

    assert drawn["linear.weight"].abs().max() <= 1 / 8
    assert drawn["linear.weight"][1:].std() == pytest.approx(
        1 / 8 / 3**0.5, rel=0.1
    )  # uniform in +- 1 / sqrt(64)
    assert drawn["linear.weight"][0].abs().max() == 0
    assert drawn["scaled"].std() == pytest.approx(0.02, rel=0.1)
    assert drawn["truncated"].abs().max() <= 1
    assert drawn["truncated"].std() == pytest.approx(
        0.44, rel=0.1
    )  # of a normal of 0.5 cut at two deviations
    torch.testing.assert_close(
        drawn["orthogonal.weight"].T @ drawn["orthogonal.weight"], torch.eye(24)
    )
    assert torch.equal(drawn["identity"], torch.eye(16))
    assert torch.equal(drawn["visible"], torch.tril(torch.ones(9, 9)))


def test_a_value_depends_on_the_seed_and_on_nothing_else(made):
    before = values(made)
    drawn = values(made)
    second = values(made, seed=6)
    alone = made[1].value(made[0].scaled, 5)

    assert all(torch.equal(before[name], drawn[name]) for name in before)
    assert torch.equal(alone, before["scaled"])
    assert not torch.equal(before["scaled"], second["scaled"])


def test_copies_of_one_draw_stay_equal_and_other_draws_differ(made):
    drawn = values(made)

    assert torch.equal(drawn["twice.0.weight"], drawn["twice.1.weight"])
    assert not torch.equal(drawn["scaled"].flatten()[:100], drawn["truncated"].flatten()[:100])


def test_what_the_code_reads_is_there_while_it_is_made(made):
    assert made[0].rates == pytest.approx([0, 0.05, 0.1])


def test_small_tensors_are_made_at_once():
    with Deferred(at_least_bytes=4 * 32 * 64):
        linear = nn.Linear(64, 32)

    assert linear.weight.is_meta
    assert not linear.bias.is_meta


def test_values_of_a_state_that_is_loaded_are_kept():
    whole = nn.Linear(8, 8)
    deferred = Deferred(at_least_bytes=0)
    with deferred:
        linear = nn.Linear(8, 8)
        linear.load_state_dict(whole.state_dict())

    assert torch.equal(deferred.value(linear.weight, 0), whole.weight)
