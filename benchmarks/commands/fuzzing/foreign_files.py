"""Hostile files of other tools: launchers' files, logs, traces, tables and what no file is.

Every maker starts from a small valid file of its tool. Half of the inputs are mutated as other
files are; the others have a part that costs a careless reader its time or its memory.
"""

from __future__ import annotations

import gzip
import json
import shlex
import sqlite3
import tempfile
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from pathlib import Path
from random import Random

from benchmarks.commands.fuzzing.mutations import bytes_mutated, json_mutated, yaml_mutated
from benchmarks.commands.fuzzing.seeds import NCCL, Seeds, parsed
from tests.helpers import launcher_scripts, run_logs
from tests.helpers.kineto_traces import kineto_text, one_step
from tests.profiles.imports.test_import_formats import ATTENTION, GEMM, SIMUMAX
from tests.profiles.traces.test_nsight import RECURSIVE, TABLES, report

Made = Mapping[str, object]
READ = "--gpu h100-80gb --gpus 128"
A100 = "--model gpt-tiny --gpus 4 --gpu a100-80gb --tp 2 --global-batch-size 4 --seq-length 64"
NUMBERS = (
    *("0", "-1", "1", "2.5", "nan", "inf", "1e999", "1e300", "x", "", "0x10", "1_000", "\u00b2"),
    *("\u0663", "9" * 19, "9" * 400, "9" * 5000, "1e-400", "--", "1" + "0" * 4299, "None", "true"),
)
SPACES = " " * 20_000
COSTLY = (  # what a careless pattern or expansion takes the square, or a power, of
    SPACES,
    f"a{SPACES}b",
    "$((" * 4000,
    "$((" + "(" * 3000 + "1" + ")" * 3000 + "))",
    "$((" + "-" * 5000 + "1))",
    "$((" + "9*" * 3000 + "9))",
    "${a:-" * 3000,
    "[ " * 5000,
    "[[ ! " + SPACES + "x ]] && y",
    "if [ x" + SPACES + "; thenx",
    "(" * 10_000,
    "((((t" + ")*9" * 4,
    "\\\n" * 3000,
    "'" * 9999,
    '"' * 9999,
    "x" * 200_000,
    "iteration 1/1 |" * 700,
    "elapsed time per iteration (ms): " * 300,
    "step: 1 loss: memory: " * 400,
    "1%|" * 4000,
    "Epoch 1: 1/1 [" * 700,
    "\x1b]" * 5000,
    "[0m" * 3000,
    "[" * 11_000,
    "triton_tem_" * 1000,
    "9" * 11_000,
    "\u2028" * 3000,
)
CHAINED = "a0=xxxxxxxxxx\n" + "".join(f"a{n}=$a{n - 1}$a{n - 1}\n" for n in range(1, 60))
SCRIPTS = {
    "megatron.sh": launcher_scripts.SCRIPT,
    "ds.json": launcher_scripts.DEEPSPEED_JSON,
    "trainer.yaml": launcher_scripts.TRAINER_YAML,
    "accelerate.yaml": launcher_scripts.ACCELERATE_YAML,
    "titan.sh": "torchrun --nproc_per_node 8 -m torchtitan.train --module llama3 "
    "--config llama3_8b --training.seq_len 8192 --training.local_batch_size 1 "
    "--parallelism.tensor_parallel_degree 2\n",
    "bridge.sh": "# read back with --gpu h100-80gb --gpus 8\ntorchrun --nproc-per-node=8 "
    "run_recipe.py --recipe llama3_8b_pretrain_config model.tensor_model_parallel_size=2\n",
    "layout.sh": launcher_scripts.SCRIPT.replace(
        "--pipeline-model-parallel-size 8",
        "--pipeline-model-parallel-size 8 --pipeline-model-parallel-layout 'Et*9|(t*10|)*6t*11L'",
    ),
    "recipe.py": "def two():\n    cfg = ConfigContainer(model=LlamaConfig(num_layers=2))\n"
    "    cfg.model.hidden_size = 64\n    cfg.train.global_batch_size = 128\n"
    "    cfg.train.micro_batch_size = 1\n    return cfg\n\n"
    "def one_8gpu_x():\n    cfg = two()\n    cfg.model.seq_length = 128\n    return cfg\n",
    "galvatron.json": '{"pp_deg": 2, "tp_sizes_enc": "2,2", "dp_types_enc": "0,0", '
    '"checkpoint": "0,0", "global_bsz": 8, "chunks": 2, "use_sp": "0,0", "vtp": 2}',
}
LAYOUTS = (
    *("Et*9999999999|L", "Et*999999999|L", "E(t|)*99999999L", "E(t*99999)*99999|L", "E|L" * 5000),
    *("E" + "(" * 4000 + "t" + ")*2" * 4000 + "L", "Et*\u00b2|L", "Et*0|L", "E|||||L", "Et" * 9000),
)
STATEMENTS = (
    f"DROP TABLE CUPTI_ACTIVITY_KIND_KERNEL; CREATE VIEW CUPTI_ACTIVITY_KIND_KERNEL AS {RECURSIVE}",
    "DROP TABLE StringIds; CREATE VIEW StringIds AS WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL "
    "SELECT i + 1 FROM n) SELECT i AS id, 'x' AS value FROM n",
    "ALTER TABLE NVTX_EVENTS ADD COLUMN g AS (hex(zeroblob(1000000000)))",
    "PRAGMA user_version = 5",
    "CREATE TRIGGER t AFTER INSERT ON StringIds BEGIN DELETE FROM StringIds; END",
)
KERNEL_CELLS = ("NULL", "'x'", "X'00'", "-9223372036854775808", "9223372036854775807", "1.5", "'²'")
CSV = (
    "Start (ns),Duration (ns),CorrId,Device,Strm,Name\n"
    "100,200,1,NVIDIA A100-SXM4-80GB (0),7,sm80_xmma_gemm_bf16bf16_tn\n"
    "400,100,2,NVIDIA A100-SXM4-80GB (0),7,multi_tensor_apply_kernel<AdamFunctor>\n"
    "1100,200,3,NVIDIA A100-SXM4-80GB (0),7,sm80_xmma_gemm_bf16bf16_tn\n"
    "1400,100,4,NVIDIA A100-SXM4-80GB (0),7,multi_tensor_apply_kernel<AdamFunctor>\n"
)
SINFO = "gpu* 16 gpu:h100:8(S:0-1) 2063885\nold 20 gpu:a100:4 1031700+\nmig 2 gpu:1g.5gb:7 5\n"
SWITCHES = "SwitchName=leaf1 Level=0 LinkSpeed=1 Nodes=gpu[001-004]\n" * 2


