"""Host memory of ranks that start to train a module larger than one rank's share.

    python benchmarks/executor/materialised.py

Each rank makes the values of its own stages. The module is a torch.nn.TransformerEncoder of 24
layers of 1024, 1.1 GiB in fp32. Each process prints the peak rise of its resident memory from the
call of the factory until its optimizer exists; the last row is the module made whole.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor, nn

from parplan.executor.checking.parity import OPTIONS, run_ranks
from parplan.executor.tensors import local
from parplan.executor.traced.traced_trainer import build_traced_trainer
from parplan.profiles.units import KIB, format_bytes
from tests.helpers.traced_plans import hand_plan

COLUMNS = "{:<26}{:>14}{:>14}{:>14}{:>14}"
MESHES = ({"pp": 4}, {"pp": 2, "dp": 2, "zero": 3}, {"pp": 2, "dp": 2, "zero": 0})


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(1024, 16, 4096, batch_first=True, dropout=0.0)
        self.layers = nn.ModuleList(
            nn.TransformerEncoder(layer, 1, enable_nested_tensor=False) for _ in range(24)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def encoder() -> tuple[nn.Module, Any]:
    return Encoder(), lambda size: {"x": torch.randn(size, 8, 1024)}


def _memory(key: str) -> int:
    """Return a figure of /proc/self/status in bytes."""
    line = next(
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith(f"{key}:")
    )
    return int(line.split()[1]) * KIB


def _start() -> int:
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    return _memory("VmRSS")


def _built(plan: Any) -> tuple[int, int, int]:
    """Return bytes of this rank's parameters, and the rise of its memory at peak and at the end."""
    before = _start()
    trainer = build_traced_trainer(plan, OPTIONS, torch.device("cpu"))
    share = sum(local(parameter.detach()).nbytes for parameter in trainer.pipeline.parameters)
    return share, _memory("VmHWM") - before, _memory("VmRSS") - before


def main() -> None:
    torch.set_num_threads(1)
    print(COLUMNS.format("plan", "whole", "share", "peak", "after"))
    whole = sum(p.nbytes for p in _on_meta().parameters())
    for mesh in MESHES:
        plan = hand_plan(
            "benchmarks.executor.materialised:encoder", **mesh, shards_a_stage=24 // mesh["pp"]
        )
        (ranks,) = run_ranks([plan], _built)
        share, peak, after = max(ranks, key=lambda each: each[1])
        text = f"pp {plan.mesh.pp} x dp {plan.mesh.dp}, ZeRO {plan.stages[0].zero}"
        print(COLUMNS.format(text, *map(format_bytes, (whole, share, peak, after))), flush=True)
    if not os.fork():
        before = _start()
        module, _ = encoder()
        assert not next(module.parameters()).is_meta
        risen = _memory("VmHWM") - before, _memory("VmRSS") - before
        print(COLUMNS.format("as it is", *map(format_bytes, (whole, whole, *risen))), flush=True)
        os._exit(0)
    os.wait()


def _on_meta() -> nn.Module:
    with torch.device("meta"):
        return Encoder()


if __name__ == "__main__":
    main()
