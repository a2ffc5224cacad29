"""Traced modules whose operators are divided over tensor-parallel ranks train as in one process."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed.checkpoint as dcp

from parplan.costmodels.host.offload import Offload
from parplan.costmodels.schedules.schedule import Schedule
from parplan.executor.checking.parity import (
    GRADIENT_TOLERANCE,
    LOSS_TOLERANCE,
    OPTIONS,
    STEPS,
    gradient_errors,
    loss_errors,
    loss_tolerance,
    run_ranks,
)
from parplan.executor.traced.division import Division, Part
from parplan.executor.traced.traced_parity import run_traced_plans, run_traced_reference
from parplan.executor.traced.traced_trainer import build_traced_trainer, open_plan_module
from parplan.executor.training.training_states import make_optimizer_states, training_tensors
from parplan.planner.plan.plan_file import any_plan_from_document, plan_to_document
from parplan.planner.plan.traced_plan import SplitPlan, TracedPlan
from parplan.profiles.errors import ConfigError
from parplan.profiles.models.spec import Optimizer, Precision
from parplan.profiles.models.tp_rules import TpRules
from parplan.profiles.tracing.record import record
from tests.helpers.builtin_modules import CONFIGS
from tests.helpers.divided_modules import OPT
from tests.helpers.like_one_process import check_to_1e_6
from tests.helpers.traced_modules import HUGGING_FACE
from tests.helpers.traced_plans import hand_plan

MODULES = "tests.helpers.divided_modules"


def check(plan: TracedPlan) -> None:
    (actual,), expected = run_traced_plans([plan]), run_traced_reference(plan, by_micro_batch=True)

    assert actual.agree
    # Adam makes a whole step of the rounding of a gradient that is zero, as of biases of keys
    first, *later = loss_errors(actual, expected)
    assert first <= LOSS_TOLERANCE
    assert max(later) <= GRADIENT_TOLERANCE
    assert max(gradient_errors(actual, expected).values()) <= GRADIENT_TOLERANCE
    assert actual.norms == pytest.approx(expected.norms, rel=1e-5)
    assert all(predicted == measured for predicted, measured in actual.states.values())


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("module", "divided"),
    [
        pytest.param(f"{MODULES}:gpt", 17, id="gpt", marks=pytest.mark.slow),
        pytest.param(f"{MODULES}:timed_unet", 22, id="linear-layers-of-a-unet"),
        pytest.param(
            f"{MODULES}:stopped_gate",
            5,
            id="read-without-gradient-first",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_divided_modules_train_as_in_one_process(module, divided):
    plan = hand_plan(module, tp=2, num_micro_batches=2)

    assert sum(map(len, plan.shardings.values())) == divided
    check(plan)


THREE = f"{MODULES}:three_in_a_row"


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("module", "rules", "divided"),
    [
        pytest.param(THREE, None, 2, id="three-in-a-row", marks=pytest.mark.slow),
        pytest.param(
            THREE, TpRules(column=("layers.1",)), 3, id="three-by-column", marks=pytest.mark.slow
        ),
        pytest.param(THREE, TpRules(row=("layers.2",)), 3, id="three-by-row"),
        pytest.param(
            f"{MODULES}:own_activation",
            TpRules(pointwise=("cube",)),
            3,
            id="own-activation",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            f"{MODULES}:gpt",
            TpRules(replicated=("blocks.0",), vocabulary=("table",)),
            10,
            id="gpt-one-block-whole",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_modules_train_as_in_one_process_as_rules_divide_them(module, rules, divided):
    plan = hand_plan(module, tp=2, num_micro_batches=2, rules=rules)

    assert sum(map(len, plan.shardings.values())) == divided
    assert any_plan_from_document(plan_to_document(plan), "plan").tp_rules == rules
    check(plan)


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("module", "options"),
    [
        pytest.param(HUGGING_FACE["vit"], {}, id="vit"),
        pytest.param(HUGGING_FACE["bert"], {"dp": 2, "zero": 3}, id="bert-zero-3"),
        pytest.param(HUGGING_FACE["t5"], {"pp": 2, "recompute": True}, id="t5-recompute"),
        pytest.param(HUGGING_FACE["bert"], {"pp": 2, "lists": True}, id="bert-lists"),
        pytest.param(HUGGING_FACE["t5"], {"dp": 2, "zero": 3, "lists": True}, id="t5-lists"),
        pytest.param(OPT, {"dp": 2, "zero": 1}, id="opt-zero-1"),
        pytest.param(CONFIGS["gpt2"], {"pp": 2, "micro_batch_size": 2}, id="gpt2-tied"),
        pytest.param(CONFIGS["llama"], {}, id="llama-groups"),
        pytest.param(f"{MODULES}:gpt", {"pp": 2, "dp": 2}, id="gpt-three-axes"),
        pytest.param(
            "tests.helpers.traced_modules:shares",
            {"pp": 2, "virtual_stages": 2, "schedule": Schedule.INTERLEAVED},
            id="one-block-on-virtual-stages",
        ),
        pytest.param("tests.helpers.traced_modules:translator", {"pp": 2}, id="translator"),
    ],
)
def test_divided_modules_train_with_other_axes_as_in_one_process(module, options):
    check(hand_plan(module, tp=2, num_micro_batches=2, **options))


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.parametrize(
    "name",
    [
        "tied_weights",
        "multihead_attention",
        "transformer_encoder",
        "parameter_collections",
        "tied_across_blocks",
        "checkpoint_inside",
        "hooked",
    ],
)
def test_modules_of_the_zoo_are_divided_and_train_as_in_one_process(name):
    plan = hand_plan(
        f"tests.helpers.zoo:{name}", tp=2, num_micro_batches=2, micro_batch_size=2, shards_a_stage=1
    )

    assert any(plan.shardings.values())
    check(plan)


# Queries, keys and values in one matrix, and gates and values of an MLP: its rows are divided, or
# in GPT-2 its columns. ZeRO cuts through strips, and over three ranks into unequal parts.
FUSED = {"rows": f"{MODULES}:gpt", "columns": CONFIGS["gpt2"]}


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("module", "options"),
    [
        pytest.param("rows", {"dp": 2, "zero": 3}, id="zero-3"),
        *(
            pytest.param(module, {"dp": dp, "zero": zero}, id=name, marks=pytest.mark.slow)
            for module, dp, zero, name in (
                ("rows", 2, 0, "zero-0"),
                ("rows", 2, 1, "zero-1"),
                ("rows", 3, 2, "zero-2-unequal"),
                ("columns", 2, 1, "columns-zero-1"),
                ("columns", 3, 3, "columns-zero-3-unequal"),
            )
        ),
        pytest.param(
            "rows",
            {"dp": 2, "zero": 2, "offload": (Offload.STATES,)},
            id="states-on-the-host",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_fused_matrices_train_with_zero_as_in_one_process(module, options):
    check_to_1e_6(hand_plan(FUSED[module], tp=2, num_micro_batches=2, **options))


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.parametrize("optimizer", [Optimizer.MUON, Optimizer.ADAFACTOR, Optimizer.ADAM_8BIT])
@pytest.mark.parametrize("module", FUSED)
def test_fused_matrices_train_with_other_optimizers(module, optimizer):
    plan = hand_plan(FUSED[module], tp=2, dp=2, zero=3, num_micro_batches=2)
    plan = replace(plan, training=replace(plan.training, optimizer=optimizer))

    (actual,), expected = run_traced_plans([plan]), run_traced_reference(plan, by_micro_batch=True)

    assert actual.agree
    assert max(loss_errors(actual, expected)) <= loss_tolerance(optimizer)


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.parametrize("optimizer", [Optimizer.ADAM, Optimizer.ADAFACTOR])
@pytest.mark.parametrize("module", FUSED)
def test_a_checkpoint_of_fused_matrices_is_read_with_another_tp_and_zero(
    module, optimizer, tmp_path
):
    """Every rank has a part of the queries, of the keys and of the values in one matrix."""
    worlds = [
        {"tp": 2, "dp": 2, "zero": 3},
        {"tp": 1},
        {"tp": 2, "dp": 3, "zero": 1},
        {"tp": 4},
        {"tp": 2},
        {"tp": 1, "dp": 2, "zero": 3},
    ]
    after = []
    for number, options in enumerate(worlds):
        samples = 6 // options.get("dp", 1)  # the batch is the same
        plan = hand_plan(FUSED[module], num_micro_batches=samples, **options)
        plan = replace(plan, training=replace(plan.training, optimizer=optimizer))
        ((losses, *others),) = [run_ranks([plan], partial(_went_on, tmp_path, number))[0]]
        assert all(each == losses for each in others)
        after.append(losses)

    for losses in after[1:]:
        assert losses == pytest.approx(after[0], rel=GRADIENT_TOLERANCE)


def _went_on(folder: Path, number: int, plan: TracedPlan) -> list[float]:
    """Trains, or loads what world `number` - 1 has saved; saves, and returns the next losses."""
    trainer = build_traced_trainer(plan, OPTIONS, torch.device("cpu"))
    make_optimizer_states(trainer.optimizer)
    states = training_tensors(trainer.held().own, trainer.optimizer, trainer.strips)
    if number:
        dcp.load(states, checkpoint_id=folder / f"{number - 1}")
    else:
        list(trainer.run())
    dcp.save(states, checkpoint_id=folder / f"{number}")
    losses = []
    for step in (STEPS, STEPS + 1):
        losses.append(trainer.gradients(step).item())
        trainer.update(step)
    return losses


@pytest.mark.slow
@pytest.mark.multiproc
def test_dropout_and_half_precision_leave_ranks_with_equal_whole_parameters():
    """Ranks that divide an operator drop other elements of it, and the same of a whole one."""
    model = CONFIGS["gpt2"] | dict.fromkeys(("resid_pdrop", "attn_pdrop", "embd_pdrop"), 0.1)
    (outcome,) = run_traced_plans(
        [hand_plan(model, tp=2, num_micro_batches=2, precision=Precision.BF16)]
    )

    assert outcome.agree
    assert outcome.losses[0] == pytest.approx(math.log(256), rel=0.05)


class _TwoRanks:
    """The mesh of two ranks, of which a division needs no more before it runs."""

    def size(self) -> int:
        return 2


@pytest.fixture(scope="module")
def plan() -> TracedPlan:
    return hand_plan(f"{MODULES}:gpt", tp=2, num_micro_batches=2)


def division(plan: TracedPlan, **splits: tuple[SplitPlan, ...]) -> Division:
    program = record(open_plan_module(plan, 0).workload, 1)
    changed = replace(plan, shardings=plan.shardings | splits)
    return Division(changed, program, _TwoRanks())  # type: ignore[arg-type]


def test_a_table_that_is_the_head_as_well_is_divided_for_both(plan):
    parts = division(plan).parameters

    assert parts["table.weight"] == Part(0, 1, 64)
    assert parts["blocks.0.qkv.weight"] == Part(0, 3, 4)  # three matrices of 4 heads
    assert parts["blocks.0.out.weight"] == Part(1, 1, 4)
    assert parts["blocks.0.down.bias"] is parts["norm.weight"] is None


@pytest.mark.parametrize(
    ("split", "message"),
    [
        pytest.param(
            SplitPlan(place=0, dim="heads"), "embedding cannot be divided by heads", id="dim"
        ),
        pytest.param(SplitPlan(place=0, dim="hidden3"), "cannot be divided by hidden3", id="name"),
    ],
)
def test_a_split_that_the_program_does_not_allow_is_refused(plan, split, message):
    with pytest.raises(ConfigError, match=message):
        division(plan, A=(split,))


def test_a_number_of_ranks_that_does_not_divide_is_refused(plan):
    with (
        patch.object(_TwoRanks, "size", lambda self: 3),
        pytest.raises(ConfigError, match=r"vocab of table\.embedding is 64, which tp 3 does not"),
    ):
        division(plan)


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        pytest.param({"Z": [{"place": 0, "dim": "ffn"}]}, "no shard has this layer", id="layer"),
        pytest.param({"A": [{"place": 999, "dim": "ffn"}]}, "place is 999", id="place"),
    ],
)
def test_a_split_of_no_operator_is_refused_when_the_plan_is_read(plan, splits, message):
    body = plan_to_document(plan)

    assert any_plan_from_document(body, "plan") == plan
    with pytest.raises(ConfigError, match=message):
        any_plan_from_document({**body, "shardings": splits}, "plan")
