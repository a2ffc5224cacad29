"""torchtitan's options as its log says them in sentences: the model, the mesh and the batch.

The sentences are those of torchtitan 0.2.2, 0.3.0 and b5bcd76c66, in torchtitan/trainer.py (before
0.3 train.py), components/metrics.py, and of distributed/ parallel_dims.py,
activation_checkpoint.py and pipeline_parallel.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from math import prod

from parplan.planner.export.fields.arguments import Given
from parplan.planner.logs.log_lines import LogLine
from parplan.profiles.documents.numbers import whole
from parplan.profiles.documents.ranges import COUNT
from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.driver_names import CATALOGUE

_P, _T = "--parallelism.", "--training."
_N = "([0-9]{1,9})"
# the parts of a sentence in their order, and the option of each of their groups
_SENTENCES = tuple(
    (tuple(map(re.compile, parts)), names)
    for parts, names in (
        (
            (r"Model (\w{1,80}) ([\w.-]{1,80}) size: [0-9,]{1,30} total parameters",),
            ("--module", "--config"),
        ),
        (
            (
                f"device mesh with parallelism: pp={_N}, dp_replicate={_N}, dp_shard={_N}, "
                f"cp={_N}, tp={_N}, ep={_N}",
            ),
            (
                f"{_P}pipeline_parallel_degree",
                f"{_P}data_parallel_replicate_degree",
                f"{_P}data_parallel_shard_degree",
                f"{_P}context_parallel_degree",
                f"{_P}tensor_parallel_degree",
                f"{_P}expert_parallel_degree",
            ),
        ),
        (
            (
                f"initialized with local batch size {_N}, global batch size {_N}, ",
                f"sequence length {_N}",
            ),
            (f"{_T}local_batch_size", f"{_T}global_batch_size", f"{_T}seq_len"),
        ),
        (
            (
                f"initialized with {_N} tokens per DP rank, {_N} tokens per train step, ",
                f"maximum context length {_N}",
            ),
            ("tokens_of_rank", "tokens", f"{_T}seq_len"),
        ),
        (
            ("Applied (full|selective|Full|Selective)(?:AC)? activation",),
            ("activation_checkpoint",),
        ),
        (
            (rf"Using pipeline schedule (\w{{1,80}}) with {_N} microbatches",),
            (f"{_P}pipeline_parallel_schedule", "microbatches"),
        ),
    )
)
# before the mesh was one sentence: the axes that have several ranks
_OLD_MESH = re.compile(
    r"Building [0-9]-D device mesh with \[([\w', ]{1,200})\], \[([0-9, ]{1,200})\]"
)
_MARKS = (
    " total parameters",
    "device mesh with",
    "initialized with",
    " activation",
    " microbatches",
)
_OLD_AXES = {
    "pp": f"{_P}pipeline_parallel_degree",
    "dp_replicate": f"{_P}data_parallel_replicate_degree",
    "dp_shard": f"{_P}data_parallel_shard_degree",
    "cp": f"{_P}context_parallel_degree",
    "tp": f"{_P}tensor_parallel_degree",
}
_DEVICE = re.compile(r"CUDA capacity: (.{1,80}) with [0-9.]{1,12}GiB memory")
_NEEDED = (
    (f"{_P}pipeline_parallel_degree", "Building device mesh with parallelism: .."),
    (f"{_T}seq_len", "Trainer is initialized with .."),
)
_HINT = "say the configuration with --config FILE"
_RANKS = ("pipeline", "data_parallel_replicate", "data_parallel_shard", "context", "tensor")


def titan_options(lines: Iterable[LogLine], file: str) -> tuple[tuple[Given, ...], dict[str, str]]:
    """Returns the options of a log with their lines, and those of the machine that it states.

    () and {} of a log without these sentences. Raises ConfigError for one that has some of them.
    """
    found: dict[str, tuple[str, int]] = {}
    machine: dict[str, str] = {}
    for line in lines:
        found |= {name: (word, line.number) for name, word in stated_options(line.text).items()}
        machine |= stated_machine(line.text)
    if "--module" not in found:
        return (), {}
    for needed, sentence in _NEEDED:
        if needed not in found:
            raise ConfigError(
                f"{file}: the line `{sentence}` is missing",
                hint=_HINT,
            )
    number = {name: number for name, (_, number) in found.items()}

    def count(name: str, word: str) -> int:
        """Returns a number of the log that is at least 1. Raises ConfigError with its line."""
        return whole(word, name, f"{file}:{number.get(name, 1)}", COUNT, _HINT)

    options = _as_options({name: word for name, (word, _) in found.items()}, count)
    degrees = [count(name, word) for name, word in options.items() if _is_degree(name)]
    machine["--gpus"] = f"{prod(degrees)}"
    given = (
        Given(name, (word,), f"{file}:{number.get(name, 1)}") for name, word in options.items()
    )
    return tuple(given), machine


def stated_options(text: str) -> dict[str, str]:
    """Returns the options that a line states, {} of other lines."""
    if not any(mark in text for mark in _MARKS):
        return {}
    found: dict[str, str] = {}
    for parts, names in _SENTENCES:
        found |= dict(zip(names, _words_of(text, parts), strict=False))
    return found | _old_mesh(text)


def stated_machine(text: str) -> dict[str, str]:
    """Returns the option of the GPU that a line states, {} of other lines."""
    device = _DEVICE.search(text) if "CUDA capacity" in text else None
    return {"--gpu": CATALOGUE[device[1]]} if device and device[1] in CATALOGUE else {}


def _words_of(text: str, parts: Iterable[re.Pattern[str]]) -> tuple[str, ...]:
    """Returns the words of a sentence whose parts a line has in their order, () of other lines."""
    words: tuple[str, ...] = ()
    at = 0
    for part in parts:
        match = part.search(text, at)
        if match is None:
            return ()
        words, at = (*words, *match.groups()), match.end()
    return words


def _old_mesh(text: str) -> dict[str, str]:
    """Returns the degrees of the mesh in a line of 2024 and 2025, {} of others.

    A mesh that divides experts is not understood: its ranks stand in further axes.
    """
    match = _OLD_MESH.search(text)
    if match is None:
        return {}
    sizes = dict(zip(re.findall(r"\w+", match[1]), re.findall(r"\d+", match[2]), strict=False))
    if not sizes.keys() <= _OLD_AXES.keys():
        return {}
    return {option: sizes.get(axis, "1") for axis, option in _OLD_AXES.items()}


def _is_degree(name: str) -> bool:
    """True for the degrees whose product is the number of GPUs; experts lie over them."""
    return name.startswith(tuple(f"{_P}{ranks}" for ranks in _RANKS)) and name.endswith("_degree")


def _as_options(words: dict[str, str], count: Callable[[str, str], int]) -> dict[str, str]:
    """Returns the words as the command line has them.

    count    returns a number of the log, by its name and its word
    """
    options = dict(words)
    flavor = options["--config"].lower().replace("-", "_")
    options["--config"] = f"{options['--module']}_{flavor}"
    options["activation_checkpoint"] = options.get("activation_checkpoint", "none").lower()
    length = count(f"{_T}seq_len", options[f"{_T}seq_len"])
    for name, tokens in (("local", "tokens_of_rank"), ("global", "tokens")):
        if tokens in options:
            options[f"{_T}{name}_batch_size"] = f"{count(tokens, options.pop(tokens)) // length}"
    micro = options.pop("microbatches", None)
    if micro:
        local = f"{_T}local_batch_size"
        size = max(1, count(local, options[local]) // count("microbatches", micro))
        options[f"{_P}pipeline_parallel_microbatch_size"] = f"{size}"
    return options