def _input(line: str, files: Mapping[str, bytes], **fields: object) -> Made:
    return {"arguments": tuple(shlex.split(line)), "files": files, **fields}


def _numbered(text: str, chance: Random) -> str:
    """Replace a word of digits by what no number is."""
    places = [place for place, letter in enumerate(text) if letter.isdigit()]
    start = end = chance.choice(places)
    while end < len(text) and text[end].isdigit():
        end += 1
    return text[:start] + chance.choice(NUMBERS) + text[end:]


def _with_costly(text: str, chance: Random) -> str:
    """Put a costly part into a line, or between two."""
    rows = text.split("\n")
    place = chance.randrange(len(rows))
    row = rows[place]
    part = chance.choice(COSTLY)
    at = chance.randrange(len(row) + 1)
    rows[place] = chance.choice((row[:at] + part + row[at:], part, f"{row}\n{part}"))
    return "\n".join(rows)


def _spoiled(text: str, chance: Random) -> bytes:
    """Return a text with one of these faults, or mutated as any other file."""
    how = chance.random()
    if how < 0.35:
        return bytes_mutated(text.encode(), chance)
    made = _numbered(text, chance) if how < 0.7 else _with_costly(text, chance)
    return made.encode("utf-8", "surrogatepass")


def launcher_file(chance: Random, _: Seeds) -> Made:
    name = chance.choice(tuple(SCRIPTS))
    text, suffix = SCRIPTS[name], Path(name).suffix
    how = chance.random()
    if suffix == ".sh" and how < 0.1:
        text = CHAINED + text.replace("8", chance.choice(("$a59", "$a40", "${a59:-8}")), 1)
    elif suffix == ".sh" and how < 0.13:
        text = text + "x" * 6_000_000
    elif name == "layout.sh" and how < 0.6:
        text = text.replace("Et*9|(t*10|)*6t*11L", chance.choice(LAYOUTS))
    elif name == "recipe.py" and how < 0.15:
        text += "".join(
            f"def r{n}():\n" + f"    r{n + 1}()\n" * 9 + "    return two()\n" for n in range(14)
        )
        text = text.replace("cfg = two()", "cfg = r0()")
    elif suffix in (".json", ".yaml") and how < 0.4:
        mutated = json_mutated if suffix == ".json" else yaml_mutated
        return _input(
            f"read {name} --model llama3-8b {READ}",
            {name: mutated(text.encode(), parsed(text.encode()), chance)},
        )
    command = chance.choice(
        (
            f"read {name} {READ}",
            f"read {name} {READ} --model gpt-tiny --seq-length 64",
            f"read {name} {READ} --model gpt-tiny --global-batch-size 128 --micro-batch-size 1",
            f"read {name} --model gpt-tiny",
            f"check {name}",
        )
    )
    if suffix == ".py":
        command = command.replace(name, f"{name}::one_8gpu_x", 1)
    return _input(command, {name: _spoiled(text, chance)})


