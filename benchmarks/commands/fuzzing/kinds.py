"""Kinds of input: the maker of each, and its number among 15,000 inputs."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random

import yaml

from benchmarks.commands.fuzzing import command_lines, foreign_files, injected, surroundings
from benchmarks.commands.fuzzing.consistent import problem_of
from benchmarks.commands.fuzzing.inputs import Input, Program
from benchmarks.commands.fuzzing.mutations import bytes_mutated, json_mutated, yaml_mutated
from benchmarks.commands.fuzzing.plans import edited
from benchmarks.commands.fuzzing.seeds import (
    CONFIGS,
    DESCRIBED,
    NCCL,
    SCHEDULES,
    TRACED_CONFIGS,
    TRACED_PLANS,
    Seeds,
    measured_steps,
    parsed,
    shipped,
    shipped_tree,
    tokens,
)
from benchmarks.commands.fuzzing.values import NAMES

Make = Callable[[Random, Seeds], Mapping[str, object]]
CPU = "--gpus 2 --gpu cpu"
LIMIT = "--time-limit 1"
CELLS = (
    b"",
    b"0",
    b"-1",
    b"nan",
    b"inf",
    b"1e999",
    b"abc",
    b"9" * 30,
    b"1.5",
    b"true",
    b"\xff",
    b'"',
    b"1e18",
    b"0x10",
    b"64",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of input.

    weight  its number among 15,000 inputs
    needs   the seeds that `make` reads
    torch   True if it needs a server with torch
    """

    name: str
    weight: int
    make: Make
    needs: tuple[str, ...] = ()
    torch: bool = False


def build(kind: Kind, number: int, seed: int, seeds: Seeds) -> Input:
    """Return the input of that number, equal for equal seeds."""
    return Input(
        kind=kind.name, number=number, **kind.make(Random(f"{seed} {kind.name} {number}"), seeds)
    )  # type: ignore[arg-type]


def _read_by(
    commands: tuple[str, ...], name: str, content: bytes, chance: Random, **fields: object
) -> Mapping[str, object]:
    files = {name: content, **fields.pop("files", {})}  # type: ignore[dict-item]
    return {"arguments": tuple(shlex.split(chance.choice(commands))), "files": files, **fields}


def _model_yaml(chance: Random, _: Seeds) -> Mapping[str, object]:
    name = chance.choice(("gpt-tiny", "gpt-tiny", "mixtral-tiny", "llama3-8b"))
    commands = (
        f"estimate --model m.yaml {CPU}",
        f"estimate --model m.yaml {CPU} --tp 2",
        f"estimate --model m.yaml {CPU} --pp 2 --recompute full",
        f"explain --model m.yaml {CPU} --tp 2",
        f"--model m.yaml {CPU} --micro-batch-size 1 --recompute none {LIMIT} -o p.yaml",
        "estimate --model m.yaml --gpus 8 --zero 3",
    )
    content = yaml_mutated(shipped("models", name), shipped_tree("models", name), chance)
    return _read_by(commands, "m.yaml", content, chance)


def _family_yaml(chance: Random, _: Seeds) -> Mapping[str, object]:
    tree = dict(shipped_tree("families", "gpt"))
    tree["members"] = dict(list(tree["members"].items())[:2])
    content = yaml_mutated(yaml.safe_dump(tree).encode(), tree, chance)
    commands = (
        f"max-model --family f.yaml --gpus 1 --gpu cpu {LIMIT} --offload none",
        f"max-model --family f.yaml --hidden 64 --gpus 1 --gpu cpu {LIMIT} --offload none",
    )
    return _read_by(commands, "f.yaml", content, chance)


def _cluster_yaml(chance: Random, _: Seeds) -> Mapping[str, object]:
    name = chance.choice(("cpu", "a100-80gb", "gh200-96gb"))
    commands = (
        "estimate --model gpt-tiny --cluster c.yaml --gpus 2",
        "estimate --model gpt-tiny --cluster c.yaml",
        "estimate --model gpt-tiny --gpu c.yaml --gpus 2",
        "estimate --model gpt-tiny --cluster c.yaml --gpus 16 --tp 2 --pp 2 --zero 1",
        "explain --model gpt-tiny --cluster c.yaml --gpus 2 --tp 2",
        (
            "--model gpt-tiny --cluster c.yaml --gpus 2 --micro-batch-size 1 --recompute "
            f"none {LIMIT} -o p.yaml"
        ),
        "estimate --model gpt-tiny --cluster c.yaml --gpus 2 --offload optimizer,parameters",
    )
    return _read_by(
        commands,
        "c.yaml",
        yaml_mutated(shipped("clusters", name), shipped_tree("clusters", name), chance),
        chance,
    )


