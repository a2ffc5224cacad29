"""Multi-token prediction trains like one process, and as a plain module computes it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from parplan.costmodels.schedules.schedule import Schedule
from parplan.executor.data.batches import NO_TOKEN, synthetic_batches
from parplan.executor.models.loss import FURTHER_WEIGHT, Loss
from parplan.executor.models.transformer_layers import build_layer
from parplan.planner.plan.plan import Plan
from parplan.profiles.models.operator_graph import LayerKind
from parplan.profiles.models.spec import Precision
from parplan.profiles.stack import ContextForm
from tests.executor.data.test_document_places import packed
from tests.executor.models.test_family_runs import DEEPSEEK
from tests.helpers.executor_plans import LLAMA, SEQ_LENGTH, make_plan
from tests.helpers.executor_world import Worlds, require_as_one_process

FURTHER = replace(LLAMA, name="tiny-further", mtp_layers=1)
TWO = replace(FURTHER, name="tiny-two-further", mtp_layers=2)
TIED = replace(FURTHER, name="tiny-tied-further", tied_embeddings=True)
TWO_TIED = replace(TIED, mtp_layers=2)
DEEPSEEK_V3 = replace(DEEPSEEK, name="tiny-deepseek-v3", mtp_layers=1)
PLANS: dict[str, Plan] = {
    "deepseek-pp2-dp2-ep2": make_plan(DEEPSEEK_V3, pp=2, dp=2, ep=2, zero=(1,)),
    "one-rank": make_plan(FURTHER),
    "dp2-zero3": make_plan(FURTHER, dp=2, zero=(3,), recompute="full", recompute_ends=True),
    "pp2-dp2-zero2": make_plan(FURTHER, pp=2, dp=2, zero=(2,)),
    "tp2-sp-two-modules": make_plan(TWO, pp=2, tp=2, sp=True),
    "tp2": make_plan(FURTHER, tp=2),
    "cp2": make_plan(TWO, cp=2, form=ContextForm.RING),
    "pp2-packed": packed(make_plan(TWO, pp=2)),
    "deepseek-pp2-dp2-tp2-ep2-etp2": make_plan(
        DEEPSEEK_V3, pp=2, dp=2, tp=2, ep=2, etp=2, sp=True, zero=(1,)
    ),
    "tied-pp2-tp2-sp": make_plan(TIED, pp=2, tp=2, sp=True),
    "tied-one-stage-tp2": make_plan(TIED, tp=2),
    "tied-dp2-zero3": make_plan(TWO_TIED, dp=2, zero=(3,), recompute="full", recompute_ends=True),
    "tied-pp2-dp2-zero1": make_plan(TWO_TIED, pp=2, dp=2, zero=(1,)),
    "tied-pp2-cp2": make_plan(TIED, pp=2, cp=2, form=ContextForm.RING, zero=(2,)),
    "tied-bf16": make_plan(TIED, dp=2, zero=(2,), precision=Precision.BF16),
    "pp2-v-schedule": make_plan(
        FURTHER, pp=2, schedule=Schedule.ZBV, virtual_stages=2, num_micro_batches=4
    ),
}
QUICK = ("pp2-packed",)
WORLDS = Worlds(PLANS, slow=[name for name in PLANS if name not in QUICK])


@pytest.mark.multiproc
@pytest.mark.parametrize("name", WORLDS.params())
def test_further_tokens_are_predicted_as_in_one_process_with_the_predicted_bytes(name):
    require_as_one_process(WORLDS, name)


def test_a_module_joins_a_state_with_the_embedding_of_the_next_token():
    def made(kind: LayerKind, index: int) -> nn.Module:
        return build_layer(
            FURTHER, make_plan(FURTHER).training, kind, index, 1, torch.device("cpu")
        )

    head, block = made(LayerKind.HEAD, 5), made(LayerKind.BLOCK, 1)
    module = head.mtp1
    block.load_state_dict(module.state_dict(), strict=False)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, SEQ_LENGTH, 32, generator=generator)
    next_ids = torch.randint(100, (2, SEQ_LENGTH), generator=generator)

    logits = head(x, torch.stack((next_ids, next_ids), dim=-1))

    def normed(x: Tensor) -> Tensor:
        return functional.rms_norm(x, (32,), eps=FURTHER.norm_epsilon)

    embedded = functional.embedding(next_ids, module.tokens.weight)
    joined = torch.cat((normed(x), normed(embedded)), dim=-1) @ module.projection.weight.T
    expected = [normed(state) @ head.lm_head.weight.T for state in (x, block(joined))]
    torch.testing.assert_close(logits, torch.stack(expected, dim=2))


def test_batches_have_the_ids_further_behind():
    plan = make_plan(TWO)

    ids, targets = synthetic_batches(plan, 0, 3)(0)

    assert targets.shape == (*ids.shape, 3)
    assert targets[:, :-1, 0].equal(ids[:, 1:])
    assert targets[:, :-3, 2].equal(ids[:, 3:])
    assert (targets[:, -2:, 2] == NO_TOKEN).all()


def test_the_last_token_of_a_sequence_has_no_further_one():
    logits = torch.randn(1, 3, 2, 5, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([[[4, 1], [1, 2], [2, NO_TOKEN]]])

    loss = Loss()(logits, targets)

    each = -logits.log_softmax(-1)
    next_ones = each[0, 0, 0, 4] + each[0, 1, 0, 1] + each[0, 2, 0, 2]
    further = each[0, 0, 1, 1] + each[0, 1, 1, 2]
    torch.testing.assert_close(loss, next_ones + FURTHER_WEIGHT * further)
