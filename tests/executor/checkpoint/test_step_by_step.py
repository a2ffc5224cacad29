"""Runs with further tokens, state spaces and weights in 8 bits go on across meshes."""

from __future__ import annotations

import dataclasses

import pytest
import torch.multiprocessing as mp

from tests.executor.checkpoint.test_checkpoints import run_world
from tests.executor.models.test_further_tokens import FURTHER
from tests.executor.models.test_state_space_modules import HYBRID
from tests.executor.training.test_fine_tuning import QLORA, WIDE
from tests.helpers.executor_plans import make_plan
from tests.helpers.executor_world import LOSS_TOLERANCE

pytestmark = pytest.mark.filterwarnings(
    "ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning"
)

# each plan makes one step from the checkpoint that the one before left
STEP_BY_STEP = {
    "further-tokens": [
        make_plan(FURTHER, pp=2, zero=(1,)),
        make_plan(FURTHER, tp=2, sp=True),
        make_plan(FURTHER, dp=2, zero=(3,)),
    ],
    "state-spaces": [
        make_plan(HYBRID, pp=2),
        make_plan(HYBRID, tp=2, sp=True),
        make_plan(HYBRID, dp=2, zero=(3,)),
    ],
    "eight-bits": [
        make_plan(WIDE, dp=2, zero=(1,), fine_tuning=QLORA),
        make_plan(WIDE, tp=2, sp=True, fine_tuning=QLORA),
        make_plan(WIDE, pp=2, fine_tuning=QLORA),
    ],
}


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.parametrize("name", STEP_BY_STEP)
def test_steps_on_other_meshes_are_those_of_the_first(name, tmp_path):
    chain = STEP_BY_STEP[name]
    options = {"directory": tmp_path}

    parts = run_world([(plan, k + 1, options) for k, plan in enumerate(chain)])

    (whole,) = run_world([(chain[0], len(chain), {})])
    assert [loss for part in parts for loss in part] == pytest.approx(whole, rel=LOSS_TOLERANCE)


@pytest.mark.slow
@pytest.mark.multiproc
def test_a_checkpoint_of_another_width_of_frozen_weights_is_not_read(tmp_path):
    sixteen = dataclasses.replace(QLORA, base_bits=16)
    runs = [(make_plan(WIDE, dp=2, fine_tuning=sixteen), 1, {"directory": tmp_path})]
    run_world(runs)

    with pytest.raises(mp.ProcessRaisedException, match="can be read"):
        run_world([(make_plan(WIDE, dp=2, fine_tuning=QLORA), 2, {"directory": tmp_path})])
