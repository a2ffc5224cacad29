"""Trains a small byte-level GPT on the source code of Python's standard library.

It plans, runs, writes checkpoints, plans again for another mesh and resumes.

    python examples/train_bytes.py [FOLDER]

Every step is a command that is printed before it runs, with its files in FOLDER (a temporary one by
default). Needs two CPU cores, no GPU and no network, and takes about two minutes. The exit code is
not 0 if the loss does not fall, or if the second run does not go on where the first one ended.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
WINDOW = 10  # steps that are averaged: one batch is harder than another
FIRST_STEPS, ALL_STEPS = 60, 100
LARGEST_JUMP = (
    0.2  # nats between the windows before and after the resume; the loss falls by about 2 before it
)

MODEL = """\
model:
  name: gpt-bytes
  num_layers: 4
  hidden_size: 128
  num_heads: 4
  num_kv_heads: 4
  head_dim: 32
  ffn_hidden_size: 512
  vocab_size: 257  # bytes, and the end of a document
  max_seq_length: 128
  norm: layer_norm
  positions: learned
  tied_embeddings: true
training: {global_batch_size: 16, seq_length: 128}
source: made up, for this example
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "folder", nargs="?", type=Path, help="where the files go; by default a temporary folder"
    )
    folder = parser.parse_args().folder
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        train(folder)
        return
    with tempfile.TemporaryDirectory() as temporary:
        train(Path(temporary))


def train(folder: Path) -> None:
    started = time.monotonic()
    (folder / "model.yaml").write_text(MODEL)
    run(
        folder,
        "plan",
        "tokenize",
        os.path.dirname(os.__file__),
        "--glob",
        "*.py",
        "-o",
        "tokens.bin",
    )

    make_plan(folder, "two.yaml", "--gpus", "2")
    before = losses(folder, 2, "two.yaml", FIRST_STEPS)
    require(
        fmean(before[-WINDOW:]) < fmean(before[:WINDOW]) - 1,
        "the loss of the first run does not fall",
    )

    make_plan(folder, "four.yaml", "--gpus", "4", "--gpus-per-node", "4", "--pp", "2", "--tp", "2")
    after = losses(folder, 4, "four.yaml", ALL_STEPS)
    require(
        len(after) == ALL_STEPS - FIRST_STEPS,
        f"the second run made {len(after)} steps, not {ALL_STEPS - FIRST_STEPS}",
    )
    jump = fmean(after[:WINDOW]) - fmean(before[-WINDOW:])
    require(abs(jump) < LARGEST_JUMP, f"the loss jumps by {jump:+.3f} where the second run goes on")
    require(
        fmean(after[-WINDOW:]) < fmean(before[-WINDOW:]), "the loss of the second run does not fall"
    )

    print("\nmean loss of 10 steps, nats a byte")
    for name, found in (("2 ranks", before), ("4 ranks", after)):
        print(f"  {name}  first {fmean(found[:WINDOW]):.3f}  last {fmean(found[-WINDOW:]):.3f}")
    print(f"done in {time.monotonic() - started:.0f} s")


def make_plan(folder: Path, name: str, *options: str) -> None:
    run(
        folder,
        "plan",
        "--model",
        "model.yaml",
        "--gpu",
        "cpu",
        "--precision",
        "fp32",
        *options,
        "--output",
        name,
    )


def losses(folder: Path, ranks: int, plan: str, steps: int) -> list[float]:
    """Train until `steps`, from the newest checkpoint; the loss of every step that ran."""
    lines = run(
        folder,
        "torchrun",
        "--nproc-per-node",
        str(ranks),
        "-m",
        "parplan.executor",
        plan,
        "--data",
        "tokens.bin",
        "--steps",
        str(steps),
        "--learning-rate",
        "1e-3",
        "--warmup-steps",
        "10",
        "--checkpoint-dir",
        "checkpoints",
        "--checkpoint-every",
        "20",
        "--resume",
        "auto",
    )
    return [float(line.split()[3]) for line in lines if line.startswith("step ")]


def run(folder: Path, *command: str) -> list[str]:
    """Prints and runs a command in `folder` and returns the lines that it prints.

    They are shown while it runs. The example ends if the command fails.
    """
    print(f"\n$ {shlex.join(command)}", flush=True)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
    }
    lines = []
    with subprocess.Popen(
        [*program(command[0]), *command[1:]],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            lines.append(line)
    require(process.returncode == 0, f"{command[0]} ended with exit code {process.returncode}")
    return lines


def program(name: str) -> list[str]:
    """An installed command, or from a clone where it is not installed the module behind it."""
    modules = {"plan": "cli", "torchrun": "torch.distributed.run"}
    found = shutil.which(name, path=f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}")
    return [found] if found else [sys.executable, "-m", modules[name]]


def require(holds: bool, message: str) -> None:
    if not holds:
        sys.exit(f"error: {message}")


if __name__ == "__main__":
    main()
