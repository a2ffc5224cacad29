"""Pins that no mesh can have are refused with the rule that they break and one action."""

from __future__ import annotations

import pytest

from parplan.commands.requests.pins import require_possible
from parplan.planner.request import Constraints, PlanRequest
from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.machine_catalog import load_cluster, load_stack, with_gpus
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.spec import ModelSpec, TrainingSpec
from parplan.profiles.stack import ContextForm
from tests.helpers.cases import named

DENSE, EXPERTS = "llama3-8b", "mixtral-8x7b"
FORMS = (
    "deepspeed, galvatron, huggingface, megatron-core, megatron-deepspeed, nemo, parplan, "
    "torchtitan"
)


def request(
    model: str = DENSE,
    gpus: int = 16,
    stack: str = "megatron-core",
    seq_length: int = 8192,
    **pins: tuple[object, ...],
) -> PlanRequest[ModelSpec]:
    return PlanRequest(
        model=load_model(model).spec,
        cluster=with_gpus(load_cluster("h100-80gb"), gpus),
        training=TrainingSpec(
            global_batch_size=512, seq_length=seq_length, stack=load_stack(stack)
        ),
        constraints=Constraints(**pins),
    )


REFUSED = {
    "cp-that-does-not-divide-the-gpus": (
        request(cp=(3,)),
        "--cp 3 does not divide the 16 GPUs",
        "pin a divisor of 16",
    ),
    "cp-that-does-not-divide-the-sequence": (
        request(cp=(4,), seq_length=8188),
        "--cp 4 cuts a sequence into 8 equal pieces, --seq-length is 8188",
        "use a --seq-length that is a multiple of 8",
    ),
    "cp-of-a-stack-without": (
        request(cp=(2,), stack="nanotron"),
        "--cp 2: the stack nanotron divides no sequences",
        f"choose a --stack that does: {FORMS}",
    ),
    "form-of-a-stack-without": (
        request(context_form=(ContextForm.RING,), stack="nanotron"),
        "--context-form ring: the stack nanotron does not run it, it runs none",
        "choose a --stack that does: galvatron, huggingface, megatron-core, nemo, parplan, "
        "torchtitan",
    ),
    "cp-that-a-stack-runs-alone": (
        request(cp=(8,), tp=(2,), stack="megatron-deepspeed"),
        "--cp 8 --tp 2: the stack megatron-deepspeed runs cp 8 only with tp 1 and pp 1",
        "pin other degrees, or leave one of them to the search",
    ),
    "all-to-all-that-does-not-divide-heads": (
        request(gpus=64, cp=(32,), tp=(2,), context_form=(ContextForm.ALL_TO_ALL,)),
        "--cp 32 --tp 2 --context-form all-to-all: cp 32 does not divide the 16 heads",
        "pin other degrees, or leave one of them to the search",
    ),
    "two-levels-of-two-ranks": (
        request(cp=(2,), context_form=(ContextForm.TWO_LEVEL,)),
        "--cp 2 --context-form two-level: cp 2 has no part inside a node",
        "pin other degrees, or leave one of them to the search",
    ),
    "cp-beside-dp": (
        request(cp=(8,), dp=(4,)),
        "no --dp x --cp that is pinned divides the 16 GPUs",
        "pin smaller degrees",
    ),
    "all-axes": (
        request(cp=(2,), pp=(2,), dp=(2,), tp=(1,)),
        "no --pp x --dp x --cp x --tp that is pinned makes 16 GPUs",
        "leave --dp to the search",
    ),
    "ep-of-a-dense-model": (
        request(ep=(2,)),
        "--ep 2 divides experts, llama3-8b has none",
        "leave out --ep",
    ),
    "etp-of-a-dense-model": (
        request(etp=(2,)),
        "--etp 2 divides experts, llama3-8b has none",
        "leave out --etp",
    ),
    "ep-that-does-not-divide-the-experts": (
        request(EXPERTS, gpus=24, ep=(3,)),
        "--ep is pinned: ep 3 does not divide the 8 experts",
        "pin another --ep, or leave it to the search",
    ),
    "ep-beyond-a-stage": (
        request(EXPERTS, ep=(8,), pp=(4,)),
        "--pp 4 x --ep 8 does not divide the 16 GPUs, and ep x etp divides the ranks of a",
        "pin a divisor of 16",
    ),
    "ep-x-etp-beyond-all-gpus": (
        request(EXPERTS, gpus=8, ep=(8,), etp=(2,)),
        "--ep 8 x --etp 2 does not divide the 8 GPUs",
        "pin a divisor of 8",
    ),
    "etp-that-is-not-tp": (
        request(EXPERTS, etp=(2,), tp=(4,)),
        "--etp is pinned: an expert is whole or divided over the tp ranks, so etp 2 needs "
        "tp 2, found --tp 4",
        "pin another --etp, or leave it to the search",
    ),
    "etp-that-does-not-divide-the-width": (
        request(EXPERTS, etp=(3,)),
        "--etp is pinned: etp 3 does not divide the experts' width 14336",
        "pin another --etp, or leave it to the search",
    ),
    "etp-of-a-stack-without": (
        request(EXPERTS, etp=(2,), stack="nanotron"),
        "--etp 2: the stack nanotron divides no single experts",
        "choose a --stack that does: megatron-core, nemo, parplan, torchtitan",
    ),
    "rows-that-divide-no-tp": (
        request(tp_rows=(3,)),
        "--tp-rows is pinned: a grid has two columns or more, and 3 rows do not divide any tp of "
        "16 GPUs into them",
        "pin another --tp-rows, or leave it to the search",
    ),
    "rows-of-one-column": (
        request(tp_rows=(4,), tp=(4,)),
        "--tp-rows is pinned: a grid has two columns or more, and 4 rows do not divide --tp 4 into",
        "pin another --tp-rows, or leave it to the search",
    ),
    "rows-beyond-a-node": (
        request(tp_rows=(8,)),
        "--tp-rows is pinned: tp 16 does not fit inside a node of 8 GPUs",
        "pin another --tp-rows, or leave it to the search",
    ),
    "tp-beyond-the-heads": (
        request(gpus=64, tp=(64,), tp_across_nodes=True),
        "--tp is pinned: tp 64 does not divide the 32 attention heads",
        "pin another --tp, or leave it to the search",
    ),
    "tp-beyond-a-node": (
        request(tp=(16,)),
        "--tp is pinned: tp 16 does not divide the 8 key-value heads",
        "pin another --tp, or leave it to the search",
    ),
    "pp-beyond-the-layers": (
        request(gpus=64, pp=(64,)),
        "--pp 64: pp 64 is more than the 32 layers",
        "pin other degrees, or leave one of them to the search",
    ),
}


@pytest.mark.parametrize(("asked", "message", "hint"), named(REFUSED, REFUSED))
def test_pins_without_a_mesh_say_the_rule_and_one_action(asked, message, hint):
    with pytest.raises(ConfigError) as error:
        require_possible(asked)

    assert str(error.value).startswith(message)
    assert error.value.hint == hint


@pytest.mark.parametrize(
    "asked",
    [
        pytest.param(request(), id="no-pins"),
        pytest.param(request(cp=(3, 4)), id="one-cp-that-divides"),
        pytest.param(request(cp=(1,), stack="nanotron"), id="cp-1-of-a-stack-without"),
        pytest.param(request(ep=(1,), etp=(1,)), id="whole-experts-of-a-dense-model"),
        pytest.param(request(EXPERTS, ep=(3, 8), etp=(2,), tp=(2,)), id="etp-as-tp"),
        pytest.param(request(cp=(8,), stack="megatron-deepspeed"), id="cp-alone"),
        pytest.param(
            request(seq_length=65536, pp=(2,), dp=(2,), tp=(2,)), id="cp-left-to-the-search"
        ),
    ],
)
def test_pins_that_leave_a_mesh_pass(asked):
    require_possible(asked)
