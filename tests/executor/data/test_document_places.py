"""Packed sequences train as each of their documents does by itself in one process."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from parplan.executor.data.batches import build_batches
from parplan.executor.data.document_places import build_places, drawn_lengths, places_of
from parplan.executor.data.tokens import bytes_tokenizer, write_tokens
from parplan.executor.models.attention_modules import document_lengths
from parplan.executor.run_options import Options
from parplan.planner.plan.plan import Plan
from parplan.profiles.models.blocks import BlockRun
from parplan.profiles.models.documents import Documents
from parplan.profiles.models.spec import Precision
from parplan.profiles.stack import AttentionKernel, ContextForm
from tests.executor.models.test_family_runs import DEEPSEEK, GEMMA, LLAMA4
from tests.helpers.executor_plans import GPT, LLAMA, MIXTRAL, make_plan
from tests.helpers.executor_world import Worlds, require_as_one_process

RING, GATHER = ContextForm.RING, ContextForm.ALL_GATHER
EXCHANGE, TWO_LEVEL = ContextForm.ALL_TO_ALL, ContextForm.TWO_LEVEL


def packed(plan: Plan, documents: Documents | None = None) -> Plan:
    documents = documents or Documents(lengths=((1, 1), (3, 2), (5, 2), (9, 1)))
    return replace(plan, training=replace(plan.training, documents=documents))


PLANS: dict[str, Plan] = {
    "gpt-pp2-dp2-learned-positions": packed(make_plan(GPT, pp=2, dp=2, zero=(1,))),
    "llama-dp2-tp2-sp-recompute": packed(
        make_plan(LLAMA, dp=2, tp=2, sp=True, zero=(2,), recompute=("norm1", "attention"))
    ),
    "gpt-tp2-attention-recompute": packed(
        make_plan(GPT, tp=2, recompute=("attention", "attention_out"))
    ),
    "gpt-pp2-full-recompute-unfused": packed(
        make_plan(GPT, pp=2, recompute="full", attention=AttentionKernel.UNFUSED)
    ),
    "llama-zero3-full-recompute-mean": packed(
        make_plan(LLAMA, dp=2, zero=(3,), recompute="full"), Documents(mean=4.0)
    ),
    "gemma-tp2-windows": packed(make_plan(GEMMA, tp=2)),
    "mixtral-dp2-ep2": packed(make_plan(MIXTRAL, dp=2, ep=2, zero=(1,))),
    "deepseek-tp2-sp-latent": packed(make_plan(DEEPSEEK, tp=2, sp=True)),
    "parts-of-documents": packed(make_plan(LLAMA4, dp=2)),
    "parts-of-documents-unfused": packed(
        make_plan(LLAMA4, dp=2, attention=AttentionKernel.UNFUSED)
    ),
    "gpt-cp2-ring-learned-positions": packed(make_plan(GPT, cp=2, form=RING, zero=(1,))),
    "llama-cp2-gather-window": packed(
        make_plan(replace(LLAMA, blocks=(BlockRun(window=3),)), cp=2, form=GATHER)
    ),
    "llama-cp2-exchange-recompute": packed(
        make_plan(LLAMA, cp=2, form=EXCHANGE, zero=(3,), recompute="full")
    ),
    "llama-cp4-ring-of-known-documents": packed(
        make_plan(LLAMA, cp=4, form=RING, recompute=("attention",)),
        Documents(lengths=((2, 1), (4, 3))),
    ),
    "llama-cp4-two-level-mean": packed(make_plan(LLAMA, cp=4, form=TWO_LEVEL), Documents(mean=5.0)),
    "llama-cp2-tp2-pp2": packed(make_plan(LLAMA, pp=2, cp=2, form=RING, tp=2, sp=True)),
    "parts-of-documents-cp2": packed(make_plan(LLAMA4, cp=2, form=RING)),
    "further-tokens-cp2": packed(make_plan(replace(LLAMA, mtp_layers=1), cp=2, form=RING)),
    "llama-bf16": packed(make_plan(LLAMA, dp=2, zero=(1,), precision=Precision.BF16)),
}
QUICK = ("gpt-cp2-ring-learned-positions",)
WORLDS = Worlds(PLANS, slow=[name for name in PLANS if name not in QUICK])


@pytest.mark.multiproc
@pytest.mark.parametrize("name", WORLDS.params())
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning")
def test_packed_documents_train_as_each_by_itself_with_the_predicted_bytes(name):
    require_as_one_process(WORLDS, name)


def test_drawn_documents_fill_a_sequence_in_the_planned_proportions():
    documents = Documents(lengths=((10, 3), (50, 1)))

    lengths = drawn_lengths(documents, 100_000, seed=3)

    assert sum(lengths) == 100_000
    assert set(lengths[:-1]) == {10, 50}
    assert np.mean(lengths) == pytest.approx(documents.mean_length, rel=0.05)
    assert drawn_lengths(documents, 100_000, seed=3) == lengths
    assert np.mean(drawn_lengths(Documents(mean=20.0), 100_000, 0)) == pytest.approx(20, rel=0.05)


def test_places_say_the_lengths():
    places = torch.stack([places_of([4, 1, 3]), places_of([8])])

    assert document_lengths(places) == ((4, 1, 3), (8,))


def test_a_token_file_says_where_its_documents_end(tmp_path):
    texts = {"a.txt": "abc", "b.txt": "defghijk", "c.txt": "0123456789" * 5}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    file = tmp_path / "tokens.bin"
    write_tokens([tmp_path / name for name in texts], file, bytes_tokenizer())
    plan = packed(make_plan(replace(GPT, vocab_size=257), global_batch_size=2, num_micro_batches=1))
    options = Options(data=file, shuffle=False)

    ids, _ = build_batches(plan, 0, options)(0)
    places = build_places(plan, 0, options)(0)

    assert document_lengths(places) == ((4, 9, 3), (16,))
    assert [ids[0, end].item() for end in (3, 12)] == [256, 256]
