"""Megatron-LM's arguments as its log prints them, after `validate_args` has filled them in.

`_print_args` (megatron/training/arguments.py of NVIDIA/Megatron-LM at d98e8a64dd) prints the whole
namespace: a switch is True or False, an argument that was not given is None or has its default, and
fields have the name of the variable. Defaults of arguments that another one turns on are dropped.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator

from parplan.planner.export.fields.arguments import Given, Words
from parplan.planner.export.megatron.megatron import MEGATRON
from parplan.planner.logs.log_lines import LogLine
from parplan.profiles.documents.numbers import whole_of
from parplan.profiles.documents.ranges import DEVICES

_PRINTED = re.compile(r" {0,8}(\w{1,80}) \.{1,80} (.+)")
_VOCABULARY = re.compile(r"> padded vocab \(size: ([0-9]{1,9})\)")
_KNOWN = frozenset({row.name for row in MEGATRON.rows} | set(MEGATRON.refused))
_WORLD = "world_size"
_UNSET = ("None", "False", "0", "no_shard", "[]")
# the variable of an argument, where its name is another one (dest=, argparse_meta)
_ARGUMENTS = {"fp8": "--fp8-format", "fp4": "--fp4-format"}
_TURNED_OFF = {"add_bias_linear": "--disable-bias-linear"}
_NEEDS = (  # the start of a variable, and the variable without which its value says nothing
    ("num_query_groups", "group_query_attention"),
    ("fp8_recipe", "fp8"),
    ("moe_", "num_experts"),
    ("expert_", "num_experts"),
    ("exp_avg_", "use_precision_aware_optimizer"),
    ("data_parallel_sharding_strategy", "use_megatron_fsdp"),
    ("cp_comm_type", "_several_cp"),
    ("recompute_", "recompute_granularity"),
    ("num_distributed_optimizer_instances", "_several_instances"),
)
# what `validate_args` fills in from other arguments
_FILLED_IN = (
    "encoder_num_layers",
    "tensor_parallel_num_weight_shards",
    "expert_tensor_parallel_num_weight_shards",
)
_WORDS = {"torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.float32": "fp32"}


def printed_arguments(lines: Iterable[LogLine], file: str) -> tuple[tuple[Given, ...], int | None]:
    """Returns the arguments of a log with their lines, and the number of processes.

    () and None of a log that prints none.
    """
    values: dict[str, tuple[str, int]] = {}
    for line in lines:
        match = _PRINTED.match(line.text)
        if match:
            values[match[1]] = match[2].strip(), line.number
        vocabulary = padded_vocabulary(line.text)
        if vocabulary and "vocab_size" in values and values["vocab_size"][0] in _UNSET:
            values["vocab_size"] = vocabulary, line.number
    if "tensor_model_parallel_size" not in values:
        return (), None
    world, _ = values.get(_WORLD, ("", 0))
    return tuple(_given(values, file)), whole_of(world, DEVICES)


def padded_vocabulary(text: str) -> str:
    """Returns the vocabulary that a line states, "" of other lines."""
    match = _VOCABULARY.search(text) if "padded vocab" in text else None
    return match[1] if match else ""


def prints_argument(text: str) -> bool:
    """Returns whether a line prints an argument or the vocabulary."""
    return bool(_PRINTED.match(text)) or bool(padded_vocabulary(text))


def priced_value(text: str) -> dict[str, str]:
    """Returns the value of a line that prints an argument with a price, {} of other lines."""
    match = _PRINTED.match(text)
    if match is None or (_argument(match[1]) not in _KNOWN and match[1] != _WORLD):
        return {}
    return {match[1]: match[2].strip()}


def _argument(name: str) -> str:
    return _ARGUMENTS.get(name, f"--{name.replace('_', '-')}")


def _given(values: dict[str, tuple[str, int]], file: str) -> Iterator[Given]:
    texts = {name: text for name, (text, _) in values.items()}
    texts["_several_cp"] = "None" if texts.get("context_parallel_size") == "1" else "True"
    instances = texts.get("num_distributed_optimizer_instances")
    texts["_several_instances"] = "None" if instances == "1" else "True"
    for name, (text, number) in values.items():
        where = f"{file}:{number}"
        argument = _argument(name)
        if name in _TURNED_OFF and text == "False":
            yield Given(_TURNED_OFF[name], (), where)
        elif argument in _KNOWN and text not in _UNSET and _counts(name, texts):
            yield Given(argument, _words(text), where)


def _counts(name: str, texts: dict[str, str]) -> bool:
    needs = (need for start, need in _NEEDS if name.startswith(start))
    return name not in _FILLED_IN and all(texts.get(need, "None") not in _UNSET for need in needs)


def _words(text: str) -> Words:
    """Returns the words of a value as the command line has them."""
    if text == "True":
        return ()
    if text.startswith(("[", "(")):
        try:
            return tuple(f"{each}" for each in ast.literal_eval(text))
        except (ValueError, SyntaxError, MemoryError, RecursionError):  # a text with a bracket
            return (text,)
    return (_WORDS.get(text, text.rpartition("AttnBackend.")[2]),)
