"""Arguments of Megatron-LM that say experts, windows, batches and the host, read and written."""

from __future__ import annotations

import pytest

from parplan.planner.export.fields.arguments import read_arguments, written
from parplan.planner.export.files.shell_words import shell_arguments
from parplan.planner.export.megatron.megatron import settings
from parplan.planner.export.megatron.megatron_arguments import TABLE
from parplan.planner.export.megatron.megatron_model import read_model
from parplan.profiles.errors import ConfigError
from parplan.profiles.models.model_catalog import load_model

RUN = "--bf16 --seq-length 4096 --micro-batch-size 1 --expert-model-parallel-size 2 "


def facts(text: str):
    return read_arguments(TABLE, shell_arguments(f"pretrain_gpt.py {text}", "a.sh"))


def configured(text: str):
    given = shell_arguments(f"pretrain_gpt.py {RUN} {text}", "a.sh")
    return settings(given, load_model("mixtral-8x7b").spec, 8)


@pytest.mark.parametrize(
    ("arguments", "fact", "value"),
    [
        ("--moe-token-dispatcher-type flex", "tokens_once", True),
        ("--overlap-moe-expert-parallel-comm", "overlap_exchanges", True),
        (
            "--fine-grained-activation-offloading --offload-modules attn_norm moe_act",
            "offload_modules",
            ("attn_norm", "moe_act"),
        ),
    ],
)
def test_an_argument_is_written_as_it_is_read(arguments, fact, value):
    found = configured(arguments)

    assert getattr(found, fact) == value
    again = " ".join(" ".join((name, *words)) for name, words in written(TABLE, found))
    assert getattr(configured(again), fact) == value


def test_modules_stay_on_the_device_without_the_switch_that_moves_them():
    assert configured("--offload-modules attn_norm").offload_modules == ()


def test_gathered_tokens_are_priced_on_a_rank_that_has_all_experts():
    assert facts("--moe-token-dispatcher-type allgather") == {"tokens_once": False}
    with pytest.raises(ConfigError, match="allgather without expert parallelism"):
        facts(f"{RUN} --moe-token-dispatcher-type allgather")


def test_a_schedule_of_batches_begins_with_its_first_and_ends_with_the_stated_one():
    schedule = '--step-batch-size-schedule "0:384 200B:768"'

    assert facts(schedule)["global_batch_size"] == 384
    assert facts(f"{schedule} --global-batch-size 768")["global_batch_size"] == 768


def test_windows_and_the_vocabulary_of_a_known_tokenizer_are_read():
    text = (
        "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --max-position-embeddings 256 "
        "--window-size 127,0 --window-attn-skip-freq 2 --tokenizer-model openai/gpt-oss-20b"
    )
    model = read_model(shell_arguments(f"pretrain_gpt.py {text}", "a.sh"), "m", "a.sh")

    assert [kind.window for kind in model.block_kinds] == [128, 0, 128, 0]
    assert model.vocab_size == load_model("gpt-oss-20b").spec.vocab_size


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("--tp-comm-overlap --tensor-model-parallel-size 2", "needs --sequence-parallel"),
        ("--tp-comm-overlap --sequence-parallel", "tensor-parallel size above 1"),
        ("--overlap-moe-expert-parallel-comm --expert-model-parallel-size 1", "above 1"),
        (
            "--overlap-moe-expert-parallel-comm --pipeline-model-parallel-size 2",
            "needs virtual stages",
        ),
        (
            "--overlap-moe-expert-parallel-comm --recompute-granularity full "
            "--recompute-method uniform --recompute-num-layers 1",
            "does not run with --recompute-granularity full",
        ),
        (
            "--overlap-moe-expert-parallel-comm --recompute-granularity selective "
            "--recompute-modules moe",
            "does not run with moe among --recompute-modules",
        ),
        ("--moe-token-dispatcher-type flex --expert-model-parallel-size 1", "several ranks"),
    ],
)
def test_a_switch_is_refused_where_megatron_refuses_it(arguments, reason):
    with pytest.raises(ConfigError, match=reason):
        configured(arguments)


def test_overlaps_are_read_where_megatron_runs_them():
    found = configured(
        "--tp-comm-overlap --sequence-parallel --tensor-model-parallel-size 2 "
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
        "--overlap-moe-expert-parallel-comm --moe-token-dispatcher-type flex"
    )

    assert (found.tp_overlap, found.overlap_exchanges, found.tokens_once) == (True, True, True)
