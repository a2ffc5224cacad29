"""GPT-2, BERT, T5, ViT and a hand-written module on tp 2 x pp 2 train as in one process."""

from __future__ import annotations

import pytest

from parplan.executor.traced.program_cut import cut_program
from parplan.executor.traced.traced_trainer import open_plan_module
from parplan.profiles.models.fine_tuning import FineTuning
from parplan.profiles.models.module_source import ModuleSource
from parplan.profiles.tracing.record import record
from tests.helpers.builtin_modules import CONFIGS
from tests.helpers.like_one_process import check_to_1e_6
from tests.helpers.traced_modules import HUGGING_FACE
from tests.helpers.traced_plans import hand_plan

LORA = ModuleSource(
    huggingface=CONFIGS["llama"],
    fine_tuning=FineTuning(lora_rank=4, lora_targets=("q_proj", "down_proj")),
)
WOVEN = "tests.helpers.divided_modules:woven"


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.parametrize(
    "module",
    [
        pytest.param(WOVEN, id="tied-tables-shared-block-long-skips"),
        pytest.param(LORA, id="llama-with-adapters", marks=pytest.mark.slow),
        pytest.param(CONFIGS["gpt2"], id="gpt2", marks=pytest.mark.slow),
        pytest.param(HUGGING_FACE["bert"], id="bert", marks=pytest.mark.slow),
        pytest.param(HUGGING_FACE["t5"], id="t5", marks=pytest.mark.slow),
        pytest.param(HUGGING_FACE["vit"], id="vit", marks=pytest.mark.slow),
    ],
)
def test_it_trains_on_tp_2_x_pp_2_as_in_one_process_to_1e_6(module):
    plan = hand_plan(module, tp=2, pp=2, micro_batch_size=2)

    assert all(
        any(plan.shardings[plan.shards[k].layer] for k in stage) for stage in ((0, 1), (2, 3))
    )
    check_to_1e_6(plan)


def test_the_hand_written_module_has_tied_tables_a_shared_block_and_skips_on_both_stages():
    plan = hand_plan(WOVEN, tp=2, pp=2, micro_batch_size=2)

    first, last = cut_program(plan, record(open_plan_module(plan, 0).workload, 2))
    on_both = {*first.parameters} & {*last.parameters}

    assert {"source.weight", "shared.qkv.weight"} <= on_both
    assert len(first.sends) == 3  # the block's output, and two values that are joined at the end
