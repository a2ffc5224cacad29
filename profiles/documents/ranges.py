"""Ranges of the numbers that come from outside, by the name of their key or flag.

The ranges are generous, but keep out numbers with which a search never ends. A key has the range of
its name, else of its unit, the end of its name. Any other number is at most 10**18 or 1e+30 from
zero. The file readers check documents (profiles/documents/schema.py), the command line its flags
(commands/style.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from parplan.profiles.documents.texts import require_name, require_text
from parplan.profiles.errors import ConfigError

FOREIGN = "huggingface"  # a key whose mapping is another program's


@dataclass(frozen=True, slots=True)
class Range:
    """The numbers from `low` to `high`, both included."""

    low: float
    high: float

    def __contains__(self, number: float) -> bool:
        return self.low <= number <= self.high  # false for nan

    def __str__(self) -> str:
        return f"from {_shown(self.low)} to {_shown(self.high)}"


def _shown(number: float) -> str:
    whole = isinstance(number, int) and abs(number) < 10**13
    return f"{number:,}" if whole else f"{number:g}"


COUNT = Range(1, 10**9)
DEVICES = Range(1, 10_000_000)
RANKS = Range(0, DEVICES.high)  # a rank, or a number of devices where 0 means none
LAYERS = Range(1, 4096)
WIDTH = Range(1, 10_000_000)
BYTES = Range(0, 10**18)
SPEED = Range(1e-9, 1e30)  # any quantity per second
POSITIVE = Range(1e-30, 1e30)
WHOLE = Range(-(10**18), 10**18)
REAL = Range(-1e30, 1e30)
_BY_NAME = {
    **dict.fromkeys(("num_layers", "virtual_stages"), LAYERS),
    **dict.fromkeys(
        (
            "nodes",
            "gpus",
            "gpus_per_node",
            "nics",
            "nics_per_node",
            "gpus_per_numa",
            "numa_domains",
            "num_sms",
            "zero_ranks",
            "ranks_per_node",
            "num_devices",
            "world_size",
            "num_ranks",
        ),
        DEVICES,
    ),
    **dict.fromkeys(("hidden_size", "num_heads", "num_kv_heads", "head_dim", "hidden"), WIDTH),
    **dict.fromkeys(
        ("ffn_hidden_size", "expert_ffn_hidden_size", "expert_latent_size"),
        Range(0, 10 * 10_000_000),
    ),
    "lora_rank": Range(0, 65_536),
    "mtp_layers": Range(0, 4096),
    **dict.fromkeys(("num_experts", "experts_per_token"), Range(0, 100_000)),
    **dict.fromkeys(
        (
            "vocab_size",
            "max_seq_length",
            "vocab_multiple",
            "global_batch_size",
            "seq_length",
            "micro_batch_size",
            "num_micro_batches",
            "image_tokens",
        ),
        COUNT,
    ),
    "images_per_sequence": Range(0, 10**9),
    **dict.fromkeys(("chunk_elements", "num_chunks"), Range(1, 10**18)),
    **dict.fromkeys(
        (
            "efficiency",
            "bandwidth_share",
            "link_share",
            "point_to_point_share",
            "nic_share",
            "kernel_slowdown",
            "link_bytes_per_s",
            "node_bytes_per_s",
            "throttle_flops",
        ),
        POSITIVE,
    ),
    **dict.fromkeys(
        ("k_half", "keys_half", "head_half", "throttle", "launch_s", "latency_s", "latency_us"),
        Range(0, 1e30),
    ),
    "redundancy_gib": Range(-1e9, 1e9),  # below zero where the host holds states
    "rope_theta": POSITIVE,
    "norm_epsilon": Range(0, 1),
    "rotary_fraction": Range(0, 1),
    "dropout": Range(0, 1),
    "logit_bytes": Range(0, 10**6),
    "attention_kv_copies": Range(0, 10**6),
    "attention_output_copies": Range(0, 10**6),
    **dict.fromkeys(("step_copy_bytes", "master_bytes", "moment_bytes"), Range(0, 10**6)),
    "bucket_elements": BYTES,
    "host_operator_s": Range(0, 10**6),
    "allocator_share": Range(0, 1000),
}
_FLAGS = {
    **dict.fromkeys(("pp", "dp", "tp", "tp_rows", "cp", "ep", "etp"), DEVICES),
    "neighbours": Range(2, 10_000_000),
    "num_points": Range(3, 1000),
}
_BY_UNIT = {
    "_bytes_per_s": SPEED,
    "_flops_per_s": SPEED,
    "_gb_per_s": Range(1e-9, 1e9),
    "_tflops": Range(1e-9, 1e12),
    "gb_per_s": Range(1e-9, 1e9),
    "_bytes": BYTES,
    "_gib": Range(0, 1e9),
}


def range_of(name: str, *, whole: bool) -> Range:
    """Returns the range of a key or flag; `whole` says that its number is an integer."""
    if name in _BY_NAME:
        return _BY_NAME[name]
    by_unit = (bounds for unit, bounds in _BY_UNIT.items() if name.endswith(unit))
    return next(by_unit, WHOLE if whole else REAL)


def flag_range(name: str, *, whole: bool) -> Range:
    """Returns the range of a flag, or of a launcher's argument, by the name of its quantity."""
    return _FLAGS.get(name) or range_of(name, whole=whole)


def require_values(instance: object, where: str) -> None:
    """Raises ConfigError for the first number or text of a dataclass that no document may have.

    Numbers are in their ranges, texts are printable and of bounded length (texts.py). The error has
    the key's path. The configuration of a Hugging Face model is no document of parplan's.
    """
    todo: list[tuple[str, str, Any]] = [("", "", instance)]
    while todo:
        name, path, value = todo.pop()
        kind = type(value)
        if kind is str:
            if name.endswith("name"):
                require_name(value, where, path)
            else:
                require_text(name, value, where, path)
        elif kind is int or kind is float:
            if value not in range_of(name, whole=kind is int):
                raise ConfigError(
                    f"{where}: {path} is {value}, it must be {range_of(name, whole=kind is int)}",
                    hint="correct that value",
                )
        elif kind is tuple or kind is list:
            todo += [
                (name, f"{path}.{index}", each)
                for index, each in enumerate(value)
                if each is not None
            ]
        elif isinstance(value, Mapping) and name != FOREIGN:
            for key in value:
                require_name(str(key), where, f"a key of {path}")
            todo += [
                (str(key) if type(each) is str else name, f"{path}.{key}", each)
                for key, each in value.items()
                if each is not None
            ]
        elif dataclasses.is_dataclass(kind):
            todo += [
                (key, f"{path}.{key}" if path else key, getattr(value, key))
                for key in value.__dataclass_fields__
            ]


def require_range(name: str, value: float, what: str) -> None:
    """Raises ConfigError for a number out of the range of its name.

    what: the number's source in the message, such as a flag
    """
    bounds = flag_range(name, whole=isinstance(value, int))
    if value not in bounds:
        raise ConfigError(f"{what} is {value}, it must be {bounds}", hint=f"give a number {bounds}")
