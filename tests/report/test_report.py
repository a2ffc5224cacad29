"""The text of a plan: each width has all numbers, equal stages share a row, also off terminals."""

from __future__ import annotations

import io
import math
import re
from dataclasses import replace

import pytest
from rich.console import Console

from parplan.commands.options.target_options import TargetOptions
from parplan.commands.requests.requests import request_of
from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.schedules.schedule import Schedule
from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.candidates.meshes import Pruned
from parplan.planner.objective import Objective, Prefer
from parplan.planner.plan.certificate_record import Certificate, Certified, CertifyingProgram
from parplan.planner.plan.plan import Plan
from parplan.planner.plan.prediction import (
    Band,
    ErrorBand,
    Quantity,
    RunnerUp,
    Status,
    TieChoice,
)
from parplan.planner.request import Progress, SolverName
from parplan.profiles.documents.files import require_writable
from parplan.profiles.documents.schema import document
from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.stack_terms import Residuals, Term, Terms
from parplan.profiles.models.documents import Documents
from parplan.profiles.profiler import session_progress as profiling
from parplan.profiles.provenance import Kind
from parplan.profiles.stack import AttentionKernel, AvailableKernel, Stack
from parplan.profiles.units import GIB, MIB, parse_size
from parplan.report.machines.catalogue_tables import print_stacks, stack_rows
from parplan.report.names import graph_of
from parplan.report.plan_documents import plan_document, plan_schema
from parplan.report.plans.layer_table import print_layers
from parplan.report.plans.memory_table import layers_text, rows
from parplan.report.plans.summary import print_summary
from parplan.report.plans.summary_context import SummaryContext
from parplan.report.progress_bars import profile_bar, progress_bar
from parplan.report.searches.pruned_table import grouped
from parplan.report.text import FIXED_WIDTH, aligned, console, gib_text, joined, seconds_text
from tests.helpers.planning import estimate_plan


def estimated(
    pp: int = 4,
    dp: int = 2,
    tp: int = 2,
    *,
    virtual_stages: int = 1,
    schedule: Schedule = Schedule.ONE_F_ONE_B,
    **choices: object,
) -> Plan:
    request = request_of(
        TargetOptions(
            model="gpt-20b", gpus=pp * dp * tp, gpu="a100-80gb", gpus_per_node=pp * dp * tp
        )
    )
    layout = ParallelLayout(
        mesh=Mesh(pp=pp, dp=dp, tp=tp),
        schedule=schedule,
        virtual_stages=virtual_stages,
        micro_batch_size=1,
        num_micro_batches=1024 // dp,
        sequence_parallel=tp > 1,
    )
    return estimate_plan(request.model, request.cluster, request.training, layout, **choices)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return estimated(zero=1, recompute=Recompute.SELECTIVE)


def text_of(plan: Plan, width: int, *, whole: bool = True, **context: object) -> str:
    out = Console(file=io.StringIO(), width=width, highlight=False)
    print_summary(plan, out, SummaryContext(whole=whole, **context))
    print_layers(plan, out)
    return out.file.getvalue()


@pytest.mark.parametrize("width", [80, 100, 120])
def test_no_line_is_wider_than_the_terminal(plan, width):
    assumed = (
        "--gpu a100-80gb",
        "--gpus-per-node 8",
        "--global-batch-size 1024 (the model's)",
        "--precision bf16",
        "--memory-margin 0.08",
    )
    text = text_of(plan, width, assumed=assumed)

    assert max(map(len, text.splitlines())) <= width


def test_documents_say_their_mean_and_the_flops_that_they_save(plan):
    packed = replace(plan, training=replace(plan.training, documents=Documents(mean=500)))
    unfused = replace(packed, training=replace(packed.training, attention=AttentionKernel.UNFUSED))
    whole = graph_of(plan).model_flops
    fewer = 100 * (1 - graph_of(packed).model_flops / whole)

    assert "documents" not in text_of(plan, 400)
    assert "packed from documents of 500 tokens on average" in text_of(packed, 400)
    assert f"{fewer:.1f} % fewer model FLOPs" in text_of(packed, 400)
    assert "un-fused attention gains nothing" not in text_of(packed, 400)
    assert "un-fused attention gains nothing" in text_of(unfused, 400)