def _stack_yaml(chance: Random, _: Seeds) -> Mapping[str, object]:
    name = chance.choice(("parplan", "megatron-core", "torchtitan", "fsdp1", "megatron-deepspeed"))
    commands = (
        f"estimate --model gpt-tiny {CPU} --stack s.yaml",
        f"estimate --model gpt-tiny {CPU} --stack s.yaml --tp 2 --zero 1 --pp 1",
        f"estimate --model gpt-tiny {CPU} --pp 2 --stack s.yaml",
        f"explain --model gpt-tiny {CPU} --tp 2 --stack s.yaml",
        (
            f"--model gpt-tiny {CPU} --stack s.yaml --micro-batch-size 1 --recompute none "
            f"{LIMIT} -o p.yaml"
        ),
    )
    return _read_by(
        commands,
        "s.yaml",
        yaml_mutated(shipped("stacks", name), shipped_tree("stacks", name), chance),
        chance,
    )


def _plan_yaml(chance: Random, seeds: Seeds) -> Mapping[str, object]:
    name = chance.choice((*DESCRIBED, "plan-profiled"))
    commands = (
        "show p.yaml",
        "show p.yaml",
        "show p.yaml --json",
        "show p.yaml --chunks",
        "trace p.yaml -o t.json",
        "trace p.yaml -o -",
    )
    return _read_by(
        commands, "p.yaml", yaml_mutated(seeds.content(name), seeds.tree(name), chance), chance
    )


def _plan_torch(chance: Random, seeds: Seeds) -> Mapping[str, object]:
    name = chance.choice((*DESCRIBED, *TRACED_PLANS))
    content = yaml_mutated(seeds.content(name), seeds.tree(name), chance)
    if chance.random() < 0.5:
        return {"arguments": ("p.yaml",), "files": {"p.yaml": content}, "program": Program.RULES}
    return _read_by(
        ("check p.yaml", "check p.yaml --json", "check p.yaml --rank 0"), "p.yaml", content, chance
    )


def _edited_plan(names: tuple[str, ...], chance: Random, seeds: Seeds) -> Mapping[str, object]:
    tree = edited(seeds.tree(chance.choice(names)), chance)
    return {
        "files": {
            "p.yaml": yaml.safe_dump(tree, sort_keys=False, default_flow_style=None).encode()
        },
        "inconsistent": problem_of(tree),
    }


def _plan_fields(chance: Random, seeds: Seeds) -> Mapping[str, object]:
    commands = (
        *("show p.yaml",) * 6,
        *("trace p.yaml -o t.json",) * 4,
        "show p.yaml --chunks",
        "show p.yaml --json",
        "compare p.yaml",
    )
    return {
        **_edited_plan(tuple(DESCRIBED), chance, seeds),
        "arguments": tuple(chance.choice(commands).split()),
    }


def _plan_run(chance: Random, seeds: Seeds) -> Mapping[str, object]:
    edited = _edited_plan((*DESCRIBED, *TRACED_PLANS), chance, seeds)
    how = chance.random()
    if how < 0.55:
        return {**edited, "program": Program.RULES, "arguments": ("p.yaml",)}
    return (
        {**edited, "arguments": ("check", "p.yaml")}
        if how < 0.8
        else {**edited, "arguments": ("check", "p.yaml", "--rank", "0", "--json")}
    )


def _plan_trained(chance: Random, seeds: Seeds) -> Mapping[str, object]:
    edited = _edited_plan(("plan-one", "plan-one", "traced-one"), chance, seeds)
    return {
        **edited,
        "program": Program.EXECUTOR,
        "arguments": ("p.yaml", "--steps", "1", "--timeout", "5", "--no-record"),
    }


