"""Plans of traced modules: the file and its errors, the schema, and the summary."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
import yaml

from parplan.costmodels.schedules.schedule import Schedule
from parplan.planner.plan.plan_file import (
    any_plan_from_document,
    plan_to_document,
    plan_to_yaml,
    read_any_plan,
    write_plan,
)
from parplan.planner.plan.traced_plan import RecomputeList, TracedPlan
from parplan.planner.request import Constraints, SearchOptions
from parplan.planner.traced.traced_strategy import reprice_traced
from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.machine_catalog import load_cluster
from parplan.profiles.models.spec import ModelSpec, TrainingSpec
from parplan.profiles.stack import NEUTRAL
from parplan.profiles.units import GIB
from parplan.report.plan_documents import plan_document, plan_schema
from parplan.report.plans.block_phrases import layers_phrases
from parplan.report.plans.notes import warnings
from parplan.report.plans.summary import print_summary
from parplan.report.plans.summary_context import SummaryContext
from parplan.report.text import console
from tests.helpers.planning import find_traced_plan
from tests.helpers.traced_models import model_of, traced_spec
from tests.planner.plan.test_plan_file import conforms

GPT = ModelSpec(
    name="gpt",
    num_layers=4,
    hidden_size=256,
    num_heads=4,
    num_kv_heads=4,
    head_dim=64,
    ffn_hidden_size=1024,
    vocab_size=4096,
    max_seq_length=128,
)
TRAINING = TrainingSpec(global_batch_size=16, seq_length=128, stack=NEUTRAL)
CLUSTER = replace(load_cluster("a100-80gb"), nodes=1)


@pytest.fixture(scope="module")
def plan() -> TracedPlan:
    pins = Constraints(pp=(4,), schedule=(Schedule.ONE_F_ONE_B,))
    return find_traced_plan(traced_spec(GPT, TRAINING), CLUSTER, TRAINING, constraints=pins).plan


def test_a_plan_that_is_written_is_read_as_it_was(plan, tmp_path):
    path = tmp_path / "plan.yaml"

    write_plan(plan, path)

    assert read_any_plan(path) == plan
    assert plan_to_yaml(read_any_plan(path)) == path.read_text()


@pytest.fixture(scope="module")
def recomputing() -> TracedPlan:
    """A plan that fits its memory with recompute lists."""
    pins = Constraints(pp=(4,), schedule=(Schedule.ONE_F_ONE_B,), micro_batch_size=(2,), tp=(1,))
    options = SearchOptions(memory_limit_bytes=int(1.305 * GIB))
    return find_traced_plan(
        traced_spec(GPT, TRAINING), CLUSTER, TRAINING, constraints=pins, options=options
    ).plan


def test_a_plan_with_recompute_lists_is_read_and_priced_as_it_was(recomputing, tmp_path):
    write_plan(recomputing, tmp_path / "plan.yaml")
    read = read_any_plan(tmp_path / "plan.yaml")

    assert recomputing.stages[0].recompute_lists
    assert read == recomputing
    again = reprice_traced(read, traced_spec(GPT, TRAINING)).plan
    assert again.predicted == recomputing.predicted
    assert again.stages == recomputing.stages


def test_the_summary_counts_shards_by_the_operators_that_run_again(plan):
    first, *others = plan.stages
    lists = (
        RecomputeList(shards=(1,), places=(2,)),
        RecomputeList(shards=(3, 4), places=(0, 2)),
    )
    stages = (replace(first, recompute=(2,), recompute_lists=lists), *others)

    _, text = layers_phrases(replace(plan, stages=stages))

    assert text == "recompute 1 of 10 shards, 1 shard with 1 operator, 2 shards with 2 operators"


def test_stages_hold_all_shards_once_and_shards_all_operators(plan):
    assert plan.stages[0].first == 0
    assert all(
        stage.end == following.first
        for stage, following in zip(plan.stages, plan.stages[1:], strict=False)
    )
    assert plan.stages[-1].end == len(plan.shards)
    assert plan.shards[-1].end == plan.traced.num_operators
    assert [shard.layer for shard in plan.shards] == ["A", *"BCBCBCBC", "D"]
    assert plan.shards[1].starts == "h.0.norm1"


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda body: body["shards"][1].update(kind="x"), r"unknown key shards\.1\.kind"),
        (lambda body: body["stages"][0].pop("zero"), r"stages\.0\.zero is missing"),
        (lambda body: body["stages"][2].update(rank=7), r"stages\.2: rank is 7, the mesh has pp 4"),
        (
            lambda body: body["stages"][1]["layers"][0].update(first=5),
            r"stages\.1\.layers\.0: it has layers 5 to",
        ),
        (lambda body: body["stages"][0].update(recompute=[9]), r"stages\.0: it recomputes layer 9"),
        (
            lambda body: body["stages"][1].update(recompute_lists=[{"shards": [9], "places": [0]}]),
            r"stages\.1: it recomputes layer 9",
        ),
        (
            lambda body: body["stages"][0].update(
                recompute=[1], recompute_lists=[{"shards": [1], "places": [0]}]
            ),
            r"stages\.0: it recomputes layer 1 twice",
        ),
        (
            lambda body: body["stages"][0].update(
                recompute=[], recompute_lists=[{"shards": [1], "places": [0, 40]}]
            ),
            r"stages\.0: it recomputes operator 40 of layer 1, which has",
        ),
        (lambda body: body["stages"][3].update(zero=4), r"stages\.3: zero is 4"),
        (lambda body: body["shards"].pop(), "stages: they have 10 layers, there are 9"),
        (lambda body: body["predicted"]["memory_gib"].pop(), "memory_gib has 3 stages"),
        (lambda body: body.update(plan_version=3), "plan_version is 3"),
        (lambda body: body["traced"].update(flops="many"), r"unknown key traced\.flops"),
    ],
)
def test_a_file_that_is_wrong_is_an_error_with_its_place(plan, change, match):
    body = yaml.safe_load(plan_to_yaml(plan))
    change(body)

    with pytest.raises(ConfigError, match=match):
        any_plan_from_document(body, "plan.yaml")


def test_the_published_schema_takes_a_plan_of_a_traced_module(plan):
    schema = plan_schema()

    for elapsed_s in (None, 1.5):
        conforms(plan_document(plan, elapsed_s), schema, schema["$defs"])
    with pytest.raises(AssertionError):
        conforms({**plan_document(plan), "layers": 1}, schema, schema["$defs"])


def test_the_document_has_the_time_that_the_search_took(plan):
    assert plan_document(plan, 1.23456) == {**plan_to_document(plan), "elapsed_s": 1.235}


def test_a_summary_counts_in_whole_words_and_numbers_without_exponents(plan):
    fast = replace(
        plan.predicted,
        tokens_per_s_per_gpu=replace(plan.predicted.tokens_per_s_per_gpu, value=16412.3),
    )
    first, *later = plan.stages
    mixed = replace(
        plan,
        predicted=fast,
        stages=(replace(first, zero=1), *(replace(stage, zero=0) for stage in later)),
    )
    out = io.StringIO()

    print_summary(mixed, console(out), SummaryContext(whole=True))

    assert "16,410 " in out.getvalue()
    assert "ZeRO 1 on 1 stage," in out.getvalue()


def test_a_note_says_that_ranks_write_buffers_of_their_own(plan):
    traced = replace(plan.traced, counted=("bn.mean", "bn.count"))

    text = " ".join(warnings(replace(plan, traced=traced)))

    assert "each data-parallel rank writes buffer bn.mean and 1 more from its own samples" in text
    assert "writes buffer" not in " ".join(warnings(plan))


def test_the_summary_says_what_runs_where_and_how_far_to_trust_it(plan):
    out = io.StringIO()

    print_summary(
        plan,
        console(out),
        SummaryContext(whole=True, elapsed_s=1.0, assumed=("--gpus-per-node 8",)),
    )

    text = out.getvalue()
    assert text.startswith("gpt, 4.24 M parameters, 45 operators in 10 shards")
    assert "assumed: --gpus-per-node 8" in text
    assert "mesh      pp 4 x dp 2 x tp 1 " in text
    assert "1F1B, micro-batch" in text
    assert "wte to h.0" in text
    assert "tokens/s/GPU" in text
    assert "band unknown: no measured steps of traced modules" in text
    assert "priced by their FLOPs and bytes" in text
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.slow
def test_a_module_of_samples_is_planned_by_samples():
    model = replace(model_of(*traced_spec(GPT, TRAINING).operators), micro_batch_size=1)

    plan = find_traced_plan(model, CLUSTER, TRAINING).plan

    assert plan.training.seq_length == 1
    speed, step_s = plan.predicted.tokens_per_s_per_gpu.value, plan.predicted.step_time_s.value
    assert speed * step_s * 8 == pytest.approx(16, rel=1e-4)
    out = io.StringIO()
    print_summary(plan, console(out), SummaryContext(whole=True))
    assert "samples/s/GPU" in out.getvalue()
