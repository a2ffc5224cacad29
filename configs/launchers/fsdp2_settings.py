"""The settings that train_fsdp2.py reads from fsdp2.yaml, which stands beside it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """The shape of the model. Vocabularies are padded to a multiple of `vocab_multiple`."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_hidden_size: int
    vocab_size: int
    vocab_multiple: int = 128
    max_seq_length: int
    norm: str = "layer_norm"
    norm_epsilon: float = 1e-5
    positions: str = "learned"
    rope_theta: float = 10000.0
    rotary_fraction: float = 1.0
    gated_ffn: bool = False
    activation: str = "gelu_tanh"
    linear_bias: bool = True
    qkv_bias: bool = True
    tied_embeddings: bool = True
    dropout: float = 0.0

    @property
    def padded_vocab_size(self) -> int:
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple


@dataclass(frozen=True, kw_only=True)
class MeshSettings:
    """The ranks of every axis, the innermost last.

    replicate    copies of the states (HSDP)
    shard        data-parallel ranks that divide one copy, beside those of `context`
    context      ranks that divide every sequence
    """

    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1


@dataclass(frozen=True, kw_only=True)
class PipelineSettings:
    """`stage_blocks` are the blocks of every stage in the order of the model."""

    schedule: str = "1F1B"
    stage_blocks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class ShardingSettings:
    """The sharding of parameters, gradients and optimizer states.

    reshard_after_forward   of every block: its parameters are gathered again for the backward pass
                            (ZeRO 3, else 2)
    reshard_ends            the same of embedding and head
    cpu_offload             the host holds all three, and updates them
    sequence_parallel       tensor-parallel ranks divide the tokens of norms and residuals
    """

    reshard_after_forward: tuple[bool, ...]
    reshard_ends: bool = True
    cpu_offload: bool = False
    sequence_parallel: bool = True


@dataclass(frozen=True, kw_only=True)
class BatchSettings:
    """Sequences of a micro-batch of one rank and of a step, and tokens of a sequence."""

    micro_batch_size: int
    global_batch_size: int
    seq_length: int


@dataclass(frozen=True, kw_only=True)
class PrecisionSettings:
    """The types of computation, of reduced gradients, and of parameters and moments."""

    compute: str = "bfloat16"
    gradients: str = "float32"
    states: str = "float32"


@dataclass(frozen=True, kw_only=True)
class Fsdp2Settings:
    """A run; `recompute` of every block is none, selective (norms and activations) or full."""

    shape: ModelSettings
    mesh: MeshSettings
    pipeline: PipelineSettings
    sharding: ShardingSettings
    batch: BatchSettings
    precision: PrecisionSettings
    recompute: tuple[str, ...]


def of_blocks(value: object, num_blocks: int) -> tuple[Any, ...]:
    """Returns the value of every block: one of all, or a list of runs such as `12 full`."""
    runs = value if isinstance(value, list) else [f"{num_blocks} {value}"]
    pairs = (run.split() for run in runs)
    return tuple(yaml.safe_load(word.lower()) for count, word in pairs for _ in range(int(count)))


def read_settings(path: Path) -> Fsdp2Settings:
    """Reads a YAML file. Raises KeyError or TypeError for a key that is missing or unknown."""
    document = yaml.safe_load(path.read_text(encoding="utf-8"))
    pipeline, sharding = document["pipeline"], document["sharding"]
    pipeline["stage_blocks"] = tuple(pipeline["stage_blocks"])
    blocks = sum(pipeline["stage_blocks"])
    sharding["reshard_after_forward"] = of_blocks(sharding["reshard_after_forward"], blocks)
    document["recompute"] = of_blocks(document["recompute"], blocks)
    kinds = {
        "shape": ModelSettings,
        "mesh": MeshSettings,
        "pipeline": PipelineSettings,
        "sharding": ShardingSettings,
        "batch": BatchSettings,
        "precision": PrecisionSettings,
    }
    parts = {name: kind(**document.pop(name)) for name, kind in kinds.items()}
    return Fsdp2Settings(**parts, **document)
