"""Surroundings of a process.

They are closed and full streams, other encodings, no home, odd terminals, interrupts, and folders
without room.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from random import Random

from benchmarks.commands.fuzzing.inputs import Program, Stream
from benchmarks.commands.fuzzing.seeds import Seeds, shipped

NEEDS = ("plan-pp2-tp2", "plan-chunks", "profile")
TINY = "--model gpt-tiny --gpus 2 --gpu cpu"
COMMANDS = (
    f"estimate {TINY}",
    f"estimate {TINY} --json",
    f"estimate {TINY} -o out.yaml",
    f"estimate {TINY} -o -",
    "show plan.yaml",
    "show plan.yaml --json",
    "show chunks.yaml --chunks",
    "trace plan.yaml -o -",
    "trace plan.yaml -o out.json",
    "models",
    "clusters",
    "stacks",
    "schema",
    "--help",
    "estimate --help",
    "--version",
    "profile --show h.yaml",
    "show missing.yaml",
    "estimate --model nothing --gpus 2",
    "shwo",
    "compare plan.yaml",
    f"{TINY} --micro-batch-size 1 --recompute none --time-limit 1 -o out.yaml",
    f"{TINY} --time-limit 1 -o out.yaml",
    "estimate --model \u00e9t\u00e9.yaml --gpus 2 --gpu cpu",
    f"estimate {TINY} -o /dev/full",
    f"estimate {TINY} -o /proc/x.yaml",
    f"estimate {TINY} -o full/out.yaml",
    f"estimate {TINY} -o link.yaml",
    "max-model --hidden 64 --gpus 1 --gpu cpu --offload none --time-limit 1",
)
NOTHING: Mapping[str, str | None] = {}
ENVIRONMENTS: tuple[Mapping[str, str | None], ...] = (
    NOTHING,
    NOTHING,
    NOTHING,
    {"HOME": None},
    {"HOME": "/nowhere", "TMPDIR": "/nowhere"},
    {"COLUMNS": "1"},
    {"COLUMNS": "0"},
    {"COLUMNS": "-5"},
    {"COLUMNS": "abc"},
    {"COLUMNS": "99999"},
    {"LINES": "0", "COLUMNS": "2"},
    {"TERM": "dumb"},
    {"TERM": None},
    {"NO_COLOR": "1"},
    {"FORCE_COLOR": "1"},
    {"PATH": None},
    {"PATH": ""},
    {"LANG": "C", "LC_ALL": "C"},
    {"TZ": "nonsense"},
    {"PYTHONHASHSEED": "1"},
    {"USER": None},
    {"HF_HOME": "/nowhere"},
    {"OMP_NUM_THREADS": "abc"},
    {"CUDA_VISIBLE_DEVICES": "x"},
)
RANKS: tuple[Mapping[str, str | None], ...] = (
    {"RANK": "abc"},
    {"WORLD_SIZE": "0"},
    {"WORLD_SIZE": "abc"},
    {"RANK": "5"},
    {"RANK": "-1"},
    {"WORLD_SIZE": "2"},
    {"MASTER_ADDR": "nowhere.invalid"},
    {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "abc"},
    {"MASTER_ADDR": "127.0.0.1"},
    {"LOCAL_RANK": "99"},
    {"TORCHELASTIC_RESTART_COUNT": "x"},
    *ENVIRONMENTS[3:],
)


def make(chance: Random, seeds: Seeds) -> Mapping[str, object]:
    """Return a sound command in odd surroundings."""
    files = {
        "plan.yaml": seeds.content("plan-pp2-tp2"),
        "chunks.yaml": seeds.content("plan-chunks"),
        "h.yaml": seeds.content("profile"),
        "\u00e9t\u00e9.yaml": shipped("models", "gpt-tiny").replace(
            b"gpt-tiny", "\u00e9t\u00e9-\U0001f525".encode()
        ),
        "target.yaml": b"old",
    }
    fields: dict[str, object] = {
        "arguments": tuple(shlex.split(chance.choice(COMMANDS))),
        "files": files,
        "links": {"link.yaml": "target.yaml", "full": "/dev/full"},
        "environment": chance.choice(ENVIRONMENTS),
        **_streams(chance),
    }
    if chance.random() < 0.15:
        fields["interrupt_s"] = chance.choice((0.01, 0.05, 0.1, 0.2, 0.4, 0.8))
    return fields


def make_torch(chance: Random, seeds: Seeds) -> Mapping[str, object]:
    """Return the executor on one rank, or a check, in odd surroundings."""
    files = {"plan.yaml": seeds.content("plan-one")}
    if chance.random() < 0.3:
        return {
            "arguments": ("check", "plan.yaml"),
            "files": files,
            "environment": chance.choice(ENVIRONMENTS),
            **_streams(chance),
        }
    return {
        "program": Program.EXECUTOR,
        "arguments": ("plan.yaml", "--steps", "1", "--timeout", "3"),
        "files": files,
        "environment": chance.choice(RANKS),
        **(_streams(chance) if chance.random() < 0.5 else {}),
    }


def _streams(chance: Random) -> Mapping[str, object]:
    streams = (Stream.FILE, Stream.FILE, Stream.CLOSED, Stream.FULL, Stream.LEFT)
    stdout, stderr = chance.choice(streams), chance.choice((Stream.FILE, *streams))
    return {
        "stdout": stdout,
        "stderr": stderr,
        "encoding": chance.choice(("utf-8", "utf-8", "ascii", "latin-1")),
    }
