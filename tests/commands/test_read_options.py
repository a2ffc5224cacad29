"""Options beside a launcher's file count where the file is silent, and contradict it aloud."""

from __future__ import annotations

import json

import pytest

from tests.helpers.command_runs import fail, succeed

TITAN = "torchrun --nproc_per_node=8 -m torchtitan.train --module llama3 --config llama3_8b {}\n"
MEGATRON = (
    "torchrun --nproc_per_node 8 --nnodes 1 pretrain_gpt.py --num-layers 4 --hidden-size 1024 "
    "--num-attention-heads 8 --max-position-embeddings 4096 --micro-batch-size 1 --bf16 "
    "--global-batch-size 16 --vocab-size 32000 --no-rope-fusion {}\n"
)
MACHINE = ("--gpu", "h100-80gb", "--gpus", "8")


def written(tmp_path, text: str, extra: str = "") -> str:
    path = tmp_path / "train.sh"
    path.write_text(text.format(extra))
    return str(path)


@pytest.mark.parametrize(
    ("text", "extra", "options", "said"),
    [
        pytest.param(TITAN, "", (), "8 x 8,192 tokens", id="shipped"),
        pytest.param(TITAN, "", ("--seq-length", "4096"), "8 x 4,096 tokens", id="length"),
        pytest.param(TITAN, "", ("--recompute", "full"), "recompute full", id="recompute"),
        pytest.param(MEGATRON, "", ("--seq-length", "2048"), "16 x 2,048 tokens", id="silent"),
    ],
)
def test_an_option_counts_where_the_file_is_silent(text, extra, options, said, tmp_path):
    file = written(tmp_path, text, extra)

    assert said in succeed("read", file, *MACHINE, *options).stdout


@pytest.mark.parametrize(
    ("text", "extra", "options", "message"),
    [
        (TITAN, "--training.seq_len 8192", ("--seq-length", "4096"), "--seq-length 4096: "),
        (TITAN, "", ("--precision", "fp32"), "--precision fp32: "),
        (TITAN, "", ("--vocab-size", "7"), "--vocab-size 7: "),
        (TITAN, "", ("--fp8",), "--fp8: "),
        (MEGATRON, "--seq-length 2048", ("--micro-batch-size", "2"), "--micro-batch-size 2: "),
    ],
)
def test_an_option_that_the_file_contradicts_is_an_error(text, extra, options, message, tmp_path):
    assert message in fail(2, "read", written(tmp_path, text, extra), *MACHINE, *options)


def test_check_takes_the_length_and_names_what_it_does_not_understand(tmp_path):
    file = written(tmp_path, MEGATRON)
    body = json.loads(succeed("check", file, *MACHINE, "--seq-length", "2048", "--json").stdout)

    assert body["fits"]
    assert "not understood, " in body["notes"][0]
    assert "--no-rope-fusion" in body["notes"][0]


def test_names_that_are_not_understood_stand_in_the_first_lines(tmp_path):
    lines = succeed("read", written(tmp_path, MEGATRON), *MACHINE, "--seq-length", "2048").stdout

    assert "not understood, taken as without effect" in " ".join(lines.splitlines()[:3])
