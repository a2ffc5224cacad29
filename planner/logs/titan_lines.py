"""torchtitan's options as its log says them in sentences: the model, the mesh and the batch.

The sentences are those of torchtitan 0.2.2 and 0.3.0: torchtitan/trainer.py (train.py before),
distributed/parallel_dims.py, distributed/activation_checkpoint.py, distributed/
pipeline_parallel.py and components/metrics.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from math import prod

from parplan.planner.export.arguments import Given
from parplan.planner.logs.log_lines import LogLine
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
    (r"Applied (full|selective|Full|Selective)(?:AC)? activation", ("activation_checkpoint",)),
    (
        r"Using pipeline schedule (\w+) with (\d+) microbatches",
        (f"{_P}pipeline_parallel_schedule", "microbatches"),
    ),
)
_DEVICE = re.compile(r"CUDA capacity: (.+) with [\d.]+GiB memory")
_RANKS = ("pipeline", "data_parallel_replicate", "data_parallel_shard", "context", "tensor")


def titan_options(lines: Iterable[LogLine], file: str) -> tuple[tuple[Given, ...], dict[str, str]]:
    """Returns the options of a log with their lines, and those of the machine that it states.

    () and {} of a log without these sentences.
    """
    found: dict[str, tuple[str, int]] = {}
    machine: dict[str, str] = {}
    for line in lines:
        for pattern, names in _SENTENCES:
            match = re.search(pattern, line.text)
            words = match.groups() if match else ()
            found |= {name: (word, line.number) for name, word in zip(names, words, strict=False)}
        device = _DEVICE.search(line.text)
        if device and device[1] in CATALOGUE:
            machine["--gpu"] = CATALOGUE[device[1]]
    if "--module" not in found:
        return (), {}
    options = _as_options({name: word for name, (word, _) in found.items()})
    degrees = [int(word) for name, word in options.items() if _is_degree(name)]
    if degrees:
        machine["--gpus"] = f"{prod(degrees)}"
    number = {name: number for name, (_, number) in found.items()}
    given = (
        Given(name, (word,), f"{file}:{number.get(name, 1)}") for name, word in options.items()
    )
    return tuple(given), machine


def _is_degree(name: str) -> bool:
    """True for the degrees whose product is the number of GPUs; experts lie over them."""
    return name.startswith(tuple(f"{_P}{ranks}" for ranks in _RANKS)) and name.endswith("_degree")


def _as_options(words: dict[str, str]) -> dict[str, str]:
    """Returns the words as the command line has them."""
    options = dict(words)
    flavor = options["--config"].lower().replace("-", "_")
    options["--config"] = f"{options['--module']}_{flavor}"
    options["activation_checkpoint"] = options.get("activation_checkpoint", "none").lower()
    micro = options.pop("microbatches", None)
    local = options.get(f"{_T}local_batch_size")
    if micro and local:
        size = max(1, int(local) // int(micro))
        options[f"{_P}pipeline_parallel_microbatch_size"] = f"{size}"
    return options
