"""`plan check`: its output and exit codes; a plan which trains wrongly does not pass."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math

import pytest
import torch
from click.testing import CliRunner

from parplan import cli
from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.host.offload import Offload
from parplan.costmodels.layers.model_states import StateBytes
from parplan.costmodels.schedules.schedule import Schedule
from parplan.costmodels.strategy import ParallelLayout
from parplan.costmodels.usage.rank_traffic import SentBytes
from parplan.costmodels.usage.rank_usage import RankUse, predicted_use
from parplan.executor.checking.parity import gradient_error
from parplan.executor.pipeline import pipeline
from parplan.executor.training import train
from parplan.planner.plan.plan import Plan
from parplan.planner.plan.plan_file import write_plan
from parplan.planner.runs.rank_checks import (
    RankCheck,
    all_match,
    check_ranks,
    repriced_today,
    sent_checks,
    worst_deviation,
)
from parplan.profiles.documents.schema import document
from parplan.profiles.machines.machine_catalog import load_cluster, load_stack, with_gpus
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.spec import ModelSpec, Optimizer, TrainingSpec
from parplan.profiles.stack import NEUTRAL, Stack
from parplan.profiles.units import GIB, MIB
from parplan.report.runs.check_tables import verdict
from parplan.report.runs.parity_table import Parity, parity_document
from parplan.report.runs.parity_table import parity_verdict as parity_verdict
from tests.helpers.cases import mostly_slow
from tests.helpers.executor_plans import GPT, make_plan
from tests.helpers.planning import estimate_plan

pytestmark = [
    pytest.mark.multiproc,
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning"),
]


def tiny(
    dp: int = 2,
    pp: int = 1,
    spec: ModelSpec | None = None,
    stack: Stack = NEUTRAL,
    **choices: object,
) -> Plan:
    entry = load_model("gpt-tiny")
    layout = ParallelLayout(
        mesh=Mesh(pp=pp, dp=dp, tp=1),
        schedule=Schedule.ONE_F_ONE_B,
        virtual_stages=1,
        micro_batch_size=2,
        num_micro_batches=2,
        sequence_parallel=False,
    )
    training = TrainingSpec(
        global_batch_size=4 * dp, seq_length=entry.seq_length, precision="fp32", stack=stack
    )
    return estimate_plan(
        dataclasses.replace(spec or entry.spec, num_layers=2),
        with_gpus(load_cluster("cpu"), dp * pp),
        training,
        layout,
        **{"zero": 1, **choices},
    )


def run(plan: Plan, folder, *options: str):
    path = folder / "plan.yaml"
    write_plan(plan, path)
    return CliRunner().invoke(cli.main, ["check", str(path), *options])


def with_memory(plan: Plan, n_bytes: int) -> Plan:
    device = dataclasses.replace(plan.cluster.device, memory_bytes=n_bytes, context_bytes=0)
    return dataclasses.replace(plan, cluster=dataclasses.replace(plan.cluster, device=device))


def test_a_plan_that_is_as_predicted_is_said_to_match(tmp_path):
    result = run(tiny(pp=2, dp=1), tmp_path)

    assert result.exit_code == 0, result.output
    last = " ".join(
        " ".join(line.strip() for line in result.stdout.splitlines()).split("note")[-1].split()
    )
    assert "parameters, gradients, optimizer to the byte; activations" in last
    assert "each stage" in result.stdout


@pytest.mark.slow
def test_a_plan_that_does_not_fit_says_by_how_much_and_exits_with_3(tmp_path):
    result = run(with_memory(tiny(), MIB), tmp_path, "--json")

    assert result.exit_code == 3
    body = json.loads(result.stdout)
    assert not body["fits"]
    assert body["verdict"].startswith("does not fit: stage 0 needs ")
    assert body["ranks"][0]["occupied_bytes"] > body["ranks"][0]["capacity_bytes"] == MIB


def test_placements_that_have_no_price_are_an_error_before_anything_runs(tmp_path, monkeypatch):
    plan = make_plan(GPT, tp=2)
    odd = {
        name: dataclasses.replace(layer, recompute=("nothing",))
        for name, layer in plan.layer_plans.items()
    }
    monkeypatch.setattr(
        "parplan.executor.checking.dry_run_workers.dry_runs", lambda *_: pytest.fail("it ran")
    )

    result = run(dataclasses.replace(plan, layer_plans=odd), tmp_path)

    assert result.exit_code == 2
    assert "it names nothing, the layer has" in result.stderr


@pytest.mark.slow
def test_only_the_ranks_that_were_asked_for_are_run(tmp_path):
    body = json.loads(run(tiny(pp=2, dp=1), tmp_path, "--rank", "1", "--json").stdout)

    assert [rank["rank"] for rank in body["ranks"]] == [1]
    assert {sent["axis"] for sent in body["ranks"][0]["found_bytes"]["sent"]} == {"pp"}


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        pytest.param(
            {}, ("--rank", "2"), "--rank 2: the plan has pipeline ranks 0 to 0", id="rank"
        ),
        pytest.param(
            {"stages": ()}, (), "stages: there are 0, pp 1 x virtual_stages 1 are 1", id="no-layers"
        ),
    ],
)
def test_what_cannot_be_run_is_an_error_with_exit_code_2(tmp_path, change, options, message):
    result = run(dataclasses.replace(tiny(), **change), tmp_path, *options)

    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stdout == ""


def test_a_file_that_is_no_plan_is_an_error(tmp_path):
    path = tmp_path / "plan.yaml"
    path.write_text("plan_version: 2\nmodel: {}\n")

    result = CliRunner().invoke(cli.main, ["check", str(path)])

    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")


def test_without_torch_the_hint_says_what_to_install(tmp_path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "torch" else find(name, *rest),
    )

    result = run(tiny(), tmp_path)

    assert result.exit_code == 2
    assert "hint: pip install 'parplan[torch]'" in result.stderr


@pytest.mark.slow
def test_the_shrunk_plan_trains_as_one_process_does(tmp_path):
    result = run(tiny(), tmp_path, "--execute")

    assert result.exit_code == 0, result.output
    assert "trains as one process does" in result.stdout
    assert "qkv.weight" in result.stdout


@pytest.mark.slow
def test_the_shrunk_plan_trains_with_its_own_optimizer(tmp_path):
    plan = tiny()
    training = dataclasses.replace(plan.training, optimizer=Optimizer.MUON)

    result = run(dataclasses.replace(plan, training=training), tmp_path, "--execute")

    assert result.exit_code == 0, result.output
    assert "(tolerance 5e-05)" in result.stdout  # the products of Muon run in bf16


@pytest.mark.slow
def test_a_rank_that_weighs_its_loss_wrongly_does_not_pass(tmp_path, monkeypatch):
    right = pipeline._mean_loss
    monkeypatch.setattr(pipeline, "_mean_loss", lambda *args: 1.001 * right(*args))

    result = run(tiny(), tmp_path, "--execute", "--json")

    assert result.exit_code == 2
    body = json.loads(result.stdout)
    assert not body["passed"]
    assert body["verdict"].startswith("differs: ")
    assert max(body["gradient_errors"].values()) == pytest.approx(1e-3, rel=0.1)


def test_bytes_that_are_not_as_predicted_have_an_exit_code(tmp_path, monkeypatch):
    right = train.predicted_state_bytes
    monkeypatch.setattr(
        train, "predicted_state_bytes", lambda *args: right(*args) + StateBytes(parameters=4)
    )

    result = run(tiny(), tmp_path, "--execute")

    assert result.exit_code == 3, result.output
    assert "trains as one process does" in result.stdout
    assert "NOT as" in result.stdout


@pytest.mark.parametrize(
    "losses",
    [
        ((1.0, 1.0), (1.0, math.nan)),
        ((1.0, 1.0), (math.nan, math.nan)),
        ((1.0, 1.0), (math.inf, math.inf)),
    ],
)
def test_losses_that_are_not_finite_do_not_pass_wherever_they_stand(losses):
    plan = make_plan(GPT)
    parity = Parity(
        plan=plan,
        small=plan,
        losses=losses,
        gradients={"block0.qkv.weight": 0.0},
        agree=True,
        as_predicted=True,
        loss_tolerance=1e-6,
        gradient_tolerance=1e-5,
    )

    assert not parity.passed
    assert math.isinf(parity.loss_error)
    json.dumps(document(parity_document(parity)), allow_nan=False)


def test_a_gradient_that_is_not_finite_is_the_worst():
    good, bad = torch.ones(2), torch.tensor([1.0, math.nan])

    assert [gradient_error(*pair) for pair in ((good, good), (bad, good), (bad, bad))] == [
        0.0,
        math.inf,
        math.inf,
    ]


def use(activations: int, *sent: SentBytes, gradients: int = 4) -> RankUse:
    return RankUse(
        states=StateBytes(2, gradients, 8),
        activations=activations,
        temporaries=10,
        saved=5,
        sent=sent,
    )


def test_a_host_that_is_too_small_does_not_fit_and_its_bytes_are_a_class():
    with_host = dataclasses.replace(use(1000), host=500)
    roomy = dataclasses.replace(
        a_check(with_host, with_host), node_host=1000.0, node_host_capacity=1000
    )
    assert verdict([roomy]).endswith("temporaries, peak, host to the byte")
    assert roomy.fits

    small = dataclasses.replace(roomy, node_host_capacity=999)
    assert not small.fits
    assert verdict([small]).startswith("does not fit: the host of a node needs 1000 B of 999 B")

    more = dataclasses.replace(with_host, host=530)
    assert not all_match([dataclasses.replace(roomy, found=more)])


UNTIED = dataclasses.replace(load_model("gpt-tiny").spec, tied_embeddings=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("choices", "exact"),
    [
        pytest.param({"zero": 3, "offload": (Offload.STATES,)}, True, id="states"),
        pytest.param(
            {"zero": 0, "offload": (Offload.ACTIVATIONS,)},
            True,
            id="activations",
            marks=pytest.mark.slow,
        ),
        *(
            pytest.param(
                {"zero": zero, "offload": (Offload.LOOKUP,)},
                True,
                id=f"tied table zero {zero}",
                marks=pytest.mark.slow,
            )
            for zero in (2, 3)
        ),
        # rows of the table on their way to the device are in no price
        pytest.param(
            {"zero": 1, "offload": (Offload.LOOKUP,), "spec": UNTIED},
            False,
            id="lookup",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_dry_run_counts_what_the_host_holds(tmp_path, choices, exact):
    plan = tiny(stack=load_stack("parplan"), **choices)
    result = run(plan, tmp_path, "--json")
    assert result.exit_code == 0, result.stderr
    (rank,) = json.loads(result.stdout)["ranks"]
    predicted, found = rank["predicted_bytes"], rank["found_bytes"]

    assert predicted["host"] == pytest.approx(
        plan.predicted.memory_gib[0].host * GIB, abs=GIB * 1e-4
    )
    assert found["states"] == predicted["states"]
    assert rank["node_host_bytes"] == 2 * found["host"]
    if exact:
        assert found["host"] == predicted["host"] > 0
    else:
        assert predicted["host"] < found["host"] < 1.5 * predicted["host"]


@pytest.mark.slow
@pytest.mark.parametrize("zero", mostly_slow(range(4), {3}))
def test_a_tied_table_on_the_host_is_sent_as_predicted(tmp_path, zero):
    plan = tiny(stack=load_stack("parplan"), zero=zero, offload=(Offload.LOOKUP,))
    (rank,) = json.loads(run(plan, tmp_path, "--json").stdout)["ranks"]
    predicted, found = (
        {sent["kind"]: sent["num_bytes"] for sent in rank[which]["sent"]}
        for which in ("predicted_bytes", "found_bytes")
    )

    assert predicted
    assert found == predicted


def a_check(predicted: RankUse, measured: RankUse, capacity: int = 10**6) -> RankCheck:
    return RankCheck(
        rank=0,
        predicted=predicted,
        found=measured,
        planned=float(predicted.held),
        repriced=float(predicted.held),
        occupied=float(measured.held),
        capacity=capacity,
        micro_batches=(4,),
        of=4,
    )


@pytest.mark.parametrize(
    ("measured", "expected"),
    [
        pytest.param(
            use(1000),
            "matches: parameters, gradients, optimizer, activations, temporaries, peak to the byte",
            id="equal",
        ),
        pytest.param(
            use(1010),
            "matches: parameters, gradients, optimizer, temporaries to the byte; "
            "activations +1.0 %, peak +1.0 %",
            id="close",
        ),
        pytest.param(
            use(1100),
            "differs: parameters, gradients, optimizer, temporaries to the byte; "
            "activations +10.0 %, peak +9.8 %",
            id="far",
        ),
        pytest.param(
            use(1000, gradients=5),
            "differs: parameters, optimizer, activations, temporaries to the byte; "
            "gradients +25.0 %, peak +0.10 %",
            id="a-state",
        ),
    ],
)
def test_the_verdict_says_what_is_as_predicted_and_what_is_not(measured, expected):
    checks = (a_check(use(1000), measured),)

    assert verdict(checks).replace("+0.1 %", "+0.10 %") == expected
    assert all_match(checks) == expected.startswith("matches")


@pytest.fixture
def pool_files(tmp_path) -> list[str]:
    """Plan files of two pools, the second one first."""
    plans = {"second": tiny(dp=1, pp=2), "first": tiny(dp=2)}
    for name, plan in plans.items():
        write_plan(plan, tmp_path / f"{name}.yaml")
    return [str(tmp_path / f"{name}.yaml") for name in plans]


@pytest.mark.slow
def test_plans_of_pools_are_checked_one_by_one_with_their_sequences(pool_files):
    result = CliRunner().invoke(cli.main, ["check", *pool_files])

    assert result.exit_code == 0, result.output
    assert "second.yaml: sequences 0 to 3 of 12" in result.output
    assert "first.yaml: sequences 4 to 11 of 12" in result.output
    assert result.output.count("at full size on tensors without data") == 2


@pytest.mark.slow
def test_plans_of_pools_train_together_beside_one_process(pool_files):
    result = CliRunner().invoke(cli.main, ["check", *pool_files, "--execute"])

    assert result.exit_code == 0, result.output
    assert result.output.count("trains as one process does") == 2
    assert "second.yaml: sequences 0 to 3 of 12" in result.output
    assert "first.yaml: sequences 4 to 11 of 12" in result.output


def test_one_plan_alone_has_a_json_check(pool_files):
    result = CliRunner().invoke(cli.main, ["check", *pool_files, "--json"])

    assert result.exit_code == 2
    assert "--json and --rank are for one plan" in result.output


def test_a_plan_file_of_other_prices_is_said_to_be_old():
    check = a_check(use(10 * MIB), use(10 * MIB))

    assert not check.outdated
    assert dataclasses.replace(check, planned=20.0 * MIB).outdated


def of_experts(imbalance: float) -> Plan:
    """Returns a plan whose experts lie over two ranks."""
    layout = ParallelLayout(
        mesh=Mesh(pp=1, dp=2, tp=1, ep=2),
        schedule=Schedule.ONE_F_ONE_B,
        virtual_stages=1,
        micro_batch_size=2,
        num_micro_batches=2,
        sequence_parallel=False,
    )
    training = TrainingSpec(
        global_batch_size=8,
        seq_length=128,
        stack=load_stack("parplan"),
        expert_imbalance=imbalance,
    )
    cluster = with_gpus(load_cluster("a100-80gb"), 2)
    return estimate_plan(load_model("mixtral-tiny").spec, cluster, training, layout)


@pytest.mark.slow
def test_a_dry_run_of_uneven_experts_is_compared_with_even_ones_and_says_so(tmp_path):
    even, uneven = (of_experts(imbalance) for imbalance in (1.0, 1.5))
    assert uneven.predicted.memory_gib[0].total > even.predicted.memory_gib[0].total

    result = run(uneven, tmp_path)

    text = " ".join(result.stdout.split())
    assert "priced for ranks with 1.5 times as many (expert_imbalance)" in text
    assert "today's prices" not in text
    today = repriced_today(even)
    expected = predicted_use(today.strategy, 0, today.price_cache)
    (check,) = check_ranks(repriced_today(uneven), {0: (expected, (2,))})
    assert check.predicted == expected


def test_the_worst_deviation_of_all_stages_counts():
    checks = tuple(a_check(use(1000), use(activations)) for activations in (1010, 900, 1050))

    assert worst_deviation(checks, "activations") == pytest.approx(-0.1)


def test_a_collective_that_only_one_side_has_is_shown_with_nothing_on_the_other():
    (reduced, gathered) = sent_checks(
        a_check(
            use(1, SentBytes("tp", "all_reduce", 2, 8)), use(1, SentBytes("dp", "all_gather", 3, 6))
        )
    )[::-1]

    assert (reduced.predicted.calls, reduced.found.calls) == (2, 0)
    assert (gathered.predicted.calls, gathered.found.calls) == (0, 3)


def test_ranks_that_disagree_do_not_pass():
    plan = make_plan(GPT)
    parity = Parity(
        plan=plan,
        small=plan,
        losses=((1.0, 1.0),),
        gradients={"block0.qkv.weight": 0.0},
        agree=False,
        as_predicted=True,
        loss_tolerance=1e-6,
        gradient_tolerance=1e-5,
    )

    assert not parity.passed
    assert parity_verdict(parity).startswith("differs: the ranks do not hold the same")
