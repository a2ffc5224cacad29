"""Growth of a search: CPU-seconds, peak memory and candidates against layers and experts.

    python -m benchmarks.search.growth                              # a table, half an hour
    python -m benchmarks.search.growth --sweep layers --points 16,64 --repeat 1
    python -m benchmarks.search.growth --write                      # also the page

A figure is the median of whole processes, as in benchmarks/search/speed.py. `--write` replaces the
table of docs/design/growth.md. The growth with the number of GPUs is in benchmarks/scale.py.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import click
import yaml

from benchmarks.search.sweeps import PAGE, Sweep, run_sweeps, write_page
from parplan.profiles.documents.schema import document
from parplan.profiles.models.model_catalog import load_model
from parplan.report.text import console, say


def more_layers(num_layers: int, folder: Path) -> list[str]:
    """Returns the blocks of gpt-20b, more of them, on 64 GPUs."""
    entry = load_model("gpt-20b")
    spec = replace(entry.spec, name=f"gpt-{num_layers}-layers", num_layers=num_layers)
    body = {
        "model": document(spec),
        "training": {"global_batch_size": 1024, "seq_length": spec.max_seq_length},
        "source": "blocks of gpt-20b",
    }
    path = folder / f"{spec.name}.yaml"
    path.write_text(yaml.safe_dump(body), encoding="utf-8")
    return ["--model", str(path), "--gpu", "a100-80gb", "--gpus", "64"]


UNLIKE = """
from torch import nn


class Block(nn.Module):
    def __init__(self, width, factor):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, factor * width)
        self.down = nn.Linear(factor * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, classes, layers=24, width=4096):
        super().__init__()
        self.embedding = nn.Embedding(32768, width)
        factors = (4, 6, 3, 8, 2, 5)[:classes]
        self.blocks = nn.Sequential(
            *(Block(width, factors[k % classes]) for k in range(layers))
        )
        self.head = nn.Linear(width, 32768)

    def forward(self, tokens):
        return self.head(self.blocks(self.embedding(tokens)))
"""


def more_classes(num_classes: int, folder: Path) -> list[str]:
    """Returns 24 blocks of so many classes in turns, a traced module, on 32 GPUs."""
    factory = f"\n\ndef make():\n    return Net({num_classes})\n"
    (folder / f"unlike{num_classes}.py").write_text(UNLIKE + factory, encoding="utf-8")
    return [
        *("--model", f"unlike{num_classes}:make", "--gpu", "a100-80gb", "--gpus", "32"),
        *("--global-batch-size", "256", "--seq-length", "2048"),
    ]


# mixtures of experts by billions of parameters, which hardly fit 64 GPUs, or only with the hosts
EXPERTS = {109: "llama4-scout", 236: "deepseek-v2", 400: "llama4-maverick", 671: "deepseek-v3"}


def more_experts(billions: int, folder: Path) -> list[str]:
    """Returns a mixture of experts of so many billions of parameters on 64 GPUs."""
    return ["--model", EXPERTS[billions], "--gpu", "h100-80gb", "--gpus", "64"]


SWEEPS = (
    Sweep("layers", (16, 32, 64, 128, 256), more_layers),
    Sweep("classes", (1, 2, 3, 4, 5, 6), more_classes),
    Sweep("experts", tuple(EXPERTS), more_experts),
)


@click.command()
@click.option(
    "--sweep",
    "name",
    type=click.Choice([sweep.name for sweep in SWEEPS]),
    help="Measure this sweep alone.",
)
@click.option("--points", help="Sizes in place of the sweep's own, for example 64,1024.")
@click.option(
    "--repeat", type=click.IntRange(1), default=3, show_default=True, help="Runs counted."
)
@click.option("--write", is_flag=True, help="Replace the table of the page.")
def main(name: str | None, points: str | None, repeat: int, write: bool) -> None:
    """Measure the growth of a search with the number of layers, layer classes and experts."""
    table = run_sweeps(SWEEPS, name, points, repeat)
    if write:
        write_page(table, "growth.py")
        say(console(sys.stderr), f"wrote {PAGE}")


if __name__ == "__main__":
    main()
