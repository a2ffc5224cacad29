"""The trained part of a model: adapters of low rank, frozen parts, and the bits of the rest."""

from __future__ import annotations

import re
from dataclasses import dataclass
from types import MappingProxyType

from parplan.profiles.errors import ConfigError, did_you_mean

_FORBID = {"extra": "forbid"}
ALL = "all"
EMBEDDING = "embedding"
HEAD = "head"
NORMS = "norms"
TOWER = "tower"
PROJECTOR = "projector"
FROZEN_PARTS = (EMBEDDING, HEAD, NORMS, TOWER, PROJECTOR, ALL)
BASE_BITS = (16, 8)
ALL_LINEAR = "all-linear"  # every product of a block, as peft calls it
_BLOCKS = re.compile(r"blocks[ :=]([0-9]{1,9})(?:-([0-9]{1,9}))?")
# names of modules that users write, by the operator of the graph that computes them
_ALIASES = MappingProxyType(
    {
        "qkv": ("q_proj", "k_proj", "v_proj", "query_key_value", "c_attn", "linear_qkv"),
        "attention_out": ("proj", "o_proj", "out_proj", "output_proj", "linear_proj"),
        "fc1": ("gate_proj", "up_proj", "gate_up_proj", "dense_h_to_4h", "c_fc", "linear_fc1"),
        "fc2": ("down_proj", "dense_4h_to_h", "linear_fc2"),
    }
)
_OPERATORS = MappingProxyType(
    {alias: operator for operator, aliases in _ALIASES.items() for alias in aliases}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FineTuning:
    """The trained part of a model.

    lora_rank      rank of the adapters (LoRA, Hu et al. 2021, arXiv 2106.09685); 0: no adapters.
                   With adapters all other parameters are frozen
    lora_targets   products of the blocks that have an adapter, by the names of their operators or
                   of modules as users write them, or "all-linear"
    freeze         frozen parts: embedding, head, norms, the tower, its projector, "blocks 0-15",
                   all. A frozen run of blocks has no adapters
    base_bits      bits of an element of the blocks' frozen weights: 16 for the training's
                   precision, or 8 with one scale for 64 elements
    """

    __pydantic_config__ = _FORBID

    lora_rank: int = 0
    lora_targets: tuple[str, ...] = ()
    freeze: tuple[str, ...] = ()
    base_bits: int = 16

    def __post_init__(self) -> None:
        object.__setattr__(self, "lora_targets", tuple(dict.fromkeys(self.lora_targets)))
        object.__setattr__(self, "freeze", tuple(dict.fromkeys(map(_part, self.freeze))))
        if self.lora_rank < 0:
            raise ConfigError(f"--lora-rank is {self.lora_rank}, it must be at least 0")
        if bool(self.lora_rank) != bool(self.lora_targets):
            given, missing = ("--lora-rank", "--lora-targets")
            if self.lora_targets:
                given, missing = missing, given
            raise ConfigError(f"{given} is given without {missing}", hint=f"add {missing}")
        if self.base_bits not in BASE_BITS:
            raise ConfigError(
                f"base_bits is {self.base_bits}, it must be 16 or 8", hint="use bf16 or int8"
            )
        if not self.lora_rank and not self.freeze:
            raise ConfigError(
                "fine-tuning without adapters or frozen parts trains all of the model",
                hint="add --lora-rank or --freeze",
            )
        if not self.lora_rank and ALL in self.freeze:
            raise ConfigError(
                "--freeze all leaves nothing to train", hint="add --lora-rank, or freeze less"
            )

    @property
    def text(self) -> str:
        """One phrase for a summary."""
        adapters = f"LoRA rank {self.lora_rank} on {', '.join(self.lora_targets)}"
        frozen = f"{', '.join(self.freeze)} frozen"
        eight_bits = "frozen weights of blocks in 8 bits"
        given = (adapters, self.lora_rank), (frozen, self.freeze), (eight_bits, self.base_bits == 8)
        return "; ".join(text for text, is_given in given if is_given)

    def freezes(self, part: str) -> bool:
        """Returns whether the base of a part, such as the embedding or the norms, is frozen."""
        return self.lora_rank > 0 or part in self.freeze or ALL in self.freeze

    def freezes_block(self, block: int) -> bool:
        """Returns whether nothing of a block is trained, adapters included."""
        return any(first <= block <= last for first, last in self.frozen_runs)

    def require_blocks(self, num_blocks: int, model: str) -> None:
        """Raises ConfigError where a frozen run ends beyond the blocks of a model."""
        for first, last in self.frozen_runs:
            if last >= num_blocks:
                raise ConfigError(
                    f"--freeze blocks {first}-{last}: {model} has blocks 0 to {num_blocks - 1}",
                    hint="freeze fewer blocks",
                )

    @property
    def adapted_operators(self) -> tuple[str, ...]:
        """The targets by the names of their operators, each once."""
        return tuple(dict.fromkeys(_OPERATORS.get(name, name) for name in self.lora_targets))

    @staticmethod
    def modules_of(target: str) -> tuple[str, ...]:
        """Returns the names that modules of a target have: all that compute it, of an operator.

        `proj` is the attention's output product, as in a described model.
        """
        return _ALIASES.get("attention_out" if target == "proj" else target, (target,))

    @property
    def frozen_runs(self) -> tuple[tuple[int, int], ...]:
        """The first and the last block of each frozen run."""
        return tuple(
            (int(found[1]), int(found[2] or found[1]))
            for found in map(_BLOCKS.fullmatch, self.freeze)
            if found
        )


def _part(name: str) -> str:
    """Returns the name of a frozen part as records have it. Raises ConfigError."""
    found = _BLOCKS.fullmatch(name)
    if found is None:
        if name in FROZEN_PARTS:
            return name
        raise ConfigError(
            f"--freeze {name} is no part of a model",
            hint=did_you_mean(name, FROZEN_PARTS)
            or f"freeze {', '.join(FROZEN_PARTS)} or blocks:0-15",
        )
    first, last = int(found[1]), int(found[2] or found[1])
    if last < first:
        raise ConfigError(f"--freeze {name} ends before it begins", hint="swap the two numbers")
    return f"blocks {first}-{last}"
