"""Every command that README and docs show is run as it stands there, or excused here."""

# ruff: noqa: E501 - a command stands on one line, as in the page that shows it

from __future__ import annotations

import importlib
import re
import shutil
from functools import partial
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from parplan import cli
from parplan.planner.plan.plan_file import write_plan
from parplan.planner.runs.run_file import write_run
from parplan.planner.search.relaxations import relaxations
from parplan.report.searches import infeasible_text as relaxations_report
from tests.helpers.documented import ROOT, documented, shape
from tests.helpers.kineto_traces import one_step, write_kineto
from tests.helpers.launcher_scripts import ACCELERATE_YAML, DEEPSPEED_JSON, SCRIPT, TRAINER_YAML
from tests.helpers.run_logs import megatron_log, nemo_log
from tests.helpers.synthetic_runs import estimated, run_of

QUICK = (
    "plan --model gpt-tiny --gpu cpu --gpus 2",
    "plan calibrate run.json -o mygpu.yaml",
    "plan estimate --model gpt-22b --gpus 8 --tp 8 --micro-batch-size 4 --recompute full",
    "plan estimate --model gpt-18b --gpus 8 --gpu v100-32gb --offload optimizer,parameters --host-blocks 45",
    "plan estimate --model gpt-7.5b --gpus 4 --gpu v100-32gb --stack parplan --offload optimizer,parameters --host-blocks 20",
    "plan estimate --model llama3-8b --gpus 8 --gpu h100-80gb --seq-length 32768 --global-batch-size 64 --tp 4 --cp 2 "
    "--sequence-parallel --recompute full --document-lengths 2000",
    "plan explain --model gpt-20b --gpus 64 --tp 8 --operator fc1",
    "plan show plan.yaml",
    "plan show plan.yaml --mtbf 50000h --storage 200GB/s",
    "plan show plan.yaml --instructions --rank 0",
    "plan tokenize corpus/ --glob '**/*.txt' -o tokens.bin",
    "plan estimate --model gpt-22b --gpus 8 --tp 8 --micro-batch-size 4 --recompute full -o by-hand.yaml",
    "plan --model gpt-tiny --gpus 2 --gpu cpu --precision fp32 --stack parplan",
    "plan tokenize docs/ --glob '**/*.md' -o tokens.bin",
    "plan show run.json",
    "plan doctor --list",
    "plan estimate --model llama3-70b --gpus 128 --gpu h100-80gb --tp 4 --pp 8 --virtual-stages 5 --zero 1 --sequence-parallel -o plan.yaml",
    "plan export plan.yaml --to megatron",
    "plan export plan.yaml --to megatron --strict",
    "plan export plan.yaml --to megatron --launch slurm -o run/",
    "plan export plan.yaml --to fsdp2",
    "plan read sft.yaml --model llama3-8b --gpu h100-80gb --gpus 16 -o plan.yaml",
    "plan read train.sh --gpu h100-80gb -o plan.yaml",
    "plan compare plan.yaml train.sh --gpu h100-80gb",
    "plan import train.log --gpu h100-80gb -o steps.csv",
    "plan calibrate train.log --gpu h100-80gb -o mygpu.yaml",
    "plan import nemo.log --config train.sh --gpu h100-80gb",
    "plan import train.log --model llama2-7b --gpus 8 --gpu h100-80gb --tp 2 --zero 1 --sequence-parallel --global-batch-size 128 --seq-length 4096",
    "plan read ds_config.json --model llama3-8b --seq-length 8192 --gpu h100-80gb --gpus 8 -o plan.yaml",
    "plan calibrate run.json -o mycpu.yaml",
    "plan estimate --model gpt-2.5b --gpus 8 --gpu a100-80gb --stack megatron-core --tp 2 --sequence-parallel --micro-batch-size 2 -o there.yaml",
    "plan calibrate traces/ --plan there.yaml -o mygpu.yaml",
    "plan profile -o theirs.yaml --gpu a100-80gb --import allreduce_bandwidth_2nodes_8gpus_per_node.json",
)
SLOW = (
    "plan validate --steps steps.csv --rows",
    "plan validate --source simumax --rows",
    "plan show plan.yaml --chunks --plot moments.png",
    "plan --model gpt-tiny --gpus 2 --gpu cpu --precision fp32 --stack parplan --tp 2 -o tp.yaml",
    "plan schemes --model gpt-20b --gpus 64 --micro-batch-size 4",
    "plan estimate --model gpt-7.5b --gpus 4 --gpu v100-32gb --stack parplan --offload optimizer,parameters --chunk-access operator",
    "plan --model gpt-20b --gpus 64 --objective goodput --mtbf 2000h",
    "plan --model gpt-2.5b --gpus 8 --search greedy --time-limit 4",
    "plan --model gpt-20b --gpu a100-80gb:32+h100-80gb:32",
    "plan --model gpt-20b --gpu a100-80gb:32+h100-80gb:32 --pools data",
    "plan explain --model gpt-20b --gpus 64 --tp 8 --operator fc2",
    "plan estimate --model llama3-8b --gpus 64 --gpu h100-80gb --zero 3 --recompute full --stack torchtitan -o plan.yaml",
    "plan export plan.yaml --to torchtitan",
    "plan estimate --model llama3-8b --gpus 64 --gpu h100-80gb --tp 2 --sequence-parallel --zero 3 --recompute selective --stack torchtitan -o plan.yaml",
    "plan estimate --model llama3-8b --gpus 64 --gpu h100-80gb --zero 3 --recompute full --stack deepspeed -o plan.yaml",
    "plan export plan.yaml --to deepspeed",
    "plan estimate --model llama3-70b --gpus 128 --gpu h100-80gb --tp 4 --pp 8 --virtual-stages 5 --zero 1 --sequence-parallel --stack nemo -o plan.yaml",
    "plan export plan.yaml --to megatron-bridge",
    "plan estimate --model llama3-8b --gpus 64 --gpu h100-80gb --zero 3 --recompute full --stack galvatron -o plan.yaml",
    "plan export plan.yaml --to galvatron",
    "plan estimate --model llama3-8b --gpus 64 --gpu h100-80gb --zero 3 --recompute full --gradient-precision bf16 --stack huggingface -o plan.yaml",
    "plan export plan.yaml --to huggingface",
    "plan export plan.yaml --to accelerate",
    "plan read launch.yaml --model llama3-8b --seq-length 4096 --micro-batch-size 1 --global-batch-size 64 --gpu h100-80gb -o plan.yaml",
    "plan check issue-1031.sh --gpu h100-80gb",
    "plan sweep --model gpt-1.5b --gpus 4,8,16 --gpu a100-80gb,h100-80gb",
    "plan size --model gpt-1.5b --tokens 100B --days 7 --gpu a100-80gb,h100-80gb --price a100-80gb=1.50 --price h100-80gb=2.50",
    "plan explain plan.yaml",
    "plan explain plan.yaml --time-limit 60",
    "plan diff plan.yaml --gpu h200-141gb",
    "plan report plan.yaml",
    "plan check train.sh --gpu h100-80gb",
    "plan --model gpt-2.5b --gpus 16 --prefer leanest",
    "plan --model gpt-2.5b --gpus 16 --robust 20%",
    "plan --model gpt-2.5b --gpus 16 --robust 20% --prefer robust",
    "plan --model gpt-20b --gpus 64",
    "plan --model gpt-20b --gpus 64 --for megatron",
    "plan --model gpt-20b --gpus 64 --for none --write-lp program.lp",
    "plan --model gpt-20b --gpus 64 --for megatron --write-lp megatron.mps",
    "plan --model ./config.json --gpus 16 --seq-length 4096",
    "plan --model ./config.json --module huggingface --gpus 8",
    "plan --model gpt-20b --cluster cluster.yaml",
    "plan --model gpt-20b --gpus 64 --memory-limit 60GiB --time-limit 10 --explain",
    "plan --model gpt-20b --gpus 64 --objective memory --max-slowdown 0.05",
    "plan --model gpt-20b --gpus 64 --objective memory --memory-slack 0.05",
    "plan --model gpt-20b --gpus 64 --tp 4,8 --pp 1,2,4 --zero 1 --schedule 1f1b --recompute none,full",
    "plan --model gpt-20b --gpus 64 --gpu h100-80gb --stack nemo --fp8",
    "plan --model llama3-70b --gpus 16 --gpu h100-80gb --zero 0 --recompute none --micro-batch-size 2 --offload none",
    "plan --model llama3-8b --gpus 8 --gpu h100-80gb --seq-length 4096 --global-batch-size 64 --lora-rank 16 --lora-targets qkv,proj",
    "plan check plan.yaml",
)
# by target, a part of the command whose plan is exported to it
EXPORTED = {
    "megatron": "--virtual-stages 5",
    "megatron-bridge": "--stack nemo -o",
    "torchtitan": "--recompute full --stack torchtitan -o",
    "deepspeed": "--stack deepspeed -o",
    "huggingface": "--stack huggingface -o",
    "galvatron": "--stack galvatron -o",
    "accelerate": "--stack huggingface -o",
    "fsdp2": "--recompute selective --stack torchtitan -o",
}
ENOUGH_S = 300.0  # no search for what would fit is cut off
MINUTES = "takes minutes"
PLACEHOLDER = "names a file or a module of the reader's"
GPUS = "needs the GPUs of a node"
NETWORK = "installs from a package index"
LAUNCHES = "starts processes that train; tests/executor runs the same"
NOT_RUN = {
    "plan read galvatron_config_llama2-7b_1nodes_8gpus_per_node_36GB_bf16.json --model llama2-7b --seq-length 2048 --gpu a100-40gb --gpus 8": PLACEHOLDER,
    "plan read src/megatron/bridge/perf_recipes/llama/h100/llama3.py::llama3_70b_pretrain_64gpu_h100_bf16_config --gpu h100-80gb -o plan.yaml": PLACEHOLDER,
    "plan read llama2_70b_fp8.sh --gpu h100-80gb": PLACEHOLDER,
    "pip install .": NETWORK,
    "pip install -c constraints.txt -e '.[test]'": NETWORK,
    "pip install -c constraints.txt '.[torch]'": NETWORK,
    "pytest": "is what runs this",
    "plan --model llama3-70b --gpus 128 --gpu h100-80gb": MINUTES,
    "plan --model llama3-70b --gpus 128 --gpu h100-80gb --for megatron": MINUTES,
    "plan --model gpt-20b --gpus 64 --objective pareto --plot front.png": MINUTES,
    "plan compare --model gpt-20b --gpus 64 --baseline all": MINUTES,
    "pip install 'parplan[notebook]' jupyterlab": NETWORK,
    "pip install 'parplan[report]'": NETWORK,
    "plan report plan.yaml --baseline all -o all.html": MINUTES,
    "plan report plan.yaml --front --time-limit 60": "tests/report/page/test_page_front.py runs a smaller one",
    "plan report plan-*.yaml -o front.html": "tests/report/page/test_page_front.py runs a smaller one",
    "plan report fast.yaml lean.yaml -o both.html": "tests/report/page/test_html_page.py runs one of two plans",
    "plan --model gpt-18b --gpus 8 --gpu v100-32gb --host-memory 240GiB": MINUTES,
    "plan max-model --gpus 8 --gpu a100-40gb --host-memory 1TiB": MINUTES,
    "plan --model my_package.my_model:build --gpus 16": PLACEHOLDER,
    "plan --model ./t5/config.json --gpus 16": MINUTES,
    "plan --model ./llama/config.json --trace --gpus 4 --gpu cpu --precision fp32 --lora-rank 16 --lora-targets q_proj,down_proj": PLACEHOLDER,
    "plan --model my_package.my_model:build --gpus 4 --gpu cpu --precision fp32": PLACEHOLDER,
    "plan check plan.yaml --execute": LAUNCHES,
    "plan check plan-a100-80gb.yaml plan-h100-80gb.yaml --execute": LAUNCHES,
    "plan --model shape.yaml --module my_package.my_model:build --gpus 8": PLACEHOLDER,
    "plan estimate ... --offload optimizer --host-optimizer 12 --eviction lru --memory-limit 24GiB": "is cut short",
    "plan profile -o mygpu.yaml --model gpt-20b --minutes 10": GPUS,
    "plan profile -o mygpu.yaml --missing plan.yaml": GPUS,
    "plan doctor": GPUS,
    "plan doctor --device cpu": "tests/executor/doctor/test_worlds.py runs its paths",
    "plan --model gpt-tiny --gpus 2 --gpu cpu --precision fp32 --stack parplan --profile mycpu.yaml": PLACEHOLDER,
    "plan profile -o mygpu.yaml --add comm.yaml": PLACEHOLDER,
    "plan profile -o mygpu.yaml --nccl-tests all_reduce.txt --nodes 2 --ranks-per-node 8": PLACEHOLDER,
    "plan profile -o mygpu.yaml --nccl-tests all_reduce_perf.txt --nodes 4 --ranks-per-node 8": PLACEHOLDER,
    "plan init cluster.yaml": "asks questions",
    "plan init cluster.yaml --gpu h100-80gb --nodes 64 --level leaf:32 --level pod:128:2 --rails --no-look --no-ask": "tests/commands/test_init.py runs it",
    "plan init --check cluster.yaml": "tests/commands/test_init.py runs it",
    "plan init --check cluster.yaml --nccl-tests all_reduce_perf.txt --test-nodes 4 --test-ranks-per-node 8": PLACEHOLDER,
    "plan --model llama3-70b --cluster cluster.yaml": MINUTES,
    "plan profile --show mygpu.yaml --plot mygpu.png": PLACEHOLDER,
    "plan profile --diff before.yaml after.yaml": PLACEHOLDER,
    "plan --model gpt-20b --gpus 64 --profile mygpu.yaml": PLACEHOLDER,
    "plan estimate --model gpt-2.5b --gpus 8 --gpu a100-80gb --stack megatron-core --tp 2 --sequence-parallel --micro-batch-size 2 --profile mygpu.yaml": PLACEHOLDER,
    "plan profile -o theirs.yaml --gpu a100-80gb --import system.json --import sp_time_1nodes_8gpus_per_node.json": PLACEHOLDER,
    "plan calibrate DeviceType.A100_tp1_bs1.json --plan there.yaml -o mygpu.yaml": PLACEHOLDER,
    "torchrun --nproc-per-node 8 -m parplan.executor plan.yaml": LAUNCHES,
    "torchrun --nproc-per-node 8 -m parplan.executor plan.yaml --steps 100": LAUNCHES,
    "torchrun --nproc-per-node 2 -m parplan.executor plan.yaml --steps 5": LAUNCHES,
    "torchrun --nnodes 8 --nproc-per-node 8 -m parplan.executor plan-a100-80gb.yaml plan-h100-80gb.yaml --steps 1000 --checkpoint-dir checkpoints": LAUNCHES,
    "torchrun --nproc-per-node 8 --max-restarts 3 -m parplan.executor plan.yaml --data tokens.bin --steps 10000 --checkpoint-dir checkpoints": LAUNCHES,
    "torchrun --nnodes 2 --nproc-per-node 8 --rdzv-endpoint HOST:29500 -m parplan.profiles.profile_comm -o comm.yaml": GPUS,
    "torchrun --nproc-per-node 2 -m parplan.executor plan.yaml --data tokens.bin --steps 20 --checkpoint-dir checkpoints": LAUNCHES,
    "torchrun --nproc-per-node 2 -m parplan.executor tp.yaml --data tokens.bin --steps 25 --checkpoint-dir checkpoints": LAUNCHES,
    "python examples/train_bytes.py": "tests/docs/test_examples.py runs it",
}
EXITS = {
    "plan --model llama3-70b --gpus 16 --gpu h100-80gb --zero 0 --recompute none --micro-batch-size 2 --offload none": 3
}
DOCUMENTED = {one.command: one for one in documented()}
SHOWN = [one for one in documented() if one.output]
README = {one.command for one in documented() if one.where.startswith("README.md:")}


