"""torchtitan's options as its log says them in sentences: the model, the mesh and the batch.

The sentences are those of torchtitan 0.2.2, 0.3.0 and b5bcd76c66, in torchtitan/trainer.py (before
0.3 train.py), components/metrics.py, and of distributed/ parallel_dims.py,
activation_checkpoint.py and pipeline_parallel.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from math import prod

from parplan.planner.export.fields.arguments import Given
from parplan.planner.logs.log_lines import LogLine
from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.driver_names import CATALOGUE

_P, _T = "--parallelism.", "--training."
_SENTENCES = (  # a sentence, and the option of each of its groups
    (r"Model (\w+) ([\w.-]+) size: [\d,]+ total parameters", ("--module", "--config")),
    (
        r"device mesh with parallelism: pp=(\d+), dp_replicate=(\d+), dp_shard=(\d+), "
        r"cp=(\d+), tp=(\d+), ep=(\d+)",
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
        r"initialized with local batch size (\d+), global batch size (\d+), .*"
        r"sequence length (\d+)",
        (f"{_T}local_batch_size", f"{_T}global_batch_size", f"{_T}seq_len"),
    ),
    (
        r"initialized with (\d+) tokens per DP rank, (\d+) tokens per train step, .*"
        r"maximum context length (\d+)",
        ("tokens_of_rank", "tokens", f"{_T}seq_len"),
    ),
    (r"Applied (full|selective|Full|Selective)(?:AC)? activation", ("activation_checkpoint",)),
    (
        r"Using pipeline schedule (\w+) with (\d+) microbatches",
        (f"{_P}pipeline_parallel_schedule", "microbatches"),
    ),
)
# before the mesh was one sentence: the axes that have several ranks
_OLD_MESH = re.compile(r"Building \d-D device mesh with \[([\w', ]+)\], \[([\d, ]+)\]")
_OLD_AXES = {
    "pp": f"{_P}pipeline_parallel_degree",
    "dp_replicate": f"{_P}data_parallel_replicate_degree",
    "dp_shard": f"{_P}data_parallel_shard_degree",
    "cp": f"{_P}context_parallel_degree",
    "tp": f"{_P}tensor_parallel_degree",
}
_DEVICE = re.compile(r"CUDA capacity: (.+) with [\d.]+GiB memory")
_NEEDED = (
    (f"{_P}pipeline_parallel_degree", "Building device mesh with parallelism: .."),
    (f"{_T}seq_len", "Trainer is initialized with .."),
)
_RANKS = ("pipeline", "data_parallel_replicate", "data_parallel_shard", "context", "tensor")


def titan_options(lines: Iterable[LogLine], file: str) -> tuple[tuple[Given, ...], dict[str, str]]:
    """Returns the options of a log with their lines, and those of the machine that it states.

    () and {} of a log without these sentences. Raises ConfigError for one that has some of them.
    """
    found: dict[str, tuple[str, int]] = {}
    machine: dict[str, str] = {}
    for line in lines:
        for pattern, names in _SENTENCES:
            match = re.search(pattern, line.text)
            words = match.groups() if match else ()
            found |= {name: (word, line.number) for name, word in zip(names, words, strict=False)}
        found |= {name: (word, line.number) for name, word in _old_mesh(line.text).items()}
        device = _DEVICE.search(line.text)
        if device and device[1] in CATALOGUE:
            machine["--gpu"] = CATALOGUE[device[1]]
    if "--module" not in found:
        return (), {}
    for needed, sentence in _NEEDED:
        if needed not in found:
            raise ConfigError(
                f"{file}: the line `{sentence}` is missing",
                hint="say the configuration with --config FILE",
            )
    options = _as_options({name: word for name, (word, _) in found.items()})
    degrees = (int(word) for name, word in options.items() if _is_degree(name))
    machine["--gpus"] = f"{prod(degrees)}"
    number = {name: number for name, (_, number) in found.items()}
    given = (
        Given(name, (word,), f"{file}:{number.get(name, 1)}") for name, word in options.items()
    )
    return tuple(given), machine


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


def _as_options(words: dict[str, str]) -> dict[str, str]:
    """Returns the words as the command line has them."""
    options = dict(words)
    flavor = options["--config"].lower().replace("-", "_")
    options["--config"] = f"{options['--module']}_{flavor}"
    options["activation_checkpoint"] = options.get("activation_checkpoint", "none").lower()
    length = int(options[f"{_T}seq_len"])
    for name, tokens in (("local", "tokens_of_rank"), ("global", "tokens")):
        if tokens in options:
            options[f"{_T}{name}_batch_size"] = f"{int(options.pop(tokens)) // length}"
    micro = options.pop("microbatches", None)
    if micro:
        size = max(1, int(options[f"{_T}local_batch_size"]) // int(micro))
        options[f"{_P}pipeline_parallel_microbatch_size"] = f"{size}"
    return options