@pytest.mark.parametrize("width", [40, 80, 120])
def test_every_number_of_the_memory_table_is_whole_at_every_width(plan, width):
    text = text_of(plan, width)

    for memory in plan.predicted.memory_gib:
        rows = [line for line in text.splitlines() if re.match(rf"  {memory.stage} ", line)]
        assert len(rows) == (2 if width < 60 else 1)  # the table is printed in two parts
        assert [word for row in rows for word in row.split() if "." in word] == [
            f"{getattr(memory, name):.1f}"
            for name in (
                "parameters",
                "gradients",
                "optimizer",
                "activations",
                "temporaries",
                "reserve",
                "total",
            )
        ]


def test_the_text_is_ascii_without_trailing_blanks(plan):
    text = text_of(plan, 100)

    assert text.isascii()
    assert not [line for line in text.splitlines() if line != line.rstrip()]


def test_the_headings_are_whole_words_where_they_fit(plan):
    assert "temporaries  reserve" in text_of(plan, 120)
    assert "temps  reserve" in text_of(plan, 80)


def test_the_facts_of_a_plan_are_in_its_summary(plan):
    text = " ".join(text_of(plan, 120).split())

    assert "pp 4 x dp 2 x tp 2 1F1B, micro-batch 1 x 512" in text
    assert "ZeRO 1 recompute selective (norm1, norm2, activation), sequence parallel" in text
    assert f"({plan.predicted.step_time_s.kind})" in text
    assert f"{100 * plan.predicted.mfu.value:.1f} % MFU" in text
    assert "stage 0, the fullest;" in text


@pytest.mark.parametrize(
    ("kind", "said"), [(Kind.ANALYTIC, True), (Kind.INTERPOLATED, True), (Kind.MEASURED, False)]
)
def test_a_price_says_that_it_is_not_a_measurement(plan, kind, said):
    predicted = replace(plan.predicted, step_time_s=replace(plan.predicted.step_time_s, kind=kind))

    assert ("not a measurement" in text_of(replace(plan, predicted=predicted), 120)) is said


def with_band(plan: Plan, time: float, memory: float, rows: int = 700) -> Plan:
    band = ErrorBand(
        time=Band(share=time, rows=rows, stack="all", like={"stack mine": 33, "experts": 4}),
        memory=Band(share=memory, rows=30, stack="all"),
    )
    return replace(plan, predicted=replace(plan.predicted, error_band=band))


def test_the_error_band_stands_beside_step_and_memory_and_says_what_it_rests_on(plan):
    text = text_of(with_band(plan, 0.042, 0.005, rows=1234), 100)

    said = " ".join(text.split())
    assert re.search(r"  step +[\d,.]+ s \+- 4 % \(\w+\) ", text)
    assert re.search(r"  memory +[\d,.]+ GiB \(\+- 0\.5 %\) of 79\.2 ", text)
    assert (
        "+-: eight in ten of 1,234 held-out measured steps were within theirs; of this plan's "
        "kind: stack mine 33, experts 4 " in said
    )
    assert "band unknown" not in text


def test_a_plan_of_what_was_never_measured_has_no_band_and_says_so(plan):
    text = text_of(replace(plan, predicted=replace(plan.predicted, error_band=None)), 100)

    assert "+-" not in text
    assert "band unknown: no measured steps with anything on the host\n" in text


@pytest.mark.parametrize(
    ("attention", "overlap", "said"),
    [
        (AttentionKernel.FLASH, True, "mine flash (flash3) attention, gradient reduction hidden"),
        (AttentionKernel.UNFUSED, False, "mine unfused attention, gradient reduction not hidden"),
    ],
)
def test_the_stack_and_what_it_does_are_in_the_summary(plan, attention, overlap, said):
    stack = Stack(name="mine", flash_kernels=(AvailableKernel(kernel="flash3"),))
    training = replace(plan.training, stack=stack, attention=attention, overlap_grad_reduce=overlap)

    assert f"stack {said} step" in " ".join(text_of(replace(plan, training=training), 120).split())


@pytest.mark.parametrize(
    ("status", "interrupted", "said"),
    [
        (Status.OPTIMAL, False, "gap 2.0 %"),
        (Status.FEASIBLE, False, "stopped early; "),
        (Status.FEASIBLE, True, "stopped early (Ctrl-C); "),
        (Status.ESTIMATE, False, "nothing"),
    ],
)
def test_what_was_proven_is_said(plan, status, interrupted, said):
    plan = replace(plan, search=replace(plan.search, status=status, gap=0.02))

    line = next(
        line
        for line in text_of(plan, 120, interrupted=interrupted, elapsed_s=1.26).splitlines()
        if "proven" in line
    )

    assert said in line
    assert (", 1.3 s" in line) is (status is not Status.ESTIMATE)


