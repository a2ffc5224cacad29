"""A machine's own profile from cases to file, with a program in place of the operators."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest

from parplan.planner.calibration.profiling import (
    ProfileRequest,
    add_records,
    faster,
    has_links,
    measure_operators,
    requested_cases,
)
from parplan.profiles.documents.schema import document
from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.applied_profile import apply_profile
from parplan.profiles.machines.machine_catalog import load_stack
from parplan.profiles.machines.measurements import (
    Case,
    CaseFigures,
    CaseOutcome,
    CasePass,
    Record,
    Timing,
)
from parplan.profiles.machines.user_profile import read_profile
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.spec import Precision, TrainingSpec
from parplan.profiles.profiler.environment import environment
from parplan.profiles.profiler.journal import journal_path
from parplan.profiles.provenance import Kind

PROGRAM = "tests.helpers.programs:machine"
MODEL = load_model("gpt-tiny")


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Returns a session's records where one operator does not fit and another hangs."""
    output = tmp_path_factory.mktemp("profile") / "mine.yaml"
    request = ProfileRequest(
        output=output,
        device="cpu",
        precision=Precision.FP32,
        program=PROGRAM,
        models=(MODEL,),
        hang_limit_s=2.0,
    )
    cases = requested_cases(request, environment("cpu"))
    hanging = [case for case in cases if case.work == "attention"]
    request = replace(request, cases=tuple(case for case in cases if case not in hanging[1:]))
    return request, measure_operators(request, None)


def records(session, work):
    return [record for record in session.profile.records if record.case.work == work]


@pytest.mark.slow
def test_what_fails_is_recorded_and_all_else_measured(measured):
    _, session = measured

    assert {record.outcome for record in records(session, "gelu")} == {CaseOutcome.OUT_OF_MEMORY}
    assert {record.outcome for record in records(session, "attention")} == {CaseOutcome.HUNG}
    remaining = [
        record
        for record in session.profile.records
        if record.case.work not in ("gelu", "attention")
    ]
    assert {record.outcome for record in remaining} == {CaseOutcome.MEASURED}
    assert {"linear", "layer_norm", "block", "adamw", "device_copy"} <= {
        record.case.work for record in remaining
    }
    assert not session.missed


@pytest.mark.slow
def test_the_file_has_it_all_and_the_journal_is_gone(measured):
    request, session = measured

    assert document(read_profile(request.output)) == document(session.profile)
    assert not journal_path(request.output).exists()


def test_the_same_command_measures_nothing_again(measured):
    request, session = measured
    second = measure_operators(
        replace(request, program="tests.helpers.programs:no_such_function", minutes=0.01), None
    )

    assert second.profile.records == session.profile.records


def test_curves_are_those_of_the_machine(measured):
    _, session = measured
    compute = session.profile.profile.compute

    assert compute.forward.kind is Kind.INTERPOLATED
    assert compute.named["layer_norm"].forward.kind is Kind.INTERPOLATED
    assert compute.flash_forward.kind is Kind.ANALYTIC  # it hung
    assert "gelu" not in compute.named
    assert session.profile.profile.in_step.stack == "parplan"


def test_a_plan_with_it_takes_the_times_that_were_measured(measured):
    _, session = measured
    training = TrainingSpec(
        global_batch_size=16, seq_length=64, precision="fp32", stack=load_stack("parplan")
    )
    cluster, training = apply_profile(session.profile, None, training, "mine.yaml", force=False)
    assert cluster.device.peak("fp32") == pytest.approx(0.1e12, rel=0.5)
    assert cluster.profile is not None


def test_a_budget_that_is_over_leaves_what_was_not_reached(tmp_path):
    request = ProfileRequest(
        output=tmp_path / "mine.yaml",
        device="cpu",
        precision=Precision.FP32,
        program=PROGRAM,
        models=(MODEL,),
        minutes=1e-6,
    )

    with pytest.raises(ConfigError, match="nothing was measured"):
        measure_operators(request, None)


def test_a_profile_at_another_precision_is_not_added_to(measured):
    request, _ = measured

    with pytest.raises(ConfigError, match="precision fp32, this session with bf16"):
        measure_operators(replace(request, precision=Precision.BF16), None)


def collective(n_bytes: int, ranks: int) -> Record:
    sizes = (("bytes", n_bytes), ("nodes", 1), ("ranks_per_node", ranks), ("groups", 1))
    case = Case(
        work="all_reduce",
        sizes=sizes,
        precision="fp32",
        passes=(CasePass(name="time", curve="all_reduce", sizes=tuple(size for _, size in sizes)),),
    )
    times = {"time": Timing(median_us=50 + n_bytes / 1e3, spread=0.0, repeats=5)}
    return Record(case=case, outcome=CaseOutcome.MEASURED, measured=CaseFigures(times=times))


@pytest.mark.slow
def test_collectives_of_elsewhere_join_the_profile(measured, tmp_path):
    request, session = measured
    output = tmp_path / "mine.yaml"
    output.write_text(request.output.read_text())
    assert not has_links(output, 2)

    joined = add_records(
        output, [collective(2**i, 2) for i in range(10, 27, 2)], "cpu", "comm.yaml"
    ).profile

    assert has_links(output, 2)
    assert not has_links(output, 4)
    assert len(joined.records) == len(session.profile.records) + 9
    assert joined.profile.intra.kind is Kind.MEASURED
    assert document(read_profile(output)) == document(joined)


@pytest.mark.parametrize(
    ("device", "message"),
    [("NVIDIA H200", "measured on NVIDIA H200, .* on cpu"), (None, "no such profile")],
)
def test_collectives_of_another_device_or_for_no_profile_are_refused(
    measured, tmp_path, device, message
):
    request, _ = measured
    output = request.output if device else tmp_path / "none.yaml"

    with pytest.raises(ConfigError, match=message):
        add_records(output, [collective(1024, 2)], device, "comm.yaml")


def test_of_two_looks_the_faster_timing_of_every_pass_counts():
    def linear(forward_us: float, backward_us: float) -> Record:
        taken = {"forward": forward_us, "backward": backward_us}
        case = Case(
            work="gelu",
            sizes=(("tokens", 8), ("width", 8)),
            precision="fp32",
            passes=tuple(CasePass(name=name) for name in taken),
        )
        times = {
            name: Timing(median_us=taken_us, spread=0.0, repeats=5)
            for name, taken_us in taken.items()
        }
        return Record(case=case, outcome=CaseOutcome.MEASURED, measured=CaseFigures(times=times))

    (fastest,) = faster([linear(10, 30)], [linear(20, 25)])

    assert {name: timing.median_us for name, timing in fastest.measured.times.items()} == {
        "forward": 10,
        "backward": 25,
    }
    assert faster([linear(10, 30)], []) == (linear(10, 30),)


def test_ctrl_c_before_anything_says_how_fast_the_machine_is_is_one_and_keeps_the_journal(tmp_path):
    request = ProfileRequest(
        output=tmp_path / "mine.yaml",
        device="cpu",
        precision=Precision.FP32,
        program=PROGRAM,
        models=(MODEL,),
    )
    cases = requested_cases(request, environment("cpu"))
    norms = [case for case in cases if case.work == "layer_norm"]
    request = replace(
        request, cases=(norms[0], *[case for case in cases if case.work == "linear"][:1])
    )
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupt(progress: object) -> None:
        if progress.done == 1:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        measure_operators(request, interrupt)
    signal.signal(signal.SIGINT, before)

    assert journal_path(request.output).exists()
    assert not request.output.exists()
