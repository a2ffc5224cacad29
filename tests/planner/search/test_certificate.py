"""An integer program certifies the plan of a search, and finds the fault of a closed form."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.schedules.schedule import Schedule
from parplan.planner.master import Master
from parplan.planner.objective import Objective
from parplan.planner.plan.certificate_record import Certified
from parplan.planner.plan.plan_file import any_plan_from_document, plan_to_document
from parplan.planner.request import Constraints, SearchOptions, SolverName
from parplan.planner.search import certificate, one_candidate
from parplan.planner.search.certificate import AGREES
from parplan.planner.search.column_names import MOST_CHARACTERS, ColumnNames
from parplan.planner.solver import Problem, counted_programs
from parplan.planner.stage_columns.columns import RankColumns
from parplan.profiles.machines.machine_catalog import load_cluster, load_stack, with_gpus
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.spec import TrainingSpec
from parplan.profiles.units import GIB
from tests.helpers.cases import mostly_slow
from tests.helpers.instances import PINS
from tests.helpers.planning import find_plan
from tests.helpers.pools import two_pools

TRAINING = TrainingSpec(global_batch_size=32, seq_length=1024, stack=load_stack("megatron-core"))
DENSE, EXPERTS = load_model("gpt-2.5b").spec, load_model("mixtral-tiny").spec
UNLIKE = load_model("deepseek-tiny").spec
CLUSTER = with_gpus(load_cluster("a100-80gb"), 8)
TIGHT = SearchOptions(memory_limit_bytes=10 * GIB)
ONE, EQUAL, UNEQUAL = (
    Constraints(pp=(1,), tp=(1,)),
    Constraints(pp=(2,), schedule=(Schedule.INTERLEAVED,), micro_batch_size=(1,)),
    Constraints(pp=(4,), schedule=(Schedule.ONE_F_ONE_B,), micro_batch_size=(1,)),
)
FEW_GPUS = with_gpus(CLUSTER, 4)
REQUESTS = {
    "one-rank": (DENSE, CLUSTER, ONE, TIGHT),
    "equal-ranks": (DENSE, CLUSTER, EQUAL, TIGHT),
    "unequal-ranks": (DENSE, CLUSTER, UNEQUAL, TIGHT),
    "tied-embeddings": (replace(DENSE, tied_embeddings=True), CLUSTER, UNEQUAL, TIGHT),
    "recompute-ahead": (
        DENSE,
        CLUSTER,
        replace(UNEQUAL, tp=(1,), recompute=tuple(Recompute), schedule=(Schedule.EARLY_RECOMPUTE,)),
        TIGHT,
    ),
    "experts": (EXPERTS, FEW_GPUS, Constraints(), SearchOptions()),
    "unlike-blocks": (UNLIKE, FEW_GPUS, Constraints(pp=(2,)), SearchOptions()),
    "unlike-blocks-on-one-rank": (UNLIKE, FEW_GPUS, Constraints(pp=(1,)), SearchOptions()),
}


def planned(name, **options):
    model, cluster, pins, limits = REQUESTS[name]
    stack = load_stack("parplan") if name == "recompute-ahead" else TRAINING.stack
    training = replace(TRAINING, seq_length=min(1024, model.max_seq_length), stack=stack)
    return find_plan(model, cluster, training, constraints=pins, options=replace(limits, **options))


def kept_programs():
    """Returns a list, and the receiver that adds programs with their records to it."""
    kept = []
    return kept, lambda record, problem: kept.append((record, problem))


@pytest.mark.parametrize(
    "name", mostly_slow(REQUESTS, REQUESTS.keys() - {"recompute-ahead", "experts"})
)
def test_the_program_agrees_with_the_search(name):
    plan = planned(name)

    certificate = plan.search.certificate
    assert certificate.plan is not None
    assert certificate.plan.over is Certified.COLUMNS
    assert certificate.plan.gap == 0.0
    assert certificate.programs >= 1
    assert certificate.variables >= certificate.plan.variables > 2
    assert certificate.closed <= certificate.layouts


@pytest.mark.parametrize("seed", [3, 5, pytest.param(7, marks=pytest.mark.slow)])
def test_the_program_agrees_over_pools(seed):
    instance = two_pools(seed)
    plan = find_plan(instance.model, instance.cluster, instance.training, constraints=PINS)

    assert plan.search.certificate.plan.gap == 0.0


def test_highs_certifies_as_cbc_does():
    by_cbc, by_highs = planned("one-rank"), planned("one-rank", solver=SolverName.HIGHS)

    assert by_highs.search.certificate.solver is SolverName.HIGHS
    assert by_highs.search.certificate.plan == by_cbc.search.certificate.plan


def without_the_fastest(monkeypatch):
    """Makes closed forms of ranks without a pipeline miss their fastest column."""
    made = RankColumns._fastest_alone

    def second_best(self, priced, rows):
        best = made(self, priced, rows)
        return made(self, priced, rows[rows != best[0]]) if len(best) else best

    monkeypatch.setattr(RankColumns, "_fastest_alone", second_best)


@pytest.mark.slow
def test_a_column_that_a_closed_form_misses_is_found_and_becomes_the_plan(monkeypatch):
    right = planned("one-rank")
    without_the_fastest(monkeypatch)

    plan = planned("one-rank")

    assert plan.search.certificate.plan.gap > AGREES
    assert plan.predicted.step_time_s == right.predicted.step_time_s
    assert plan.search.value == right.search.value
    assert plan.search.bound <= plan.search.value


@pytest.mark.slow
def test_a_choice_that_a_closed_form_misses_is_found_on_equal_ranks(monkeypatch):
    made = one_candidate.fastest_apart

    def slowest_rank_doctored(layout, options, **rules):
        fastest = [min(columns, key=lambda column: column.time_s) for columns in options]
        fewer = [
            [c for c in columns if c is not best] or columns
            for columns, best in zip(options, fastest, strict=True)
        ]
        return made(layout, fewer, **rules)

    right = planned("equal-ranks")
    monkeypatch.setattr(one_candidate, "fastest_apart", slowest_rank_doctored)

    assert right.search.certificate.plan.gap == 0.0
    assert planned("equal-ranks").search.certificate.plan.gap > AGREES


def test_a_program_that_misses_the_choice_of_the_search_has_a_negative_gap(monkeypatch):
    monkeypatch.setattr(Master, "fastest", slower(0.01))

    assert planned("one-rank").search.certificate.plan.gap == pytest.approx(-0.01, rel=0.01)


def slower(share):
    made = Master.fastest

    def fastest(self, *limits):
        choice = made(self, *limits)
        return replace(choice, step_s=choice.step_s * (1 + share))

    return fastest


@pytest.mark.slow
def test_a_search_that_stopped_early_has_no_certifying_program(monkeypatch):
    class Over:
        is_over = True

    made = certificate.certified

    def late(replayed, record, session):
        session.deadline = Over()
        return made(replayed, record, session)

    monkeypatch.setattr("parplan.planner.search.search_results.certified", late)
    found = planned("unequal-ranks").search.certificate

    assert found.plan is None
    assert found.programs > 0  # those of the search


def test_the_memory_objective_counts_its_programs():
    plan = find_plan(DENSE, CLUSTER, TRAINING, Objective.MEMORY, constraints=ONE, options=TIGHT)

    assert plan.search.certificate.plan is None
    assert plan.search.certificate.programs >= 2  # least redundancy, then least time


@pytest.mark.slow
def test_a_plan_has_the_same_bytes_twice_and_its_file_reads_back():
    first, second = planned("equal-ranks"), planned("equal-ranks")

    document = plan_to_document(first)
    assert document == plan_to_document(second)
    assert any_plan_from_document(document, "plan.yaml").search == first.search


def test_an_older_file_without_a_certificate_is_read():
    document = plan_to_document(planned("one-rank"))
    del document["search"]["certificate"]

    assert any_plan_from_document(document, "plan.yaml").search.certificate is None


def test_programs_are_counted_where_they_run():
    with counted_programs() as outer:
        one_program()
        with counted_programs() as inner:
            one_program()
    one_program()

    assert (outer.programs, outer.variables, outer.rows) == (2, 2, 2)
    assert (inner.programs, inner.variables, inner.rows) == (1, 1, 1)


def one_program():
    problem = Problem("tiny")
    z = problem.binary("z")
    problem.require(z >= 1, "one")
    problem.minimize(z)
    problem.solve(SolverName.CBC)


def test_names_of_columns_can_be_read():
    kept, keep = kept_programs()
    planned("one-rank", on_program=keep)
    ((record, problem),) = kept

    names = problem.names
    assert len(names) == len(set(names)) == record.variables
    assert all(re.fullmatch(r"[A-Za-z][A-Za-z0-9_]{0,99}", name) for name in names)
    assert any(re.fullmatch(r"z_rank0_54blocks_zero2x\d+_zero3x\d+", name) for name in names)


def test_equal_names_get_numbers():
    names = ColumnNames()

    assert [names.unique("z a-b") for _ in range(3)] == ["z_a_b", "z_a_b__2", "z_a_b__3"]


def test_long_names_stay_within_their_length_and_differ():
    names = ColumnNames()
    given = [names.unique("z" * length) for length in (60, *[90] * 30, 80)]

    assert len(set(given)) == len(given)
    assert max(map(len, given)) <= MOST_CHARACTERS
