"""Shards, widest cuts and plans of six modules by each way of cutting.

    python -m benchmarks.search.ways_of_cutting [--only NAME,...]

The plans are for 4 pipeline stages x 2 data-parallel ranks of A100-80GB with 1F1B, 64 samples or
sequences a step. By names the three inner stages begin at evenly spaced blocks. Each table row has
the number of shards, the most MiB that a cut between two shards hands on for one sample, the
predicted step, its gap, and the shards of each stage.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from parplan.costmodels.schedules.schedule import Schedule
from parplan.planner.request import Constraints, PlanRequest
from parplan.planner.search.find_plan import find_best
from parplan.planner.traced.plan_traced import TracedFactory, traced_request
from parplan.planner.traced.shards import Cutting, CutWay
from parplan.planner.traced.stage_rules import StageRule, parse_stages
from parplan.profiles.machines.machine_catalog import load_cluster, load_stack, with_gpus
from parplan.profiles.models.module_source import ModuleSource
from parplan.profiles.models.spec import TrainingSpec
from parplan.profiles.units import MIB

PINS = Constraints(pp=(4,), dp=(2,), tp=(1,), schedule=(Schedule.ONE_F_ONE_B,))
HERE = "benchmarks.search.ways_of_cutting"


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm1(x)
        x = x + self.attention(normed, normed, normed, need_weights=False)[0]
        out: torch.Tensor = x + self.mlp(self.norm2(x))
        return out


class _Gpt(nn.Module):
    def __init__(self, width: int = 1024, layers: int = 24, vocabulary: int = 50304) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(*(_Block(width, 16) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.norm(self.blocks(self.tokens(ids))))
        return logits


def gpt() -> nn.Module:
    return _Gpt()


class _Residual(nn.Module):
    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(32, channels), nn.GroupNorm(32, out)
        self.conv1 = nn.Conv2d(channels, out, 3, padding=1)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1)
        self.skip = nn.Conv2d(channels, out, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.conv1(nn.functional.silu(self.norm1(x)))
        out: torch.Tensor = self.skip(x) + self.conv2(nn.functional.silu(self.norm2(inner)))
        return out


class _Unet(nn.Module):
    def __init__(self, widths: tuple[int, ...] = (128, 256, 384, 512)) -> None:
        super().__init__()
        pairs = list(pairwise(widths))
        self.first = nn.Conv2d(3, widths[0], 3, padding=1)
        self.down = nn.ModuleList(_Residual(width, width) for width in widths)
        self.shrink = nn.ModuleList(nn.Conv2d(a, b, 3, 2, 1) for a, b in pairs)
        self.middle = _Residual(widths[-1], widths[-1])
        self.up = nn.ModuleList(_Residual(2 * width, width) for width in widths)
        self.grow = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in pairs)
        self.last = nn.Conv2d(widths[0], 3, 3, padding=1)

    def forward(self, sample: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        x, skips = self.first(sample), []
        for level, down in enumerate(self.down):
            x = down(x if level == 0 else self.shrink[level - 1](x))
            skips.append(x)
        x = self.middle(x)
        for level in reversed(range(len(self.up))):
            x = self.up[level](torch.cat((x, skips[level]), dim=1))
            x = self.grow[level - 1](x) if level else x
        return nn.functional.mse_loss(self.last(x), noise)


def unet() -> tuple[nn.Module, Any]:
    def batch(size: int) -> dict[str, torch.Tensor]:
        shape = size, 3, 64, 64
        return {"sample": torch.randn(shape), "noise": torch.randn(shape)}

    return _Unet(), batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A module, the submodules at which its inner stages begin, and whether skips may cross."""

    title: str
    source: ModuleSource
    names: str
    cross_skips: bool = False
    seq_length: int = 512


def _huggingface(model_type: str, architecture: str, **config: Any) -> ModuleSource:
    return ModuleSource(
        huggingface={"model_type": model_type, "architectures": [architecture], **config}
    )


_BERT = {"num_hidden_layers": 24, "hidden_size": 1024, "num_attention_heads": 16}
CASES: Mapping[str, Case] = {
    "gpt": Case(
        title="hand-written GPT, 24 layers of 1,024",
        source=ModuleSource(factory=f"{HERE}:gpt"),
        names="blocks.6,blocks.12,blocks.18",
    ),
    "gpt2": Case(
        title="Hugging Face GPT-2, 24 layers of 1,024",
        source=_huggingface("gpt2", "GPT2LMHeadModel", n_layer=24, n_embd=1024, n_head=16),
        names="transformer.h.6,transformer.h.12,transformer.h.18",
    ),
    "bert": Case(
        title="Hugging Face BERT, 24 layers of 1,024",
        source=_huggingface("bert", "BertForMaskedLM", intermediate_size=4096, **_BERT),
        names=",".join(f"bert.encoder.layer.{k}" for k in (6, 12, 18)),
    ),
    "t5": Case(
        title="Hugging Face T5, 12 + 12 layers of 768",
        source=_huggingface(
            "t5", "T5ForConditionalGeneration", num_layers=12, d_model=768, d_ff=3072, num_heads=12
        ),
        names="encoder.block.6,decoder.block.0,decoder.block.6",
    ),
    "vit": Case(
        title="Hugging Face ViT, 24 layers of 1,024",
        source=_huggingface("vit", "ViTForImageClassification", intermediate_size=4096, **_BERT),
        names="vit.layers.6,vit.layers.12,vit.layers.18",
    ),
    "unet": Case(
        title="U-Net, 4 levels of 128 to 512 channels, `--cross-skips`",
        source=ModuleSource(factory=f"{HERE}:unet"),
        names="down.2,middle,up.2",
        cross_skips=True,
    ),
}


def _rules(case: Case) -> Iterator[tuple[str, CutWay, StageRule]]:
    yield from ((way.value, way, StageRule()) for way in CutWay)
    yield "names", CutWay.QUOTA, parse_stages(case.names)


def _print_rows(case: Case) -> None:
    training = TrainingSpec(
        global_batch_size=64, seq_length=case.seq_length, stack=load_stack("parplan")
    )
    cluster = with_gpus(load_cluster("a100-80gb"), 8)
    request = traced_request(
        PlanRequest(model=case.source, cluster=cluster, training=training, constraints=PINS)
    )
    for label, way, rule in _rules(case):
        factory = TracedFactory(request, rule, Cutting(way=way, cross_skips=case.cross_skips))
        plan = find_best(factory).plan
        sharded = factory.prices(()).price_cache.sharded
        widest = max(sum(tensor.num_bytes for _, tensor in cut) for cut in sharded.cuts)
        sizes = ", ".join(str(stage.end - stage.first) for stage in plan.stages)
        step_ms = 1000 * plan.predicted.step_time_s.value
        print(
            f"| {case.title} | {label} | {len(plan.shards)} | "
            f"{widest / sharded.model.micro_batch_size / MIB:.2f} | {step_ms:.1f} ms | "
            f"{plan.search.gap:.1%} | {sizes} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(CASES), help="Names of modules, with commas.")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    print("| module | way | shards | widest cut, MiB | step | gap | shards of the stages |")
    print("|---|---|---|---|---|---|---|")
    for name in parser.parse_args().only.split(","):
        _print_rows(CASES[name])


if __name__ == "__main__":
    main()