def _slow(command: str) -> object:
    """A command that takes long; those of the README are in every part of the slow tests."""
    marks = (pytest.mark.slow, *([pytest.mark.in_every_part] if command in README else ()))
    return pytest.param(command, marks=marks)


def test_every_documented_command_is_run_or_has_a_reason():
    assert set(DOCUMENTED) == {*QUICK, *SLOW, *NOT_RUN}


@pytest.mark.parametrize("command", [*QUICK, *map(_slow, SLOW)])
def test_a_documented_command_prints_what_the_document_shows(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "no-settings"))  # as a new user
    _give_files(command, tmp_path)

    monkeypatch.setattr(
        relaxations_report, "relaxations", partial(relaxations, budget_s=ENOUGH_S)
    )  # also on a busy machine
    result = CliRunner().invoke(cli.main, DOCUMENTED[command].words[1:])

    assert result.exit_code == EXITS.get(command, 0), result.output
    for shown in (one for one in SHOWN if one.command == command):
        assert shape(result.output.splitlines()) == shape(shown.output), shown.where


def _give_files(command: str, folder: Path) -> None:
    """Writes the files that the commands of a reader read: model, machine, plan, text and run."""
    shutil.copy(ROOT / "configs/clusters/a100-80gb.yaml", folder / "cluster.yaml")
    (folder / "config.json").write_text(
        '{"model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 8, '
        '"intermediate_size": 5632, "vocab_size": 32000, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, '
        '"tie_word_embeddings": false, "hidden_act": "silu", "rope_theta": 10000.0}',
        encoding="utf-8",
    )
    shutil.copy(ROOT / "examples/issue-1031.sh", folder)
    for name in ("corpus/a.txt", "docs/a.md"):
        (folder / name).parent.mkdir()
        (folder / name).write_text("to be read byte by byte", encoding="utf-8")
    if "plan.yaml" in command:
        chunks = ("--offload", "optimizer") if "--chunks" in command else ()
        words = [
            "plan",
            "estimate",
            "--model",
            "gpt-tiny",
            "--gpus",
            "2",
            *chunks,
            "-o",
            "plan.yaml",
        ]
        if command.startswith("plan export"):
            of = next(mark for target, mark in EXPORTED.items() if target in command)
            words = next(one.words for one in DOCUMENTED.values() if of in one.command)
        made = CliRunner().invoke(cli.main, words[1:])
        assert made.exit_code == 0, made.output
    if "allreduce_bandwidth" in command:
        (folder / "allreduce_bandwidth_2nodes_8gpus_per_node.json").write_text(
            '{"allreduce_size_8_consec_1": 154.2, "allreduce_size_16_consec_1": 44.7}',
            encoding="utf-8",
        )
    if "traces/" in command:
        (folder / "traces").mkdir()
        write_kineto(folder / "traces" / "rank0.json", one_step())
        write_plan(estimated(tp=2, dp=2), folder / "there.yaml")
    (folder / "train.sh").write_text(SCRIPT, encoding="utf-8")
    (folder / "sft.yaml").write_text(TRAINER_YAML, encoding="utf-8")
    if "train.log" in command or "steps.csv" in command:
        times = {1: 31_000.0} | {step: 6_500.0 + step * 37 % 90 for step in range(2, 101)}
        (folder / "train.log").write_text(megatron_log(times), encoding="utf-8")
    if "nemo.log" in command:
        times_s = dict.fromkeys(range(20), 31.0)
        (folder / "nemo.log").write_text(nemo_log(times_s, batch=512), encoding="utf-8")
    if "steps.csv" in command and "import" not in command:
        words = DOCUMENTED["plan import train.log --gpu h100-80gb -o steps.csv"].words
        assert CliRunner().invoke(cli.main, words[1:]).exit_code == 0
    (folder / "launch.yaml").write_text(ACCELERATE_YAML, encoding="utf-8")
    (folder / "ds_config.json").write_text(DEEPSPEED_JSON, encoding="utf-8")
    if "run.json" in command:
        write_run(run_of(estimated()), folder / "run.json")


