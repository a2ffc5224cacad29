"""Every command that a summary, an error or a hint prints works as it stands.

Commands on lines of their own are run, or parsed where torchrun starts them; those inside sentences
are parsed, and each option that a text names is one of the command that printed it.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from click.testing import Result

from parplan.commands.options.option_values import LAUNCHERS
from tests.helpers.cases import mostly_slow, named
from tests.helpers.command_runs import run
from tests.helpers.printed_commands import (
    ROOT_COMMAND,
    commands,
    inline_commands,
    launchers_arguments,
    mentions,
    options_of,
    parse,
    require_starts,
    run_lines,
)

TINY = "--model gpt-tiny --gpus 2"
FOUR = "--model gpt-tiny --gpus 4"
EXPERTS = "--model mixtral-tiny --gpus 4 --gpu h100-80gb"
LORA = "--lora-rank 8 --lora-targets qkv"
EIGHT_B = "--model llama3-8b --gpus 16 --gpu h100-80gb --global-batch-size 64"
POOLS = "--model gpt-tiny --cluster pools.yaml --global-batch-size 16"
TRACED = "--model tests.helpers.divided_modules:gpt --gpus 2 --global-batch-size 16"
FIT = {
    "fastest of all": TINY,
    "megatron": f"{TINY} --for megatron",
    "megatron-bridge": f"{TINY} --for megatron-bridge",
    "torchtitan": f"{EIGHT_B} --for torchtitan",
    "deepspeed": f"{TINY} --for deepspeed",
    "fsdp2": f"{TINY} --for fsdp2",
    "huggingface": f"{TINY} --for huggingface",
    "galvatron": f"{TINY} --for galvatron",
    "accelerate": f"{TINY} --for accelerate",
    "parplan": f"{TINY} --for parplan",
    "full recompute": f"{TINY} --recompute full",
    "no launcher": f"{TINY} --for none",
    "no launcher of another stack": f"{TINY} --for none --stack torchtitan",
    "experts": EXPERTS,
    "experts for megatron": f"{EXPERTS} --for megatron",
    "adapters": f"{TINY} {LORA}",
    "adapters for parplan": f"{TINY} {LORA} --for parplan",
    "adapters of no launcher": f"{TINY} {LORA} --for none",
    "frozen": f"{TINY} --freeze embedding",
    "states on the host": f"{TINY} --offload optimizer",
    "states on the host for parplan": f"{TINY} --offload optimizer --for parplan",
    "only the host has room": "--model gpt-7.5b --gpus 4 --gpu v100-32gb --host-memory 480GiB",
    "by hand": f"estimate {TINY} --tp 2",
    "by hand of the own executor": f"estimate {TINY} --tp 2 --stack parplan",
    "by hand in chunks": f"estimate {TINY} --offload optimizer,parameters",
    "by hand of no launcher": f"estimate {FOUR} --pp 2 --schedule zbv --stack torchtitan",
    "by hand, too large": "estimate --model gpt-7.5b --gpus 4 --zero 3",
    "CPUs": f"{TINY} --gpu cpu",
    "two kinds": "--model gpt-tiny --gpu a100-80gb:2+h100-80gb:2 --gpus-per-node 2",
    "unequal nodes": POOLS,
    "pools divide the batch": f"{POOLS} --pools data",
    "least memory": f"{FOUR} --objective memory",
    "a front": f"{TINY} --objective pareto --points 3",
    "goodput": f"{FOUR} --objective goodput --mtbf 5000h --gpus-per-node 1",
    "another search": f"{TINY} --search greedy --time-limit 1",
    "preferred": f"{TINY} --for megatron,fsdp2 --prefer leanest",
    "robust": f"{TINY} --robust 20%",
    "long, whole": f"{TINY} --for megatron --verbose --explain",
    "long sequences": f"{EIGHT_B} --seq-length 32768 --for megatron",
    "one of 8 billion": EIGHT_B,
    "another folder": f"{TINY} --for megatron -o 'my plans/a plan.yaml'",
    "module": "--model config.json --module huggingface --gpus 2",
    "traced": TRACED,
    "traced in chunks": f"estimate {TRACED} --offload optimizer,parameters",
    "compared": f"compare {TINY} --baseline megatron",
    "sweep": f"sweep {TINY},4",
    "largest model": "max-model --family gpt --gpus 2 --gpu v100-16gb",
    "sizes": "size --model gpt-1.5b --tokens 100B --days 7 --gpu a100-80gb,h100-80gb",
    "cluster file": "init made.yaml --gpu h100-80gb --nodes 2 --no-look --no-ask",
}
PLAIN_FIT = (
    "megatron",
    "fsdp2",
    "no launcher",
    "by hand in chunks",
    "by hand of no launcher",
    "CPUs",
    "another folder",
)
ON_V100 = "--model gpt-7.5b --gpus 8 --gpu v100-32gb"
TOO_LARGE = "--model gpt-22b --gpus 1 --offload none"
# a request that fails, with its exit code
FAIL = {
    "no arguments": ("", 2),
    "no number of GPUs": ("--model gpt-tiny", 2),
    "unknown model": ("--model gpt-tinny --gpus 2", 2),
    "unknown option": (f"{TINY} --micro-batchsize 2", 2),
    "too large": (TOO_LARGE, 3),
    "too large for megatron": (f"{TOO_LARGE} --for megatron", 3),
    "too large for parplan": (f"{TOO_LARGE} --for parplan", 3),
    "too large for no launcher": (f"{TOO_LARGE} --for none", 3),
    "too large with pins": (
        f"{ON_V100} --dp 8 --zero 0 --offload none --for parplan",
        3,
    ),
    "too large on the host": ("--model gpt-22b --gpus 1 --host-memory 8GiB", 3),
    "too large traced": (f"{TRACED} --memory-limit 1MiB", 3),
    "a limit below all": (f"{TINY} --memory-limit 1MiB --for megatron,parplan", 3),
    "model without a configuration": (f"{TINY} --for torchtitan", 2),
    "adapters elsewhere": (f"{TINY} {LORA} --for megatron,fsdp2", 2),
    "none beside another": (f"{TINY} --for none,megatron", 2),
    "stack of another program": (f"{TINY} --for megatron --stack deepspeed", 2),
    "aim of one launcher": (f"{TINY} --for megatron,fsdp2 --objective memory", 2),
    "host for a launcher": (f"{TINY} --for megatron --offload optimizer", 2),
    "launcher of a traced module": (f"{TRACED} --for megatron", 2),
    "tp of no head": (f"{TINY} --tp 3", 2),
    "degrees that are not the GPUs": (f"{FOUR} --pp 3", 2),
    "all degrees": (f"{FOUR} --pp 1 --dp 2 --tp 1", 2),
    "experts of a dense model": (f"{FOUR} --ep 2 --for fsdp2", 2),
    "pieces of a sequence": (f"{FOUR} --cp 2 --seq-length 66", 2),
    "micro-batch of no batch": (f"{TINY} --micro-batch-size 7", 2),
    "pin that is banned": (f"{TINY} --zero 1 --forbid zero=1", 2),
    "ban of no choice": (f"{TINY} --forbid zeero=1", 2),
    "ban without a value": (f"{TINY} --forbid zero", 2),
    "schedule of no stack": (f"{TINY} --for megatron --schedule zbv", 2),
    "points without a front": (f"{TINY} --points 3", 2),
    "seed without a method": (f"{TINY} --seed 3", 2),
    "method with launchers": (f"{TINY} --search mcmc --for megatron", 2),
    "goodput without failures": (f"{TINY} --objective goodput", 2),
    "failures without their time": (f"{TINY} --spare-nodes 1 --for fsdp2", 2),
    "goodput for a launcher": (f"{TINY} --objective goodput --mtbf 5000h --for megatron", 2),
    "pools of equal nodes": (f"{TINY} --pools data", 2),
    "two devices": ("--model gpt-tiny --gpu a100-80gb --cluster pools.yaml", 2),
    "targets without a rank": (f"{TINY} --lora-targets qkv --for fsdp2", 2),
    "all frozen": (f"{TINY} --freeze all", 2),
    "preference of another aim": (f"{TINY} --objective memory --prefer leanest", 2),
    "formats": (f"{TINY} --fp8 --precision fp16", 2),
    "fp8 on a device without": (f"{TINY} --fp8", 2),
    "no time": (f"{TINY} --time-limit 0", 2),
    "too little time": (f"{EIGHT_B} --time-limit 0.001 --for parplan", 4),
    "too little memory": (f"{EIGHT_B} --memory-cap 1MiB --for parplan", 4),
    "option before a command": (f"{TINY} show plan.yaml", 2),
    "by hand, degrees": (f"estimate {TINY} --tp 4", 2),
    "by hand, sizes of a pipeline": (f"estimate {TINY} --pp 2 --virtual-stages 9", 2),
    "by hand, for several": (f"estimate {TINY} --for megatron,fsdp2", 2),
    "by hand, for torchtitan": (f"estimate {TINY} --for torchtitan", 2),
    "no plan file": ("export plan.yaml --to megatron", 2),
    "no launcher's file": ("read plan.sh", 2),
    "file of no launcher": ("read config.json", 2),
    "check of no plan": ("check config.json", 2),
    "calibration without a run": ("calibrate config.json", 2),
    "init of a file": ("init --nccl-tests x.txt cluster.yaml", 2),
}
PLAIN_FAIL = (
    "no arguments",
    "unknown model",
    "model without a configuration",
    "none beside another",
    "stack of another program",
    "tp of no head",
    "experts of a dense model",
    "pin that is banned",
    "goodput without failures",
    "failures without their time",
    "targets without a rank",
    "option before a command",
    "no plan file",
)
EXPORTED = {
    "dense": TINY,
    "experts": EXPERTS,
    "8 billion": EIGHT_B,
    "of no launcher": f"{TINY} --for none",
    "states on the host": f"estimate {FOUR} --offload optimizer",
    "too large without the host": "--model gpt-7.5b --gpus 4 --gpu v100-32gb --host-memory 480GiB",
    "adapters": f"{TINY} {LORA}",
    "unequal nodes": POOLS,
    "traced": TRACED,
}
ANNOUNCED = re.compile("(run it|runs|run them|check it) with$", re.MULTILINE)
WROTE = re.compile(r"^wrote (.+)$", re.MULTILINE)
READ_BACK = re.compile(r'read back with ([^"\n]+)')
FITS_WITH = re.compile(r"^ {4,}(\S.*?) {2,}\S.* a step", re.MULTILINE)
ENOUGH = re.compile(r"\((--gpus) (\d+)\)")
ADDED = re.compile(r"(?:add|use|for example:?) (--[a-z-]+) ([\w.%=]+)(?![-\w])")
LEFT_OUT = re.compile(r"(?:leave out|drop) (--[a-z-]+)(?: and (--[a-z-]+))?|leave (--[a-z-]+) out")
UNEQUAL = {
    "name": "two-pools",
    "pools": [
        {"name": "old", "gpu": "a100-80gb", "nodes": 1, "gpus_per_node": 2},
        {"name": "new", "gpu": "h100-80gb", "nodes": 1, "gpus_per_node": 4},
    ],
    "joins": [{"name": "spine", "gb_per_s_of_node": 50, "latency_us": 8, "source": "assumed"}],
}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 512,
    "vocab_size": 1024,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
}


@pytest.fixture(autouse=True)
def _as_a_new_user(tmp_path, monkeypatch):
    """An empty folder with a machine of unequal nodes and a model's configuration."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "no-settings"))
    monkeypatch.setenv("COLUMNS", "200")
    Path("my plans").mkdir()
    Path("pools.yaml").write_text(yaml.safe_dump(UNEQUAL), encoding="utf-8")
    Path("config.json").write_text(json.dumps(LLAMA), encoding="utf-8")