def _traced_plan(chance: Random, seeds: Seeds) -> Mapping[str, object]:
    name = chance.choice(tuple(TRACED_PLANS))
    commands = (
        "show p.yaml",
        "show p.yaml --json",
        "trace p.yaml -o t.json",
        "compare p.yaml",
        "show p.yaml --chunks",
    )
    if chance.random() < 0.5:
        return {
            **_edited_plan((name,), chance, seeds),
            "arguments": tuple(chance.choice(commands[:2]).split()),
        }
    return _read_by(
        commands, "p.yaml", yaml_mutated(seeds.content(name), seeds.tree(name), chance), chance
    )


def _profile(chance: Random, seeds: Seeds) -> Mapping[str, object]:
    name = chance.choice(("profile", "profile", "calibrated"))
    commands = (
        "profile --show h.yaml",
        "profile --show h.yaml --json",
        "profile --diff h.yaml h.yaml",
        "profile --diff good.yaml h.yaml",
        "estimate --model gpt-tiny --gpus 2 --profile h.yaml --force-profile",
        "estimate --model gpt-tiny --gpus 2 --profile h.yaml",
        (
            "estimate --model gpt-tiny --gpus 2 --gpu cpu --profile h.yaml --stack "
            "parplan --precision fp32"
        ),
    )
    content = yaml_mutated(seeds.content(name), seeds.tree(name), chance)
    return _read_by(
        commands, "h.yaml", content, chance, files={"good.yaml": seeds.content("profile")}
    )


def _run_json(chance: Random, seeds: Seeds) -> Mapping[str, object]:
    commands = (
        "show run.json",
        "show run.json --json",
        "calibrate run.json -o h.yaml",
        "calibrate run.json good.json -o -",
    )
    content = json_mutated(seeds.content("run"), seeds.tree("run"), chance)
    return _read_by(
        commands, "run.json", content, chance, files={"good.json": seeds.content("run")}
    )


def _hf_config(chance: Random, _: Seeds) -> Mapping[str, object]:
    content = chance.choice(tuple(CONFIGS.values()))
    commands = (
        f"estimate --model config.json {CPU}",
        f"estimate --model . {CPU} --tp 2 --pp 1",
        f"explain --model config.json {CPU} --tp 2",
        f"estimate --model config.json {CPU} --module huggingface",
        f"--model config.json {CPU} --micro-batch-size 1 {LIMIT} -o p.yaml",
        f"estimate --model config.json {CPU} --pp 2 --zero 1",
    )
    return _read_by(commands, "config.json", json_mutated(content, parsed(content), chance), chance)


def _hf_traced(chance: Random, _: Seeds) -> Mapping[str, object]:
    content = chance.choice(tuple(TRACED_CONFIGS.values()))
    small = f"--global-batch-size 2 --seq-length 16 --precision fp32 {LIMIT} -o p.yaml"
    commands = (
        f"--model config.json --trace --gpus 1 --gpu cpu {small}",
        f"--model config.json --trace {CPU} --pp 2 --stages uniform {small}",
    )
    return _read_by(commands, "config.json", json_mutated(content, parsed(content), chance), chance)


def _checkpoint(chance: Random, seeds: Seeds) -> Mapping[str, object]:
    folder, names = "saved/step-000002", ("checkpoint.json", ".metadata", "__0_0.distcp")
    contents = [seeds.content(name) for name in ("checkpoint", "checkpoint-0", "checkpoint-1")]
    which = chance.choice((0, 0, 0, 1, 2))
    contents[which] = (
        json_mutated(contents[0], seeds.tree("checkpoint"), chance)
        if which == 0
        else bytes_mutated(contents[which], chance)
    )
    files = {f"{folder}/{name}": content for name, content in zip(names, contents, strict=True)}
    if chance.random() < 0.1:
        del files[f"{folder}/{chance.choice(names)}"]
    resume = chance.choice(
        ("auto", "auto", folder, "saved", chance.choice(NAMES).replace("\0", "") or "x")
    )
    arguments = (
        "p.yaml",
        "--steps",
        "3",
        "--checkpoint-dir",
        "saved",
        f"--resume={resume}",
        "--no-record",
        "--timeout",
        "5",
    )
    return {
        "arguments": arguments,
        "files": {**files, "p.yaml": seeds.content("plan-one")},
        "program": Program.EXECUTOR,
    }