LOGS = (
    run_logs.megatron_log(dict.fromkeys(range(1, 21), 2_000.0)),
    run_logs.titan_log(dict.fromkeys(range(1, 21), 6_500)),
    run_logs.deepspeed_log(dict.fromkeys(range(1, 21), 12.5)),
    run_logs.nemo_log(dict.fromkeys(range(1, 21), 2.5)),
    run_logs.trainer_log(dict.fromkeys(range(1, 21), 2.5)),
)


def log(chance: Random, _: Seeds) -> Made:
    content = _spoiled(chance.choice(LOGS), chance)
    if chance.random() < 0.1:
        content = content[:10_000] * chance.choice((20, 200))
    by_hand = "--model gpt-tiny --gpus 2 --gpu cpu --global-batch-size 128"
    commands = (
        "import a.log --gpu h100-80gb -o s.csv",
        "import a.log --gpu h100-80gb -o - --warm-up 0",
        f"import a.log {by_hand} -o s.csv",
        f"calibrate a.log {by_hand} -o h.yaml",
        "read a.log --gpu h100-80gb",
    )
    return _input(chance.choice(commands), {"a.log": content})


def _kineto(chance: Random) -> bytes:
    text = kineto_text([*one_step(), *one_step(1000.0)], rank=0)
    if chance.random() < 0.5:
        return json_mutated(text.encode(), json.loads(text), chance)
    if chance.random() < 0.3:
        return text.replace('"name"', f'"name": "{"x" * 2_000_000}", "n"', 1).encode()
    return _spoiled(text, chance)