def test_runners_up_say_how_much_slower_they_are(plan):
    step_s = plan.predicted.step_time_s.value
    runners_up = tuple(
        RunnerUp(
            mesh=plan.mesh,
            pipeline=plan.pipeline,
            sequence_parallel=False,
            peak_memory_gib=10.0 + n,
            redundancy_gib=5.0,
            step_time_s=Quantity(value=step_s * (1 + n / 100), kind=Kind.ANALYTIC),
        )
        for n in range(1, 6)
    )
    plan = replace(plan, search=replace(plan.search, runners_up=runners_up))
    lean = replace(plan, search=replace(plan.search, objective=Objective.MEMORY))

    assert re.search(
        r"also .*\(\+1\.0 %\)  11\.0 GiB  pp 4 x dp 2 x tp 2, 1F1B", text_of(plan, 120)
    )
    assert "(+2.0 %)" not in text_of(
        plan, 120, whole=False
    )  # the short form names the best of each mesh
    assert "(+5.0 %)" in text_of(plan, 120, whole=True)
    assert "11.0 GiB, 5.00 redundant" in text_of(lean, 120)


def tied(plan: Plan, *ties: tuple[float, float, bool]) -> Plan:
    """Returns the plan with runners-up of these slowdowns and shares of its memory."""
    step_s, peak = (
        plan.predicted.step_time_s.value,
        max(memory.total for memory in plan.predicted.memory_gib),
    )
    runners_up = tuple(
        RunnerUp(
            mesh=Mesh(pp=1, dp=n + 1, tp=1),
            pipeline=plan.pipeline,
            sequence_parallel=False,
            peak_memory_gib=share * peak,
            redundancy_gib=5.0,
            step_time_s=Quantity(value=step_s * (1 + slower), kind=Kind.ANALYTIC),
            inside_error_band=inside,
        )
        for n, (slower, share, inside) in enumerate(ties)
    )
    return replace(plan, search=replace(plan.search, runners_up=runners_up))


def test_plans_inside_the_error_band_are_ties_and_the_leanest_of_them_is_named(plan):
    plan = tied(
        with_band(plan, 0.04, 0.1), (0.01, 0.95, True), (0.03, 0.5, True), (0.05, 0.3, False)
    )
    text, lean = (
        " ".join(text_of(plan, 100).split()),
        gib_text(plan.search.runners_up[1].peak_memory_gib),
    )

    assert "(+1.0 %, tie)" in text
    assert "(+3.0 %, tie)" in text
    assert "(+5.0 %) " in text
    assert (
        "ties 2 other plans are inside the error band of the ratio to it; "
        "the leanest is pp 1 x dp 2 x tp 1, no pipeline, micro-batch 1 x 512 "
        f"({lean} GiB, +3.0 %) note"
    ) in text


def test_a_tie_that_saves_less_than_the_memory_band_is_not_the_leanest(plan):
    text = " ".join(text_of(tied(with_band(plan, 0.04, 0.1), (0.01, 0.91, True)), 100).split())

    assert (
        "ties 1 other plan is inside the error band of the ratio to it; "
        "the leanest is this plan note"
    ) in text


@pytest.mark.parametrize(
    ("losses", "said"),
    [
        pytest.param((0.01, 0.02), "the leanest and the most robust is this plan note", id="plan"),
        pytest.param(
            (0.03, 0.02),
            "the leanest is this plan; the most robust is pp 1 x dp 1 x tp 1, no pipeline, "
            "micro-batch 1 x 512 (",
            id="tie",
        ),
    ],
)
def test_the_most_robust_plan_is_named(plan, losses, said):
    of_plan, of_tie = losses
    plan = tied(with_band(plan, 0.04, 0.1), (0.01, 1.0, True))
    choice = TieChoice(prefer=Prefer.FASTEST, reason="it is the fastest", worst_loss=of_plan)
    (tie,) = plan.search.runners_up
    search = replace(plan.search, preference=choice, runners_up=(replace(tie, worst_loss=of_tie),))

    text = " ".join(text_of(replace(plan, search=search), 100).split())

    assert said in text
    assert " prefer " not in text