def _npy(chance: Random) -> bytes:
    shape = chance.choice(
        (
            "(400,)",
            "(20, 20)",
            "()",
            "(0,)",
            "(99999999999999,)",
            "(-1,)",
            "(400",
            "400",
            "(400.0,)",
        )
    )
    descr = chance.choice(
        ("'<u2'", "'<i4'", "'<f8'", "'|O'", "'>u2'", "[('a', '<u2')]", "'<U4'", "'x'", "3")
    )
    order = chance.choice(("False", "True", "0"))
    header = f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}"
    head = header.encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head + tokens()


def _tokens(chance: Random, seeds: Seeds) -> Mapping[str, object]:
    name = chance.choice(("t.bin", "t.bin", "t.npy", "t.npz", "t", "t.json", "t.txt"))
    sidecar = (
        b'{"dtype": "uint16", "count": 400, "documents": 1, "vocab_size": 256, "largest_id": 99, '
        b'"tokenizer": "bytes", "end_of_document": 0}'
    )
    files: dict[str, bytes] = {"p.yaml": seeds.content("plan-one")}
    good = (
        tokens(chance.choice(("uint16", "uint16", "uint32", "float64")))
        if name != "t.npy"
        else _npy(chance)
    )
    files[name] = good if chance.random() < 0.5 else bytes_mutated(good, chance)
    if chance.random() < 0.6:
        files[f"{name}.json"] = json_mutated(sidecar, parsed(sidecar), chance)
    dtype = chance.choice(((), ("--data-dtype", "uint32"), ("--data-dtype", "uint16")))
    arguments = ("p.yaml", "--steps", "1", "--data", name, *dtype, "--no-record", "--timeout", "5")
    return {"arguments": arguments, "files": files, "program": Program.EXECUTOR}


def _tokenize(chance: Random, _: Seeds) -> Mapping[str, object]:
    text = bytes_mutated("Was it a car or a cat I saw? \u00e9\u00e9\n".encode() * 20, chance)
    model = b'{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}'
    config = b'{"tokenizer_class": "GPT2Tokenizer", "model_max_length": 64}'
    files = {
        "a.txt": text,
        "d/b.txt": text[:50],
        "tok/tokenizer_config.json": json_mutated(config, parsed(config), chance),
        "tok/tokenizer.json": json_mutated(model, parsed(model), chance),
    }
    base = ["tokenize", chance.choice(("a.txt", "d", ".", "missing", "a.txt"))]
    extra = chance.choice(
        (
            [],
            [],
            [
                "--glob",
                chance.choice(
                    ("*", "**", "**/*", "[", "", "/", "../*", "*.txt/../..", "a\\", "***")
                ),
            ],
            ["--dtype", "uint32"],
            ["--tokenizer", "./tok"],
            ["--tokenizer", "./missing"],
            ["--tokenizer", "a.txt"],
            ["--tokenizer", chance.choice(NAMES)],
            [
                "-o",
                chance.choice(("d", "a.txt", "missing/x.bin", "x" * 300, "x", "/dev/full", "-")),
            ],
            ["--json"],
        )
    )
    return {
        "arguments": tuple(argument.replace("\0", "") for argument in (*base, *extra)),
        "files": files,
    }


def _schedule_csv(chance: Random, _: Seeds) -> Mapping[str, object]:
    pp, content = chance.choice(SCHEDULES)
    commands = (
        (
            f"estimate --model gpt-tiny --gpus {pp} --gpu cpu --pp {pp} "
            "--global-batch-size 4 --schedule-file s.csv --stack parplan"
        ),
        (
            f"estimate --model gpt-tiny --gpus 4 --gpu cpu --pp {pp} --global-batch-size "
            "8 --schedule-file s.csv --stack parplan -o p.yaml"
        ),
        (
            f"estimate --model gpt-tiny --gpus {pp} --gpu cpu --pp {pp} "
            "--global-batch-size 4 --schedule-file s.csv --stack parplan --recompute full --zero 1"
        ),
    )
    return _read_by(commands, "s.csv", bytes_mutated(content, chance), chance)