def _bomb(chance: Random) -> bytes:
    """Return a small archive of a large file."""
    head = chance.choice((b'{"traceEvents": [', b"", CSV.encode()))
    part = chance.choice((b"\0", b"{},", b'{"ph":"X","cat":"kernel","ts":0},', b" ", b"9"))
    return gzip.compress(
        head + part * (chance.choice((30, 60, 400)) * 2**20 // len(part)), 1, mtime=0
    )


def _nsight(chance: Random) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = report(Path(folder) / "r.sqlite", marks=chance.random() < 0.5)
        with closing(sqlite3.connect(path)) as database, suppress(sqlite3.Error):
            for _ in range(chance.choice((1, 1, 2))):
                database.executescript(_statement(chance))
            database.commit()
        content = path.read_bytes()
    return bytes_mutated(content, chance) if chance.random() < 0.2 else content


def _statement(chance: Random) -> str:
    how = chance.random()
    if how < 0.2:
        return chance.choice(STATEMENTS)
    table = chance.choice(tuple(TABLES))
    column = chance.choice(TABLES[table].split(", "))
    value = chance.choice(KERNEL_CELLS)
    where = chance.choice(("", " WHERE rowid % 3 = 0"))
    if how < 0.3:
        return f"DELETE FROM {table}{where}"
    return f"UPDATE {table} SET '{column}' = {value}{where}"


def trace(chance: Random, seeds: Seeds) -> Made:
    name, content = chance.choice(
        (
            ("rank0.json", _kineto),
            ("rank0.json.gz", lambda each: gzip.compress(_kineto(each), 1, mtime=0)),
            ("rank0.json.gz", lambda each: gzip.compress(_kineto(each), 1, mtime=0)[:-20]),
            ("bomb.json.gz", _bomb),
            ("rank0.sqlite", _nsight),
            ("rank0.sqlite", _nsight),
            (f"rank{chance.choice(NUMBERS[-3:])}.csv"[:200], lambda each: _spoiled(CSV, each)),
            ("rank0.csv", lambda each: _spoiled(CSV, each)),
        )
    )
    files = {f"t/{name}": content(chance), "p.yaml": seeds.content("plan-pp2-tp2")}
    given = chance.choice((f"t/{name}", f"t/{name}", "t", f"t/{name} t/{name}"))
    layout = chance.choice((A100, A100, A100, "--plan p.yaml"))
    return _input(f"calibrate {given} {layout} -o h.yaml", files)


GALVATRON = {"allreduce_size_8_consec_1": 100.5, "allreduce_size_2_consec_0": 20.0}
LAYERS = {"layernum[1]_bsz8_seq4096": 10.0, "layernum[2]_bsz8_seq4096": 15.0}
METIS = {
    "execution_time": {
        "total_time_ms": 10.0,
        "forward_backward_time_ms": 8.0,
        "optimizer_time_ms": 2.0,
        "layer_compute_total_ms": [1.0, 2.0, 2.0, 1.0],
    }
}


def table(chance: Random, seeds: Seeds) -> Made:
    """Files of other planners, nccl-tests without its first lines, and Slurm's answers."""
    documents: Mapping[str, object] = {
        "s.json": SIMUMAX,
        "allreduce_bandwidth_1nodes_8gpus_per_node.json": GALVATRON,
        f"bw_{chance.choice(NUMBERS)[:100]}nodes_8gpus_per_node.json".replace("/", ""): GALVATRON,
        "DeviceType.A100_tp1_bs1.json": METIS,
        "computation_profiling_bf16.json": LAYERS,
    }
    how = chance.random()
    if how < 0.35:
        name = chance.choice(tuple(documents))
        text = json.dumps(documents[name])
        content = json_mutated(text.encode(), documents[name], chance)
        content = content if chance.random() < 0.6 else _spoiled(text, chance)
        line = chance.choice(
            ("profile --import '{}' --gpu a100-80gb -o h.yaml", "calibrate '{}' --plan p.yaml")
        )
        plan = {"p.yaml": seeds.content("plan-one"), "h.yaml": seeds.content("profile")}
        return _input(line.format(name), {name: content, **plan})
    if how < 0.55:
        content = _spoiled(chance.choice((GEMM, ATTENTION)), chance)
        return _input("profile --import g.txt -o h.yaml", {"g.txt": content})
    if how < 0.8:
        text = NCCL.decode()
        text = text.replace(
            "# Collective test starting: all_reduce_perf\n", "", chance.choice((0, 1))
        )
        files = {"n.txt": _spoiled(text, chance), "h.yaml": seeds.content("profile")}
        return _input("profile --nccl-tests n.txt -o h.yaml", files)
    files = {"s.txt": _spoiled(SINFO, chance), "w.txt": _spoiled(SWITCHES, chance)}
    line = "init --no-ask --no-look --gpu h100-80gb --sinfo s.txt --switches w.txt c.yaml"
    return _input(line, files)


SPECIAL = (
    *("estimate --model {} --gpus 2 --gpu cpu", "estimate --model gpt-tiny --cluster {} --gpus 2"),
    *("show {}", "read {} --model gpt-tiny --gpus 2 --gpu cpu", "check {}", "trace {} -o t.json"),
    *("import {} --gpu h100-80gb", "calibrate {} -o h.yaml", "calibrate {} --plan {} -o h.yaml"),
    *("profile --show {}", "profile --import {} -o h.yaml", "profile --nccl-tests {} -o h.yaml"),
    *("validate --steps {}", "compare {}", "export {} --to megatron -o out", "diff {} {}"),
    "estimate --model gpt-tiny --gpus 2 --gpu cpu --pp 2 --schedule-file {} --stack parplan",
    "estimate --model gpt-tiny --gpus 2 --gpu cpu --seq-length 64 --document-lengths {}",
    "init --no-ask --no-look --gpu h100-80gb --sinfo {} c.yaml",
    "init --no-ask --no-look --gpu h100-80gb --switches {} c.yaml",
    "tokenize {}",
)
SUFFIXES = ("", ".yaml", ".json", ".log", ".sh", ".py", ".csv", ".sqlite", ".json.gz", ".txt")


def no_file(chance: Random, _: Seeds) -> Made:
    """A pipe, a device, a folder, a loop or nothing where a file belongs."""
    name = f"f{chance.choice(SUFFIXES)}"
    line = chance.choice(SPECIAL).format(name, name)
    places: tuple[Mapping[str, object], ...] = (
        {"pipes": (name,)},
        {"pipes": (name,)},
        {"links": {name: "/dev/zero"}},
        {"links": {name: "/dev/null"}},
        {"links": {name: "/dev/tty"}},
        {"links": {name: name}},
        {"links": {name: "/proc/self/mem"}},
        {"links": {name: "/proc/kmsg"}},
        {"folders": (name,)},
        {"pipes": (f"{name}/x.json",)},
        {},
    )
    return _input(line, {}, **chance.choice(places))


COUNTS = (
    *("--num-layers", "--hidden", "--gpus", "--pp", "--tp", "--cp", "--ep", "--micro-batch-size"),
    *("--global-batch-size", "--seq-length", "--virtual-stages", "--zero-ranks", "--lora-rank"),
    *("--dp", "--tp-rows", "--gpus-per-node", "--context-form", "--host-blocks", "--nodes"),
)
TEXTS = {
    "--freeze": ("blocks:0-999999999999", "blocks:\u00b2", "blocks:0-" + "9" * 5000),
    "--memory-limit": ("9" * 5000 + "GiB", "1e999GiB", "\u00b2GiB", "0GiB", " " * 20_000 + "GiB"),
    "--forbid": ("tp=\u00b2", "tp=" + "9" * 5000, "tp=1," * 5000, "zero=\u0663"),
    "--document-lengths": ("\u00b2", "nan", "9" * 400, "1e999", "0"),
    "--gpu": ("a100-80gb:\u00b2+h100-80gb:8", "a100-80gb:" + "9" * 5000, "x:1" * 2000),
    "--own-zero": ("fc1=9", "=" * 5000, "fc1=\u00b2"),
    "--model": ("x" * 3000, "\u00b2", "llama3-8b" * 300),
}


def argument(chance: Random, _: Seeds) -> Made:
    """Counts, sizes and texts of the command line."""
    line = ["estimate", "--model", "gpt-tiny", "--gpus", "2", "--gpu", "cpu"]
    if chance.random() < 0.6:
        line += [chance.choice(COUNTS), chance.choice(NUMBERS)]
    else:
        name = chance.choice(tuple(TEXTS))
        line += [name, chance.choice(TEXTS[name])]
    return {"arguments": tuple(line), "files": {}}


MAKERS: Mapping[str, tuple[int, Callable[[Random, Seeds], Made], tuple[str, ...]]] = {
    "launcher-file": (700, launcher_file, ()),
    "log": (500, log, ()),
    "trace": (500, trace, ("plan-pp2-tp2",)),
    "table": (400, table, ("plan-one", "profile")),
    "no-file": (250, no_file, ()),
    "argument": (250, argument, ()),
}