def test_a_plan_that_is_not_the_fastest_says_how_much_slower_it_is_and_why(plan):
    choice = TieChoice(prefer=Prefer.LEANEST, reason="it is lean", slowdown=0.021, worst_loss=0.03)

    search = replace(plan.search, status=Status.OPTIMAL, preference=choice)
    text = text_of(replace(plan, search=search), 100)

    assert re.search(r"prefer +leanest, 2\.1 % slower +it is lean", text)
    assert re.search(r"proven +gap [\d.]+ % of the fastest", text)


def test_without_ties_nothing_is_said_of_them(plan):
    assert "tie" not in text_of(tied(with_band(plan, 0.04, 0.1), (0.05, 0.5, False)), 100)


def test_under_the_memory_objective_an_equal_step_time_is_no_tie(plan):
    plan = tied(with_band(plan, 0.04, 0.1), (0.01, 0.5, True))

    assert "tie" not in text_of(
        replace(plan, search=replace(plan.search, objective=Objective.MEMORY)), 100
    )


RESIDUALS = Residuals(
    time_rows=1234, time_band=0.1, memory_rows=56, memory_band=0.08, memory_margin=0.09
)
TERMS = Terms(
    stacks={
        "nanotron": {
            "kernel_slowdown": Term(
                value=1.0834, low=1.0, high=1.5, unit="", rows=33, fitted_on=("a",)
            )
        }
    },
    residuals={
        "all": RESIDUALS,
        "nanotron": replace(RESIDUALS, time_rows=33, time_band=0.041, memory_rows=1),
    },
)


def test_stacks_are_listed_with_their_fitted_terms_and_bands(monkeypatch):
    monkeypatch.setattr("parplan.report.machines.catalogue_tables.shipped_terms", lambda: TERMS)
    out = console(io.StringIO())

    print_stacks(out)

    text = out.file.getvalue()
    assert re.search(
        r"^nanotron +flash \(flash2\) +4\.1 % \(33\) +8\.0 % \(all 56\) +1\.08 x 50 us +-$",
        text,
        re.MULTILINE,
    )
    assert re.search(
        r"^megatron-core .* 10\.0 % \(all 1,234\) .* 1 x 50 us +dp, tp, pp$", text, re.MULTILINE
    )
    assert re.search(r"^internevo +flash \(flash2\) .* dp, tp$", text, re.MULTILINE)
    assert max(map(len, text.splitlines())) <= FIXED_WIDTH


def test_the_list_of_stacks_fits_a_narrow_terminal(monkeypatch):
    monkeypatch.setattr("parplan.report.machines.catalogue_tables.shipped_terms", lambda: TERMS)
    out = Console(file=io.StringIO(), width=80, highlight=False)

    print_stacks(out)

    assert max(map(len, out.file.getvalue().splitlines())) <= 80


def test_the_rows_of_stacks_say_whose_band_it_is_and_the_bounds_of_their_terms(monkeypatch):
    monkeypatch.setattr("parplan.report.machines.catalogue_tables.shipped_terms", lambda: TERMS)

    rows = {row.name: document(row) for row in stack_rows()}

    assert rows["nanotron"]["time_band"] == {
        "share": 0.041,
        "rows": 33,
        "stack": "nanotron",
        "like": {},
    }
    assert rows["nanotron"]["memory_band"] == {
        "share": 0.08,
        "rows": 56,
        "stack": "all",
        "like": {},
    }
    assert rows["nanotron"]["terms"] == {
        "kernel_slowdown": {"value": 1.0834, "low": 1.0, "high": 1.5, "unit": "", "rows": 33}
    }
    assert rows["fsdp1"]["terms"] == {}


def test_stages_that_look_alike_are_one_row():
    plan = estimated(pp=8, dp=1, tp=1, recompute=Recompute.FULL)
    first = plan.predicted.memory_gib[0]
    alike = replace(
        plan.predicted, memory_gib=tuple(replace(first, stage=stage) for stage in range(8))
    )

    table = rows(replace(plan, predicted=alike))

    # 44 blocks on 8 stages: 6 on the first four, 5 on the others
    assert [(row.stages, layers_text(row, short=False)) for row in table] == [
        ("0", "embedding, 0-5"),
        ("1-3", "6-23 (6 each)"),
        ("4-6", "24-38 (5 each)"),
        ("7", "39-43, head"),
    ]