def said(result: Result) -> str:
    return f"{result.stdout}\n{result.stderr}"


def name_of(words: list[str]) -> str:
    """Returns the command that words call, the main one's name by default."""
    return words[0] if words and words[0] in commands() else ROOT_COMMAND


def require_usable(text: str, words: list[str]) -> None:
    """Asserts that the options in a text, and the commands inside its sentences, are there.

    An option behind no command is of the words, of the plan that they are about, or a launcher's.
    """
    usual = options_of(name_of(words)) | options_of(ROOT_COMMAND) | launchers_arguments()
    for mention in mentions(text):
        known = usual if mention.command is None else options_of(mention.command)
        assert mention.option in known, (mention, text)
    for told in inline_commands(text):
        parse(told)


def require_works(line: list[str]) -> None:
    """Asserts that a line on its own does what it is printed for."""
    if line[0] == "torchrun":
        require_starts(line, Path())
        return
    result = run(*line[1:])
    assert result.exit_code == 0, (line, result.output)


@pytest.mark.parametrize("asked", named(FIT, PLAIN_FIT))
def test_what_is_printed_with_a_plan_works(asked):
    words = shlex.split(asked)
    result = run(*words)
    assert result.exit_code == 0, result.output

    require_usable(said(result), words)
    lines = run_lines(said(result))
    assert bool(lines) == bool(ANNOUNCED.search(said(result)))
    for line in lines:
        require_works(line)


