"""Unmodified Hugging Face and user modules train under a plan as in one process.

They hold the predicted bytes.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch.multiprocessing import ProcessRaisedException

from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.schedules.schedule import Schedule
from parplan.executor.checking.dry_run_workers import dry_runs
from parplan.executor.external.external_body import _StandIn
from parplan.executor.external.external_source import open_source
from parplan.executor.external.module_calls import _Watch
from parplan.executor.external.structure import find_structure
from parplan.executor.rules.all_rules import nearest_legal, validate
from parplan.executor.rules.external_rules import has_even_shards
from parplan.planner.plan.plan import Plan
from parplan.profiles.errors import ConfigError
from parplan.profiles.models.module_source import ModuleSource
from parplan.profiles.models.spec import Precision
from parplan.profiles.stack import AttentionKernel
from tests.helpers.executor_plans import BATCH, with_divisions
from tests.helpers.executor_world import Worlds, require_parity, run_plans, worst_gradient
from tests.helpers.external_modules import (
    CONFIGS,
    SMALL,
    factory_plan,
    family_plan,
    run_foreign_reference,
)

pytestmark = pytest.mark.multiproc

BF16 = Precision.BF16
INTERLEAVED = {"schedule": Schedule.INTERLEAVED, "virtual_stages": 2, "num_micro_batches": 4}

PLANS: dict[str, Plan] = {
    "pp2-gpt_neox": family_plan("gpt_neox", pp=2),
    "tp2-sp-llama-tied-full-recompute": family_plan("llama-tied", tp=2, sp=True, recompute="full"),
}
SLOW: dict[str, Plan] = {
    "pp2-gpt2-tied-interleaved-full-recompute": family_plan(
        "gpt2", pp=2, recompute="full", **INTERLEAVED
    ),
    "dp2-gpt2-bf16-a-zero-stage-per-block": family_plan(
        "gpt2", dp=2, zero=(3, 0, 1, 2), precision=BF16
    ),
    "pp2-llama-interleaved": family_plan("llama", pp=2, **INTERLEAVED),
    **{
        f"pp2-{name}": family_plan(name, pp=2)
        for name in ("llama", "opt", "gemma", "gpt2", "mistral", "phi3", "stablelm", "starcoder2")
    },
    "pp2-qwen2-tied-unfused-attention": family_plan(
        "qwen2", pp=2, attention=AttentionKernel.UNFUSED
    ),
    "tp2-llama": family_plan("llama", tp=2),
    "tp2-sp-gpt_neox": family_plan("gpt_neox", tp=2, sp=True),
    "pp2-dp2-factory-zero2": factory_plan("small", pp=2, dp=2, zero=(2,), num_micro_batches=4),
    "pp2-llama-embedding-and-head-alone": family_plan(
        "llama", pp=2, blocks=(0, 2, 2, 0), **INTERLEAVED
    ),
    "dp2-llama-zero3-full-recompute": family_plan("llama", dp=2, zero=(3,), recompute="full"),
    "tp2-sp-starcoder2": family_plan("starcoder2", tp=2, sp=True),
    "dp2-opt-zero2": family_plan("opt", dp=2, zero=(2,)),
    "tp2-mistral": family_plan("mistral", tp=2),
    "tp2-gpt_neox": family_plan("gpt_neox", tp=2),
    "tp2-qwen2-tied": family_plan("qwen2", tp=2),
    "tp2-sp-mistral-bf16": family_plan("mistral", tp=2, sp=True, precision=BF16),
    "tp2-sp-qwen2-tied": family_plan("qwen2", tp=2, sp=True),
    "pp2-factory-bf16-full-recompute": factory_plan(
        "small", pp=2, precision=BF16, recompute="full"
    ),
    "pp2-tp2-sp-llama-embedding-and-head-alone": family_plan(
        "llama", pp=2, tp=2, sp=True, blocks=(0, 2, 2, 0), **INTERLEAVED
    ),
    "pp2-tp2-llama-tied": family_plan("llama-tied", pp=2, tp=2),
    "dp2-tp2-sp-gpt_neox-bf16-zero-mixed": family_plan(
        "gpt_neox", dp=2, tp=2, sp=True, zero=(3, 1, 0, 2), precision=BF16
    ),
    "dp2-tp2-llama-zero3": family_plan("llama", dp=2, tp=2, zero=(3,)),
}


WORLDS = Worlds(PLANS | SLOW, SLOW)


@pytest.fixture(autouse=True)
def _quiet_on_one_thread() -> Iterator[None]:
    """A fork must not inherit a pool of threads; transformers warns about what it imports."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("transformers").utils.logging.set_verbosity_error()
        yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", WORLDS.params())