def test_interleaved_stages_show_their_chunks():
    plan = estimated(pp=4, virtual_stages=11, schedule=Schedule.INTERLEAVED)

    assert layers_text(rows(plan)[0], short=True) == "embed, 11 x 1 blocks"


def test_every_stage_of_a_long_pipeline_has_its_memory_in_the_whole_summary():
    plan = estimated(pp=22, dp=1, tp=1)
    stages = re.findall(r"^  (\d+) .* blocks|^  (\d+) +(?:embed|\d)", text_of(plan, 120), re.M)

    assert [int(one or other) for one, other in stages] == list(range(22))


def test_placements_are_listed_once_per_kind_of_layer(plan):
    text = text_of(plan, 100)

    assert text.count("qkv") == 1
    assert re.search(r"fc2 +Shard\(2\)@tp +Shard\(1\)@tp +weight Shard\(1\)@tp", text)
    assert "placements" not in text_of(estimated(tp=1), 100)


def test_pruned_candidates_are_grouped_by_reason_whatever_its_numbers():
    groups = grouped(
        [
            Pruned("a", "dp 3 does not divide 8"),
            Pruned("b", "too many"),
            Pruned("c", "dp 5 does not divide 8"),
        ]
    )

    assert [(group.count, group.example.candidate) for group in groups] == [(2, "a"), (1, "b")]


def check(value: object, schema: dict, definitions: dict, path: str) -> None:
    """Checks that `value` has exactly the keys of the schema, all the way down."""
    if "$ref" in schema:
        schema = definitions[schema["$ref"].rpartition("/")[2]]
    if "anyOf" in schema and value is not None:  # that, or null
        check(value, schema["anyOf"][0], definitions, path)
    elif isinstance(value, dict):
        properties, rest = schema.get("properties", {}), schema.get("additionalProperties")
        assert set(schema.get("required", ())) <= set(value), path
        for key, inner in value.items():
            assert key in properties or isinstance(rest, dict), f"{path}.{key}"
            check(inner, properties.get(key, rest), definitions, f"{path}.{key}")
    elif isinstance(value, list) and "items" in schema:
        for inner in value:
            check(inner, schema["items"], definitions, path)
    elif isinstance(value, str) and "enum" in schema:
        assert value in schema["enum"], path


def test_the_schema_describes_the_document_of_a_plan(plan):
    schema = plan_schema()

    check(plan_document(plan), schema, schema["$defs"], "plan")
    assert not [name for name in schema["$defs"] if name.startswith("_")]