@pytest.mark.slow
@pytest.mark.parametrize("name", mostly_slow(EXPORTED, ("dense",)))
def test_an_export_works_or_says_first_that_it_does_not_fit(name):
    assert run(*shlex.split(EXPORTED[name]), "-o", "plan.yaml").exit_code == 0
    for target in LAUNCHERS:
        words = ["export", "plan.yaml", "--to", target, "-o", target]
        result = run(*words)
        require_usable(said(result), words)
        if result.exit_code == 3:
            assert result.stdout.startswith("does not fit")
        elif result.exit_code == 2:
            assert result.stderr.startswith("error: ")
            assert not Path(target).exists()
        else:
            assert result.exit_code == 0, result.output
        for path in WROTE.findall(result.stdout)[:1]:  # the file with the arguments
            read_back = READ_BACK.search(Path(path).read_text(encoding="utf-8"))
            assert read_back is not None
            if "--gpu " not in read_back.group(1):  # the machine has no name
                continue
            back = run("read", path, *shlex.split(read_back.group(1)), "-o", "back.yaml")
            assert back.exit_code == 0, back.output


@pytest.mark.parametrize(("asked", "code"), named(FAIL, PLAIN_FAIL))
def test_what_is_printed_with_an_error_works(asked, code):
    words = shlex.split(asked)
    result = run(*words)
    assert result.exit_code == code, result.output
    _, hint = result.stderr.split("hint: ")

    require_usable(hint, words)
    for changed, fits in ways_out(words, hint):
        after = run(*changed)
        assert after.exit_code == 0 or (after.exit_code == 3 and not fits), (changed, after.output)