def test_a_foreign_module_trains_like_one_process_and_holds_the_predicted_bytes(name):
    plan = WORLDS.plans[name]
    validate(plan)
    expected = run_foreign_reference(
        replace(plan, mesh=Mesh(pp=1, dp=1, tp=1))
    )  # first: what transformers imports, no rank does again
    training_outcome = WORLDS.outcome(name)

    require_parity(plan, training_outcome, expected)
    assert {rank: measured for rank, (_, measured) in training_outcome.states.items()} == {
        rank: said for rank, (said, _) in training_outcome.states.items()
    }


def test_the_dry_run_of_a_module_holds_the_states_of_its_rank():
    name = "pp2-gpt_neox"
    _, measured = WORLDS.outcome(name).states[0, 0, 0]

    (run,) = dry_runs(PLANS[name], (0,))

    assert run.use.states == measured


def test_no_part_of_a_hugging_face_model_has_memory_before_it_is_filled():
    source = open_source(family_plan("llama"), seed=1)

    assert all(parameter.is_meta for parameter in source.model.parameters())
    assert not any(
        buffer.is_meta for buffer in source.model.buffers()
    )  # rotary frequencies are not learned, nobody would fill them


def test_a_part_is_filled_by_its_name_and_the_seed_alone():
    def filled(seed: int, first: tuple[str, ...]) -> torch.Tensor:
        source = open_source(family_plan("gpt2"), seed)
        for name in (*first, "transformer.h.2"):
            source.fill(name, source.model.get_submodule(name))
        return source.model.get_submodule("transformer.h.2").mlp.c_proj.weight

    assert torch.equal(filled(1, ()), filled(1, ("transformer.wte", "transformer.h.1")))
    assert not torch.equal(filled(1, ()), filled(2, ()))
    # GPT-2's own: 0.02 / sqrt(2 x 4 layers), not the 0.02 of other weights
    assert filled(1, ()).std().item() == pytest.approx(0.02 / 8**0.5, rel=0.1)


def test_the_parts_of_a_module_are_found_by_when_they_run():
    plan = family_plan("opt")

    structure = find_structure(open_source(plan, 0).model, plan)

    assert structure.blocks == tuple(f"model.decoder.layers.{i}" for i in range(4))
    assert set(structure.embedding) == {
        "model.decoder.embed_tokens",
        "model.decoder.embed_positions",
    }
    assert structure.head == ("model.decoder.final_layer_norm", "lm_head")
    assert structure.tied == (("model.decoder.embed_tokens", "weight"), ("lm_head", "weight"))


def test_a_stand_in_answers_for_its_part_and_holds_no_parameters():
    part = torch.nn.Linear(3, 5)
    stand_in = _StandIn(part)

    assert stand_in.out_features == 5
    assert not list(stand_in.parameters())
    assert all(
        parameter.is_meta for parameter in part.parameters()
    )  # nothing of another stage stays in memory


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("FirstInputs", "layers.0 reads more of the layers before it"),
        ("Skips", "what runs after the blocks reads more"),
        ("ScalesBetween", "layers.1 does not start from what the block before it returned"),
        ("ReadsTable", "a parameter of table is read outside of it"),
        ("OwnsScale", "parameter scale belongs to a module that holds the blocks"),
        ("Hidden", r"returned \[4, 16, 32\], it must return logits \[4, 16, 64\]"),
        ("Looks", "depends on the values"),
        ("short", "layers has 3 blocks, the model of the plan has 4 layers"),
        ("wide", "the block .* holds 10,304 parameters, that of the plan's model 8,256"),
        (
            "tied",
            "embedding and head share a parameter, the model of the plan has tied_embeddings False",
        ),
        ("frozen", "parameter table.weight is not trained"),
        ("half", "is torch.bfloat16 on cpu, it must be fp32"),
        ("number", "returned int, it must return a torch.nn.Module"),
        ("NOT_CALLABLE", "has NOT_CALLABLE, which is not callable"),
        ("missing", "has no missing"),
    ],
)
def test_a_module_that_cannot_be_cut_is_refused_with_the_reason(factory, message):
    plan = factory_plan(factory, pp=2)

    with pytest.raises(ConfigError, match=message):
        find_structure(open_source(plan, 0).model, plan)