def test_off_a_terminal_the_console_has_a_fixed_width_and_no_colour(monkeypatch):
    out = console(io.StringIO())

    out.print("text", style="bold red")

    assert (out.width, out.file.getvalue()) == (FIXED_WIDTH, "text\n")
    monkeypatch.setenv("COLUMNS", "40")
    assert console(io.StringIO()).width == 40


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("no_color", [False, True])
def test_colour_is_for_terminals_without_no_color(no_color, monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    if no_color:
        monkeypatch.setenv("NO_COLOR", "1")
    out = console(Terminal())

    out.print("text", style="red")

    assert ("\x1b[31m" in out.file.getvalue()) is not no_color


def test_progress_is_shown_on_a_terminal_only():
    with progress_bar(console(io.StringIO())) as on_progress:
        assert on_progress is None


def test_progress_says_the_best_and_the_bound_in_the_unit_of_the_pass(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    out = console(Terminal())
    with progress_bar(out) as on_progress:
        on_progress(
            Progress(objective=Objective.THROUGHPUT, done=1, total=9, incumbent=20.0, bound=10.0)
        )
        on_progress(
            Progress(objective=Objective.MEMORY, done=1, total=4, incumbent=3.0 * GIB, bound=None)
        )

    text = out.file.getvalue()
    assert "best 20 s, at least 10 s" in text
    assert "best 3.0 GiB" in text


def test_the_progress_of_a_session_is_shown_on_a_terminal_only():
    with profile_bar(console(io.StringIO())) as on_progress:
        assert on_progress is None


@pytest.mark.parametrize(
    ("failed", "expected_s", "budget_s", "text"),
    [
        (0, None, 600.0, "10 min left"),
        (0, 45.0, 600.0, "45 s left"),
        (2, 150.0, 600.0, "2 failed, 2 min left"),
        (0, 900.0, 30.0, "30 s left of 15 min needed"),
        (1, None, math.inf, "1 failed"),
    ],
)
def test_the_progress_of_a_session_says_what_runs_what_failed_and_the_time_left(
    failed, expected_s, budget_s, text, monkeypatch
):
    monkeypatch.setenv("TERM", "xterm-256color")
    out = Console(file=Terminal(), width=160)
    with profile_bar(out) as on_progress:
        on_progress(
            profiling.SessionProgress(
                done=3,
                total=40,
                failed=failed,
                running=("gelu tokens=8 width=16 bf16", "launch bf16"),
                expected_s=expected_s,
                budget_s=budget_s,
            )
        )

    shown = re.sub(r"\x1b\[[\d;]*m", "", out.file.getvalue())
    assert re.search(rf"measuring .*3/40 {text} +gelu tokens=8 width=16 bf16, launch bf16", shown)


def test_phrases_break_only_between_phrases():
    assert (
        joined(("one two", "three", "four"), " | ", 17, start="a: ")
        == "a: one two |\n   three | four"
    )


def test_columns_align_and_the_last_text_column_wraps_after_commas():
    assert aligned(
        (("a", "1", "x" * 20 + ", " + "y" * 20), ("bb", "22", "z")), 40, left=(0, 2), indent=0
    ) == ["a    1  " + "x" * 20 + ",\n" + " " * 8 + "y" * 20, "bb  22  z"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0.00 us"),
        (2e-6, "2.00 us"),
        (0.0125, "12.5 ms"),
        (18.0, "18.0 s"),
        (2214.4, "2,214 s"),
    ],
)
def test_times_keep_three_digits(seconds, text):
    assert seconds_text(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0.0"),
        (0.1234, "0.123"),
        (3.456, "3.46"),
        (61.25, "61.2"),
        (1234.5, "1,234.5"),
        (-132.785, "-132.8"),
        (-0.5, "-0.500"),
    ],
)
def test_gib_have_the_decimals_worth_reading(value, text):
    assert gib_text(value) == text


@pytest.mark.parametrize(
    ("text", "size"),
    [("72GiB", 72 * GIB), ("1.5 gib", 3 * GIB // 2), ("512MiB", 512 * MIB), ("80GB", 80 * 10**9)],
)
def test_sizes_are_read_with_their_unit(text, size):
    assert parse_size("--memory-limit", text) == size


@pytest.mark.parametrize("text", ["", "72", "GiB", "-1GiB", "1e3GiB", "7 2GiB", "0MiB", "nan GiB"])
def test_a_size_that_is_not_a_number_and_a_unit_is_an_error(text):
    with pytest.raises(ConfigError, match="--memory-limit"):
        parse_size("--memory-limit", text)


def test_a_folder_without_write_permission_is_found_before_the_search(tmp_path, monkeypatch):
    monkeypatch.setattr("os.access", lambda *_: False)  # root may write everywhere

    with pytest.raises(ConfigError, match="no permission"):
        require_writable(tmp_path / "plan.yaml")


def test_the_proof_says_how_many_programs_ran_and_whether_they_agree(plan):
    certifying = CertifyingProgram(over=Certified.COLUMNS, variables=40, rows=9, optimum_s=1.0)

    def line_of(gap: float | None) -> str:
        certificate = Certificate(
            solver=SolverName.CBC,
            programs=1 if gap is None else 4,
            variables=312,
            rows=50,
            layouts=1198,
            closed=1197,
            plan=None if gap is None else replace(certifying, gap=gap),
        )
        record = replace(plan.search, status=Status.OPTIMAL, certificate=certificate)
        return " ".join(text_of(replace(plan, search=record), 200).split())

    assert ", by 4 integer programs" in line_of(0.0)
    assert "CBC, 312 variables; 1,198 layouts, 1,197 closed by bounds" in line_of(0.0)
    assert "the certifying one is 0.25 % below the search's own choice" in line_of(0.0025)
    assert "the certifying one is 1 % above the search's own choice" in line_of(-0.01)
    assert ", by 1 integer program CBC" in line_of(None)


def test_an_older_plan_says_its_candidates(plan):
    record = replace(plan.search, status=Status.OPTIMAL, certificate=None)

    assert "candidates: " in text_of(replace(plan, search=record), 200)
