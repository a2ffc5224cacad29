"""The solvers' status is read from the solution, never from the solver's word "optimal"."""

from __future__ import annotations

import random

import pulp
import pytest

from parplan.planner.request import SolverName
from parplan.planner.solver import Problem, Unsolved, chosen, weighted
from parplan.profiles.errors import SolverError

BOTH = pytest.mark.parametrize("solver", list(SolverName))


def knapsack(capacity=10.0):
    """Maximises 10 a + 13 b + 7 c with weights 5, 6, 4: at capacity 10 the best is b and c, 20."""
    problem = Problem("knapsack")
    items = {name: problem.binary(f"x_{name}") for name in "abc"}
    problem.require(
        weighted((items[name], weight) for name, weight in zip("abc", (5.0, 6.0, 4.0), strict=True))
        <= capacity,
        "C1",
    )
    problem.minimize(
        weighted(
            (items[name], -value) for name, value in zip("abc", (10.0, 13.0, 7.0), strict=True)
        )
    )
    return problem, items


@BOTH
def test_a_small_problem_is_solved_and_proven(solver):
    problem, items = knapsack()

    solution = problem.solve(solver)

    assert solution.proven
    assert solution.objective == pytest.approx(-20)
    assert [name for name, item in items.items() if item.value() > 0.5] == ["b", "c"]


def grown(seed, steps):
    """Yields a random problem after each of its changes: further rows, or other costs."""
    chance = random.Random(seed)
    problem = Problem("grown")
    items = [problem.binary(f"x_{i}") for i in range(8)] + [problem.continuous("z")]
    problem.require(weighted((item, 1.0) for item in items) >= 3, "C0")
    for step in range(steps):
        if step % 2:
            weights = [(item, chance.uniform(0, 2)) for item in items[:8]]
            problem.require(weighted(weights) <= chance.uniform(2, 6), f"C{step}")
        problem.minimize(weighted((item, chance.uniform(0.5, 3)) for item in items))
        yield problem


@BOTH
@pytest.mark.parametrize("seed", range(4))
def test_a_problem_that_is_changed_and_solved_again_has_the_answer_of_a_new_one(solver, seed):
    again = []
    for problem in grown(seed, 6):
        again.append(problem.solve(solver).objective)

    new = []
    for steps in range(1, 7):
        *_, problem = grown(seed, steps)
        new.append(problem.solve(solver).objective)
    assert again == pytest.approx(new, abs=1e-6)


def test_highs_keeps_its_model_between_the_solves_of_a_problem():
    models = []
    for problem in grown(0, 3):
        problem.solve(SolverName.HIGHS)
        models.append(problem._problem.solverModel)

    assert models[0] is models[1] is models[2]
    assert models[0].getNumRow() == problem.size[1]


@BOTH
def test_an_infeasible_problem_has_no_solution_although_it_carries_values(solver):
    problem, items = knapsack()
    problem.require(weighted((item, 1.0) for item in items.values()) == 3, "C2")

    assert problem.solve(solver) is None


@BOTH
def test_an_unbounded_problem_is_an_error_and_no_answer(solver):
    problem = Problem("unbounded")
    x = problem.continuous("x")
    problem.minimize(weighted([(x, -1.0)]))

    with pytest.raises(SolverError, match=f"{solver} ended without an answer"):
        problem.solve(solver)


@BOTH
def test_a_continuous_variable_has_its_lower_bound(solver):
    problem = Problem("bound")
    x = problem.continuous("x", lower=2.5)
    problem.minimize(weighted([(x, 1.0)]))

    assert problem.solve(solver).objective == pytest.approx(2.5)


def hard_problem():
    """Returns a bottleneck assignment with a counting row, which takes seconds to prove.

    It has no feasible point before the first hundredth of a second.
    """
    problem = Problem("hard")
    pace = problem.continuous("Z")
    rows = [
        [
            (
                problem.binary(f"z_{s}_{c}"),
                1 + (7 * s + 3 * c) % 20,
                1e4 + (s * 977 + c * 7919) % 89989,
            )
            for c in range(40)
        ]
        for s in range(25)
    ]
    for s, row in enumerate(rows):
        problem.require(weighted((z, 1.0) for z, _, _ in row) == 1, f"C1_{s}")
        problem.require(weighted((z, count * time) for z, count, time in row) <= pace, f"C3_{s}")
    problem.require(weighted((z, float(count)) for row in rows for z, count, _ in row) == 175, "C2")
    problem.minimize(
        weighted([(pace, 10.0), *((z, count * time) for row in rows for z, count, time in row)])
    )
    return problem


@BOTH
def test_time_that_runs_out_before_any_point_is_not_taken_for_infeasible(solver):
    with pytest.raises(Unsolved):
        hard_problem().solve(solver, time_limit_s=1e-4)


def test_a_time_limit_that_has_passed_is_not_taken_for_none():
    """HiGHS ignores a negative limit and would run to the end."""
    with pytest.raises(Unsolved):
        hard_problem().solve(SolverName.HIGHS, time_limit_s=-0.5)


def test_a_point_found_before_the_time_ran_out_is_not_called_proven(monkeypatch):
    problem, _ = knapsack()
    solve = pulp.LpProblem.solve

    def cut_off(self, *arguments, **options):
        status = solve(self, *arguments, **options)
        self.sol_status = (
            pulp.LpSolutionIntegerFeasible
        )  # PuLP's status of a cut-off solve, whose other status is Optimal
        return status

    monkeypatch.setattr(pulp.LpProblem, "solve", cut_off)

    assert not problem.solve(SolverName.CBC).proven


def test_a_missing_solver_names_the_other_one(monkeypatch):
    monkeypatch.setattr(pulp.PULP_CBC_CMD, "pulp_cbc_path", "/nowhere/cbc")
    with pytest.raises(SolverError, match="cbc is not installed") as error:
        knapsack()[0].solve(SolverName.CBC)
    assert "highs" in error.value.hint

    monkeypatch.setattr(pulp.HiGHS, "available", lambda self: False)
    with pytest.raises(SolverError, match="highs is not installed") as error:
        knapsack()[0].solve(SolverName.HIGHS)
    assert "cbc" in error.value.hint


def test_a_solver_that_crashes_is_an_error_that_says_so(monkeypatch, tmp_path):
    crashing = tmp_path / "cbc"
    crashing.write_text("#!/bin/sh\nexit 139\n")
    crashing.chmod(0o755)
    monkeypatch.setattr(pulp.PULP_CBC_CMD, "pulp_cbc_path", str(crashing))

    with pytest.raises(SolverError, match="cbc failed: ") as error:
        knapsack()[0].solve(SolverName.CBC)

    assert "highs" in error.value.hint
    assert error.value.exit_code == 4


def test_a_choice_is_read_by_its_largest_value():
    class Variable:
        def __init__(self, value):
            self._value = value

        def value(self):
            return self._value

    assert chosen({"a": Variable(1e-9), "b": Variable(0.9999999), "c": Variable(None)}) == "b"
