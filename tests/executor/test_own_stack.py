"""The planner divides sequences and experts for parplan's own stack, and the executor runs it."""

from __future__ import annotations

import pytest

from parplan.executor.rules.all_rules import validate
from parplan.planner.request import Constraints
from parplan.profiles.machines.machine_catalog import load_cluster, load_stack, with_gpus
from parplan.profiles.models.spec import Precision, TrainingSpec
from parplan.profiles.stack import ContextForm
from tests.helpers.executor_plans import LLAMA, MIXTRAL, SEQ_LENGTH
from tests.helpers.executor_world import require_parity, run_plans, run_reference
from tests.helpers.planning import find_plan

RING, TWO_LEVEL = ContextForm.RING, ContextForm.TWO_LEVEL
GATHER, EXCHANGE = ContextForm.ALL_GATHER, ContextForm.ALL_TO_ALL


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("model", "gpus", "pins"),
    [
        pytest.param(LLAMA, 2, {"cp": 2, "context_form": RING}, id="ring"),
        pytest.param(
            MIXTRAL, 4, {"tp": 2, "ep": 2, "etp": 2}, id="ep2-etp2", marks=pytest.mark.slow
        ),
        *(
            pytest.param(
                LLAMA, cp, {"cp": cp, "context_form": form}, id=form, marks=pytest.mark.slow
            )
            for cp, form in ((2, GATHER), (2, EXCHANGE), (4, TWO_LEVEL))
        ),
    ],
)
def test_a_plan_for_the_executors_stack_is_run_as_one_process(model, gpus, pins):
    """Sequences or single experts are divided as pinned."""
    training = TrainingSpec(
        global_batch_size=8,
        seq_length=SEQ_LENGTH,
        precision=Precision.FP32,
        stack=load_stack("parplan"),
    )
    cluster = with_gpus(load_cluster("cpu"), gpus)
    choices = Constraints(**{name: (value,) for name, value in pins.items()})

    plan = find_plan(model, cluster, training, constraints=choices)

    validate(plan)
    assert all(getattr(plan.mesh, name) == value for name, value in pins.items())
    require_parity(plan, *run_plans([plan]), run_reference(plan))