def _steps_csv(chance: Random, _: Seeds) -> Mapping[str, object]:
    commands = (
        "validate --steps t.csv",
        "validate --steps t.csv --rows",
        "validate --steps t.csv --json",
    )
    content = measured_steps()
    if chance.random() < 0.5:
        return _read_by(commands, "t.csv", bytes_mutated(content, chance), chance)
    rows = [line.split(b",") for line in content.splitlines()]
    for _ in range(chance.choice((1, 1, 3))):
        row = chance.choice(rows)
        cell = chance.choice(CELLS)
        row[chance.randrange(len(row))] = cell
    return _read_by(commands, "t.csv", b"\n".join(b",".join(row) for row in rows) + b"\n", chance)


def _nccl_text(chance: Random, seeds: Seeds) -> Mapping[str, object]:
    flags = chance.choice(
        (
            "",
            "",
            "--nodes 1",
            "--nodes 2 --ranks-per-node 4",
            "--ranks-per-node 8",
            "--nodes 99999999999999999999",
        )
    )
    return _read_by(
        (f"profile --nccl-tests n.txt {flags} -o h.yaml",),
        "n.txt",
        bytes_mutated(NCCL, chance),
        chance,
        files={"h.yaml": seeds.content("profile")},
    )


def _comm_file(chance: Random, seeds: Seeds) -> Mapping[str, object]:
    content = yaml_mutated(seeds.content("comm"), seeds.tree("comm"), chance)
    return _read_by(
        ("profile --add c.yaml -o h.yaml",),
        "c.yaml",
        content,
        chance,
        files={"h.yaml": seeds.content("profile")},
    )


_ALL_PLANS = tuple(DESCRIBED)
_TORCH_PLANS = (*DESCRIBED, *TRACED_PLANS)
KINDS: tuple[Kind, ...] = (
    Kind(name="model-yaml", weight=1100, make=_model_yaml),
    Kind(name="family-yaml", weight=350, make=_family_yaml),
    Kind(name="cluster-yaml", weight=1100, make=_cluster_yaml),
    Kind(name="stack-yaml", weight=700, make=_stack_yaml),
    Kind(name="plan-yaml", weight=1800, make=_plan_yaml, needs=(*_ALL_PLANS, "plan-profiled")),
    Kind(name="plan-fields", weight=2500, make=_plan_fields, needs=_ALL_PLANS),
    Kind(name="traced-plan", weight=500, make=_traced_plan, needs=tuple(TRACED_PLANS)),
    Kind(name="profile", weight=900, make=_profile, needs=("profile", "calibrated")),
    Kind(name="run-json", weight=700, make=_run_json, needs=("run",)),
    Kind(name="hf-config", weight=1200, make=_hf_config),
    Kind(name="schedule-csv", weight=600, make=_schedule_csv),
    Kind(name="steps-csv", weight=500, make=_steps_csv),
    Kind(name="nccl-text", weight=350, make=_nccl_text, needs=("profile",)),
    Kind(name="comm-file", weight=250, make=_comm_file, needs=("profile", "comm")),
    *(
        Kind(name=name, weight=weight, make=make, needs=needs)
        for name, (weight, make, needs) in foreign_files.MAKERS.items()
    ),
    Kind(name="hostile-name", weight=500, make=injected.make, needs=injected.NEEDS),
    Kind(name="command-line", weight=1400, make=command_lines.make, needs=command_lines.NEEDS),
    Kind(name="surroundings", weight=300, make=surroundings.make, needs=surroundings.NEEDS),
    Kind(name="plan-torch", weight=200, make=_plan_torch, needs=_TORCH_PLANS, torch=True),
    Kind(name="plan-run", weight=350, make=_plan_run, needs=_TORCH_PLANS, torch=True),
    Kind(
        name="plan-trained",
        weight=100,
        make=_plan_trained,
        needs=("plan-one", "traced-one"),
        torch=True,
    ),
    Kind(name="hf-traced", weight=150, make=_hf_traced, torch=True),
    Kind(
        name="checkpoint",
        weight=120,
        make=_checkpoint,
        needs=("checkpoint", "plan-one"),
        torch=True,
    ),
    Kind(name="tokens", weight=200, make=_tokens, needs=("plan-one",), torch=True),
    Kind(name="tokenize", weight=150, make=_tokenize, torch=True),
    Kind(
        name="executor-line",
        weight=100,
        make=command_lines.make_executor,
        needs=("plan-one",),
        torch=True,
    ),
    Kind(
        name="torch-surroundings",
        weight=40,
        make=surroundings.make_torch,
        needs=("plan-one",),
        torch=True,
    ),
)