def test_a_package_that_is_not_there_is_an_error_with_a_hint():
    plan = replace(factory_plan("small"), module=ModuleSource(factory="nowhere.models:build"))

    with pytest.raises(ConfigError, match="no nowhere to import") as error:
        open_source(plan, 0)

    assert "PYTHONPATH" in error.value.hint


def test_without_transformers_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)

    with pytest.raises(ConfigError, match="transformers is not installed") as error:
        open_source(family_plan("llama"), 0)

    assert error.value.hint == "pip install transformers"


def test_a_config_that_transformers_does_not_know_is_an_error():
    plan = replace(family_plan("llama"), module=ModuleSource(huggingface={"model_type": "nothing"}))

    with pytest.raises(
        ConfigError, match=r"model_type is .nothing., which is none of the \d+ that"
    ) as error:
        open_source(plan, 0)
    assert len(error.value.hint) < 100


def test_more_tokens_than_learned_positions_are_refused():
    config = {
        **CONFIGS["opt"],
        "max_position_embeddings": 14,
    }  # its table has 16 rows, two of which no token uses
    plan = replace(family_plan("opt"), module=ModuleSource(huggingface=config))

    with pytest.raises(ConfigError, match="seq_length is 16, the model learns 14 positions"):
        open_source(plan, 0)


def test_a_module_whose_blocks_read_the_embedding_again_would_train_wrongly(monkeypatch):
    """The trace refuses a module that is really wrong.

    A later stage has zeros in the place of the embedding.
    """
    monkeypatch.setattr(_Watch, "_reads", lambda self, value: False)
    plan = factory_plan("FirstInputs", pp=2)

    error, _ = worst_gradient(run_plans([plan])[0], run_foreign_reference(plan))

    assert error > 0.01


def half_sequence_parallel() -> Plan:
    """Sequence parallelism in the blocks alone."""
    plan = family_plan("llama", tp=2, sp=True)
    plain = family_plan("llama", tp=2).layer_plans
    return replace(
        plan,
        layer_plans={
            name: plan.layer_plans[name] if "block" in name else plain[name] for name in plain
        },
    )


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        pytest.param(
            family_plan("gpt2", tp=2),
            "tp is 2, and no tensor-parallel plan is known for gpt2",
            id="gpt2-tp",
        ),
        pytest.param(factory_plan("small", tp=2), "tp is 2, and nothing says how", id="factory-tp"),
        pytest.param(
            family_plan("llama", recompute=("norm1",)), "recompute names norm1", id="operators"
        ),
        pytest.param(
            family_plan("llama", recompute="full", recompute_ends=True),
            "it is all operators of a block or none",
            id="ends",
        ),
        pytest.param(
            with_divisions(family_plan("llama", tp=2), BATCH),
            "operator norm1 is not divided as Megatron does",
            id="by-batch",
        ),
        pytest.param(
            half_sequence_parallel(),
            "sequence_parallel differs",
            id="sequence-parallel-in-some-layers",
        ),
        pytest.param(
            replace(
                family_plan("llama"), model=replace(family_plan("llama").model, vocab_multiple=128)
            ),
            "is padded to 128",
            id="padded",
        ),
    ],
)
def test_what_a_foreign_module_cannot_run_is_refused_and_the_nearest_plan_is_not(plan, message):
    with pytest.raises(ConfigError, match=message):
        validate(plan)
    validate(nearest_legal(plan))


def test_sequence_parallelism_in_some_layers_would_not_run():
    """The validator refuses a plan that really fails.

    The parts do not agree on the tokens of a rank.
    """
    with pytest.raises(ProcessRaisedException, match=r"[Ss]hape|size"):
        run_plans([half_sequence_parallel()])


def test_blocks_without_a_tensor_parallel_plan_cannot_be_divided_either():
    from parplan.executor.external.parallel_styles import place_block

    with pytest.raises(
        ConfigError, match="tensor-parallel plan of Linear in transformers is not there"
    ):
        place_block(torch.nn.Linear(2, 2), {}, {}, None, sequence=False)


@pytest.mark.parametrize(
    ("plan", "even"),
    [
        (factory_plan("small", dp=2), True),
        (factory_plan("small", dp=3, global_batch_size=6), False),
        (replace(factory_plan("small", dp=3, global_batch_size=6), module=None), True),
    ],
)
def test_bytes_are_compared_where_every_rank_has_an_equal_share(plan, even):
    assert plan.model == SMALL
    assert has_even_shards(plan) == even
