"""The parts of a block that a plain transformer does not have, and the order of unlike blocks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from functools import lru_cache

from parplan.profiles.errors import ConfigError, coerce_choice

_FORBID = {"extra": "forbid"}


class Mixer(StrEnum):
    """The part of a block that mixes tokens."""

    ATTENTION = "attention"
    STATE_SPACE = "state_space"
    DELTA_RULE = "delta_rule"
    NONE = "none"  # the block is a feed-forward network alone


class QkNorm(StrEnum):
    """The norm of queries and keys before their product.

    head    over each head, one weight of the head's width for all heads (Qwen 3, Gemma 3)
    whole   over all heads together, with a weight of their whole width (OLMo 2)
    plain   over each head, without a weight (Llama 4)
    """

    NONE = "none"
    HEAD = "head"
    WHOLE = "whole"
    PLAIN = "plain"


class NormLayout(StrEnum):
    """The norms of the two parts of a block.

    pre      before each part (GPT, Llama)
    post     behind each part, before it is added to the residual stream (OLMo 2)
    both     before and behind each part, four in all (Gemma 2 and 3)
    shared   one norm before both parts, which run in parallel (Falcon 7B)
    """

    PRE = "pre"
    POST = "post"
    BOTH = "both"
    SHARED = "shared"


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Attention with compressed keys and values: DeepSeek-V2, arXiv 2405.04434, section 2.1.

    q_rank           width of the compressed queries; 0: queries are not compressed
    kv_rank          width of the compressed keys and values
    nope_head_dim    features of a query's and a key's head without positions
    rope_head_dim    those with rotary positions, which all heads of a key share
    value_head_dim   features of a value's head
    """

    __pydantic_config__ = _FORBID

    q_rank: int = 0
    kv_rank: int
    nope_head_dim: int
    rope_head_dim: int
    value_head_dim: int

    @property
    def key_head_dim(self) -> int:
        return self.nope_head_dim + self.rope_head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedExperts:
    """A dense feed-forward network beside the experts, which every token passes.

    ffn_hidden_size    its width, that of all shared experts together
    gated              its output is multiplied by a sigmoid of the token (Qwen2-MoE)
    """

    __pydantic_config__ = _FORBID

    ffn_hidden_size: int
    gated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpace:
    """The shape of a Mamba-2 mixer: Dao and Gu 2024, arXiv 2405.21060, section 7.

    num_heads, head_dim    heads of the inner width
    state_size             numbers that each feature of a head keeps of the tokens before
    num_groups             heads of a group share the two projections of the state
    conv_kernel            tokens that the causal convolution reads
    chunk_size             tokens that the scan takes as one product
    conv_bias, linear_bias whether the convolution and the two projections have a bias
    """

    __pydantic_config__ = _FORBID

    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int = 1
    conv_kernel: int = 4
    chunk_size: int = 256
    conv_bias: bool = True
    linear_bias: bool = False

    @property
    def inner_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def conv_size(self) -> int:
        """Channels of the convolution: the inner width and both projections of the state."""
        return self.inner_size + 2 * self.num_groups * self.state_size


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaRule:
    """The shape of a gated delta rule: Yang et al. 2024, arXiv 2412.06464.

    key_heads, key_head_dim        heads of queries and keys
    value_heads, value_head_dim    heads of values, a multiple of those of keys
    conv_kernel                    tokens that the causal convolution reads
    """

    __pydantic_config__ = _FORBID

    key_heads: int
    key_head_dim: int
    value_heads: int
    value_head_dim: int
    conv_kernel: int = 4

    @property
    def value_size(self) -> int:
        return self.value_heads * self.value_head_dim

    @property
    def conv_size(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key_head_dim + self.value_size


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRun:
    """Consecutive blocks that are alike.

    num_blocks    how many they are
    window        tokens that a token reads with itself; 0: all before it
    chunk         tokens of the parts of a sequence that attention stays within (Llama 4); 0: all
    rotary        False: its queries and keys have no positions, in a model with rotary positions
    experts       False: dense blocks of `ffn_hidden_size`, in a model with experts
    mixer         the part that mixes tokens
    feed_forward  False: the block has no feed-forward network (Nemotron-H)
    """

    __pydantic_config__ = _FORBID

    num_blocks: int = 1
    window: int = 0
    chunk: int = 0
    rotary: bool = True
    experts: bool = True
    mixer: Mixer = Mixer.ATTENTION
    feed_forward: bool = True

    def __post_init__(self) -> None:
        coerce_choice(self, "mixer", Mixer)
        if self.window and self.chunk:
            raise ConfigError(
                f"a block has window {self.window} and chunk {self.chunk}, it has one of them",
                hint="leave out window or chunk",
            )
        if self.mixer is Mixer.NONE and not self.feed_forward:
            raise ConfigError(
                "a block has neither a mixer nor a feed-forward network",
                hint="set feed_forward: true",
            )


def require_positive(record: object, where: str, *, zero: tuple[str, ...] = ()) -> None:
    """Raises ConfigError for a size of a record below 1; fields of `zero` may be 0."""
    for field in fields(record):  # type: ignore[arg-type]
        value, least = getattr(record, field.name), 0 if field.name in zero else 1
        if isinstance(value, int) and not isinstance(value, bool) and value < least:
            raise ConfigError(f"{where}: {field.name} is {value}, it must be at least {least}")


@lru_cache(maxsize=256)
def block_kinds(runs: tuple[BlockRun, ...], num_blocks: int) -> tuple[BlockRun, ...]:
    """Returns the kind of each block; the runs repeat until there are `num_blocks`."""
    each = [replace(run, num_blocks=1) for run in runs for _ in range(run.num_blocks)]
    each = each or [BlockRun()]
    return tuple(each[index % len(each)] for index in range(num_blocks))


def kind_names(kinds: tuple[BlockRun, ...], *, experts: bool) -> tuple[str, ...]:
    """Returns a name of each kind of blocks: the words of the aspects in which they differ."""
    words = [tuple(_words(kind, experts=experts)) for kind in kinds]
    differ = [len(set(aspect)) > 1 for aspect in zip(*words, strict=True)]
    return tuple(
        "-".join(word for word, unlike in zip(each, differ, strict=True) if word and unlike)
        for each in words
    )


def _words(kind: BlockRun, *, experts: bool) -> Iterator[str]:
    yield "" if kind.mixer is Mixer.NONE else kind.mixer.value.replace("_", "-")
    if kind.window:
        yield f"window-{kind.window}"
    else:
        yield f"chunk-{kind.chunk}" if kind.chunk else "full"
    yield "rotary" if kind.rotary else "unrotated"
    if not kind.feed_forward:
        yield ""
    elif experts:
        yield "experts" if kind.experts else "dense"
    else:
        yield "feed-forward"