@pytest.mark.parametrize("command", NOT_RUN)
def test_the_options_of_what_is_not_run_are_known(command, monkeypatch):
    context = click.Context(cli.main)
    commands = [cli.main.get_command(context, name) for name in cli.main.list_commands(context)]
    for known in (cli.main, *commands):
        monkeypatch.setattr(known, "callback", lambda *_, **__: None)
    words = [word for word in DOCUMENTED[command].words if word != "..."]

    if words[0] == "plan":
        result = CliRunner().invoke(cli.main, words[1:])
        assert result.exit_code == 0, result.output
    elif words[0] == "torchrun":
        module = words[words.index("-m") + 1]
        is_package = (ROOT / module.replace(".", "/")).is_dir()
        name = f"{module}.__main__" if is_package else module
        program = importlib.import_module(name).main
        program.make_context(module, words[words.index("-m") + 2 :])
    elif words[0] == "python":
        assert (ROOT / words[1]).is_file()


@pytest.mark.slow
def test_the_python_page_runs_and_prints_what_its_comment_shows(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs/reference/python.md").read_text(encoding="utf-8")
    first, *others = re.findall(r"```python\n(.*?)```", page, re.DOTALL)

    for block in (first, *others):
        exec(block, {})

    mesh, step_s = re.findall(r"# (pp \d+ x dp \d+ x tp \d+) ([\d.]+) s$", first, re.MULTILINE)[0]
    printed = capsys.readouterr().out
    assert printed.startswith(mesh)
    assert f"{float(printed.removeprefix(mesh).split()[0]):.2f}" == step_s
    assert (tmp_path / "plan.yaml").exists()


def test_the_shape_of_a_line_is_its_words():
    assert (
        shape(["  step   20.7 s +- 5 %"])
        == shape(["  step  1,020.74 s +- 15 %"])
        != shape(["  pace   20.7 s +- 5 %"])
    )
