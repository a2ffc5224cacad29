"""Writes the answers of a tree to a fixed list of requests, and compares two such lists.

    python benchmarks/search/same_answers.py write OUT [--tree DIR]     # about ten minutes
    python benchmarks/search/same_answers.py compare BEFORE AFTER

A refactoring changes no answer: run `write` on the tree before it and on the tree after it, and
`compare` the two. Every byte of plan files, stdout, stderr and exit codes counts, except the
seconds that a search took. Run both on a machine that does little else, because small changes of a
pipeline's best strategy are tried for some seconds only.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

WORKERS = 2
TIMEOUT_S = 900.0

MODULE = """
from torch import nn


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8192, 1024)
        self.blocks = nn.Sequential(*(Block(1024) for _ in range(12)))
        self.head = nn.Linear(1024, 8192)

    def forward(self, tokens):
        return self.head(self.blocks(self.embedding(tokens)))


def make():
    return Net()
"""
GPT2 = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "n_positions": 1024,
    "vocab_size": 50257,
    "attn_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "resid_pdrop": 0.0,
}
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "intermediate_size": 5632,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
}

SEARCHES = (
    "--model gpt-1.5b --gpus 8",
    "--model gpt-2.5b --gpus 16 --gpu rtx3090-24gb",
    "--model gpt-7.5b --gpus 32 --pp 8",
    "--model gpt-7.5b --gpus 8 --gpu b200-180gb --stack nemo",
    "--model gpt-8.3b --gpus 32 --stack parplan --tp 1,2",
    "--model gpt-20b --gpus 64 --pp 2,4",
    "--model gpt-20b --gpus 64 --tp 8 --explain",
    "--model gpt-22b --gpus 32 --gpu a800-80gb --schedule 1f1b",
    "--model gpt-tiny --gpus 8",
    "--model gpt-tiny --gpus 2 --gpu cpu",
    "--model llama2-7b --gpus 8 --gpu l4-24gb --host-memory 400GiB",
    "--model llama2-7b --gpus 16 --gpu a10g-24gb --zero 3",
    "--model llama2-13b --gpus 16 --gpu a100-40gb --recompute none,full",
    "--model llama2-13b --gpus 16 --gpu a100-80gb-pcie --stack torchtitan",
    "--model llama3-8b --gpus 8 --global-batch-size 4 --pp 8",
    "--model llama3-8b --gpus 16 --gpu h100-80gb",
    "--model llama3-8b --gpus 16 --gpu h200-141gb --fp8",
    "--model llama3-8b --gpus 8 --gpu h100-96gb-hbm2e --sequence-parallel --tp 2",
    "--model llama3-8b --gpus 16 --gpu gb200-186gb --attention unfused",
    "--model llama3-70b --gpus 64 --gpu gh200-96gb --pp 4 --tp 4",
    "--model mixtral-8x7b --gpus 32 --gpu h100-80gb --pp 1,4",
    "--model mixtral-tiny --gpus 8",
    "--model gpt-1.5b --gpus 8 --gpu v100-16gb --precision fp32",
    "--model gpt-1.5b --gpus 8 --gpu v100-32gb --precision fp16",
    "--model gpt-1.5b --gpus 4 --gpu a100-40gb-pcie --memory-limit 14GiB",
    "--model gpt-1.5b --gpus 8 --gpu a100-40gb --objective memory",
    "--model gpt-8.3b --gpus 16 --objective memory --pp 2,4 --max-slowdown 0.05",
    "--model llama3-8b --gpus 16 --objective peak --tp 1",
    "--model gpt-1.5b --gpus 8 --gpu v100-32gb --objective memory --host-memory 200GiB",
    "--model gpt-1.5b --gpus 8 --objective pareto --points 4 --tp 1",
    "--model gpt-7.5b --gpus 4 --gpu v100-32gb --host-memory 480GiB",
    "--model gpt-7.5b --gpus 4 --gpu rtx3090-24gb --host-memory 480GiB --offload optimizer",
    "--model gpt-2.5b --gpus 8 --gpu a100-40gb --offload activations --tp 1",
    "--model gpt-2.5b --gpus 8 --stack parplan --pp 4 "
    "--schedule scp,early-recompute,last-no-recompute",
    "--model gpt-2.5b --gpus 8 --stack parplan --schedule zbv",
    "--model gpt-2.5b --gpus 16 --stack parplan --tp 4 --tp-overlap 0,2",
    "--model gpt-2.5b --gpus 8 --forbid tp=2 --forbid recompute=full --solver highs",
    "--model gpt-2.5b --gpus 8 --json",
    "--model gpt-175b --gpus 8",
    "--model gpt-20b --gpus 64 --tp 3",
    "--model gpt-20b --gpus 64 --tpp 3",
    "--model gpt-99b --gpus 64",
    "--model small_module:make --gpus 4 --global-batch-size 64",
    "--model small_module:make --gpus 4 --global-batch-size 64 --pp 4 --stages uniform",
    "--model gpt2.json --trace --gpus 8 --global-batch-size 64",
    "--model llama.json --trace --gpus 4 --global-batch-size 32 --stack parplan",
    "--model llama.json --gpus 8 --global-batch-size 32",
)
COMMANDS = (
    "models",
    "clusters",
    "stacks",
    "schema",
    "estimate --model gpt-22b --gpus 8 --tp 8 --micro-batch-size 4 --recompute full",
    "estimate --model gpt-20b --gpus 64 --pp 4 --tp 2 --schedule interleaved "
    "--virtual-stages 11 --output estimated.yaml",
    "estimate --model gpt-7.5b --gpus 4 --gpu v100-32gb --stack parplan "
    "--offload optimizer,parameters --host-blocks 20 --output chunked.yaml",
    "compare --model gpt-1.5b --gpus 8 --baseline all",
    "explain --model gpt-20b --gpus 64 --tp 8",
    "max-model --gpus 4 --gpu v100-32gb",
    "validate --source korth22 --source simumax",
    "validate",
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    written = commands.add_parser("write")
    written.add_argument("out", type=Path)
    written.add_argument("--tree", type=Path, default=Path(__file__).resolve().parents[2])
    written.set_defaults(run=lambda args: write(args.out, args.tree.resolve()))
    compared = commands.add_parser("compare")
    compared.add_argument("before", type=Path)
    compared.add_argument("after", type=Path)
    compared.set_defaults(run=lambda args: compare(args.before, args.after))
    args = parser.parse_args()
    sys.exit(args.run(args))


def write(out: Path, tree: Path) -> int:
    """Runs every request with the planner of `tree`, each in a folder below `out`."""
    out.mkdir(parents=True)
    requests = [*enumerate((*SEARCHES, *COMMANDS))]
    with ThreadPoolExecutor(WORKERS) as pool:
        for number, seconds in pool.map(
            lambda request: _answer(*request, out.resolve(), tree), requests
        ):
            print(f"{number:3d} {seconds}", flush=True)
    return 0


def _answer(number: int, request: str, out: Path, tree: Path) -> tuple[int, str]:
    folder = out / f"{number:02d}"
    folder.mkdir()
    (folder / "request").write_text(request + "\n")
    (folder / "small_module.py").write_text(MODULE)
    (folder / "gpt2.json").write_text(json.dumps(GPT2))
    (folder / "llama.json").write_text(json.dumps(LLAMA))
    module = "parplan.cli" if (tree / "parplan").is_dir() else "cli"
    env = {**os.environ, "PYTHONPATH": str(tree), "COLUMNS": "160", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", module, *request.split()],
        cwd=folder,
        env=env,
        text=True,
        capture_output=True,
        timeout=TIMEOUT_S,
    )
    for name, text in (
        ("stdout", done.stdout),
        ("stderr", done.stderr),
        ("code", str(done.returncode)),
    ):
        (folder / name).write_text(_without_clock(text))
    return number, request


def _without_clock(text: str) -> str:
    """Returns `text` without the seconds that searches took."""
    text = re.sub(r'"elapsed_s": [0-9.e+-]+', '"elapsed_s": 0', text)
    text = re.sub(r"(solved.*?), [0-9.]+ (?:ms|s|min)\b", r"\1, CLOCK", text)
    text = re.sub(r"(searches in) [0-9.]+ (?:ms|s|min)\b", r"\1 CLOCK", text)
    # The clock may stand alone on the next line of its cell.
    return re.sub(r"(?m)^ {40,}[0-9.]+ (?:ms|s|min)$", "CLOCK", text)


def compare(before: Path, after: Path) -> int:
    """Prints every difference between two folders; returns 1 where there is one."""
    files = sorted(
        {
            path.relative_to(root)
            for root in (before, after)
            for path in root.rglob("*")
            if path.is_file()
        }
    )
    different = [
        name
        for name in files
        if not _equal(before / name, after / name) and "__pycache__" not in name.parts
    ]
    for name in different:
        print(f"== {name}: {(before / name.parts[0] / 'request').read_text().strip()}")
        print(
            "\n".join(
                difflib.unified_diff(
                    _lines(before / name), _lines(after / name), "before", "after", lineterm="", n=0
                )
            )
        )
    print(f"{len(SEARCHES) + len(COMMANDS)} requests, {len(files)} files, {len(different)} differ")
    return 1 if different else 0


def _equal(first: Path, second: Path) -> bool:
    return first.exists() and second.exists() and first.read_bytes() == second.read_bytes()


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else ["(missing)"]


if __name__ == "__main__":
    main()