def ways_out(words: list[str], hint: str) -> Iterator[tuple[list[str], bool]]:
    """Yields the words that a hint makes of those that failed, for each change that it spells.

    With them is True where the hint says that a plan fits.
    """
    for change in FITS_WITH.findall(hint):
        new, _, dropped = change.partition("without ")
        yield changed_to(words, shlex.split(new), re.findall(r"--[a-z-]+", dropped)), True
    for option, value in ENOUGH.findall(hint):
        yield changed_to(words, [option, value], []), True
    for option, value in ADDED.findall(hint):
        yield changed_to(words, [option, value.rstrip(".,")], []), False
    for options in LEFT_OUT.findall(hint):
        yield changed_to(words, [], [option for option in options if option]), False


def changed_to(words: list[str], new: list[str], dropped: list[str]) -> list[str]:
    """Returns words without some options, and with others in place of theirs."""
    gone = {*dropped, *(word for word in new if word.startswith("--"))}
    kept: list[str] = []
    skips = False
    for word in words:
        if word.startswith("--"):
            skips = word in gone
        if not skips:
            kept.append(word)
    return [*kept, *new]


def test_a_hint_becomes_the_words_that_it_spells():
    hint = "it fits with\n        --gpus 4               1.2 s a step (+12 %)\n"
    other = "        --offload none without --zero  3 ms a step\nadd --mtbf, for example --mtbf 5h"
    words = ["--gpus", "2", "--zero", "1"]

    assert list(ways_out(words, hint + other)) == [
        (["--zero", "1", "--gpus", "4"], True),
        (["--gpus", "2", "--offload", "none"], True),
        (["--gpus", "2", "--zero", "1", "--mtbf", "5h"], False),
    ]
    assert list(ways_out(words, "leave out --zero")) == [(["--gpus", "2"], False)]
