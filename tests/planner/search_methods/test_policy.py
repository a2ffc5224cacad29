"""The policy gradient: its gradient, its rewards, and points that lie in the space."""

from __future__ import annotations

from math import inf
from random import Random

import numpy as np
import pytest

from parplan.planner.search_methods.exhaustive import every_point
from parplan.planner.search_methods.method_space import MethodSpace
from parplan.planner.search_methods.policy import Choice, Policy, learn, parts_of, rewards_of
from parplan.planner.search_methods.policy import tilted_split as tilted
from tests.planner.search_methods.test_methods import on_pools, tiny


def test_a_score_is_the_gradient_of_the_logarithm_of_the_probability():
    features = np.array([[1.0, 0.0, 1.0], [0.0, 1.0, 1.0], [1.0, 1.0, 0.0]])
    weights, small = np.array([0.3, -0.2, 0.5]), 1e-6

    def log_odds(at):
        choice = Choice(features)
        choice.move(at)
        return np.log(np.diff(choice.odds()[0], prepend=0.0))

    choice = Choice(features)
    choice.move(weights)
    value, score = choice.drawn(Random(0))
    for column in range(3):
        step = small * np.eye(3)[column]
        slope = (log_odds(weights + step) - log_odds(weights - step))[value] / (2 * small)
        assert score[column] == pytest.approx(slope, abs=1e-6)


def test_values_that_are_not_allowed_are_never_drawn():
    choice, draw = Choice(np.eye(4)), Random(0)

    assert {choice.drawn(draw, (1, 3))[0] for _ in range(50)} == {1, 3}


def test_a_step_of_the_gradient_makes_the_better_value_more_likely():
    choice, draw = Choice(np.eye(2)), Random(0)
    for _ in range(30):
        drawn = [choice.drawn(draw) for _ in range(8)]
        steps_s = np.array([1.0 if value else 2.0 for value, _ in drawn])
        learn([[(choice, score)] for _, score in drawn], rewards_of(steps_s))

    assert choice.odds()[0][0] < 0.1


def test_points_that_do_not_fit_have_the_least_reward():
    rewards = rewards_of(np.array([1.0, inf, 2.0]))

    assert rewards[0] > rewards[2] > rewards[1]
    assert rewards.mean() == pytest.approx(0)
    assert not rewards_of(np.array([inf, inf])).any()
    assert not rewards_of(np.array([3.0, 3.0])).any()


@pytest.mark.parametrize("request_of", [tiny, on_pools])
def test_points_of_a_policy_lie_in_the_space(request_of):
    space = MethodSpace(request_of(3))
    policy = Policy(space, Random(0))
    every = {point for layout in space.layouts for point in every_point(space, layout)}

    for _ in range(20):
        point, taken = policy.point()
        parts = list(parts_of(point.layout))

        assert point in every
        assert taken
        assert len(parts) == point.layout.mesh.pp
        assert sum(tilted(point.layout, 2.0, space)) == space.num_blocks
