"""The survey's closed forms of the bytes that a GPU sends in a step, with embedding and head.

They are the formulas of the scheme table (`Scheme.sends`), written out for whole models without
any code of a price: blocks as in the table, and what a token table, a head and its loss add.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from parplan.profiles.models.spec import ModelSpec, Norm, TrainingSpec
from parplan.profiles.models.transformer import build_graph

FP32_BYTES = 4
LOSS_SUMS = 3  # of the cross entropy over a divided vocabulary: maximum, target, sum


@dataclass(frozen=True)
class Sizes:
    """A model in a training on n GPUs, with m micro-batches of b sequences."""

    model: ModelSpec
    training: TrainingSpec
    n: int
    b: int
    m: int

    @property
    def e(self) -> int:
        """Bytes of an activation and of a parameter."""
        return self.training.precision.num_bytes

    @property
    def g(self) -> int:
        """Bytes of a gradient."""
        return self.training.gradient_precision.num_bytes

    @property
    def layers(self) -> int:
        return self.model.num_layers

    @property
    def w(self) -> int:
        """Parameters of the model."""
        return build_graph(self.model, self.training, 1).num_parameters

    @property
    def experts(self) -> int:
        """Parameters of experts."""
        matrices = 3 if self.model.gated_ffn else 2
        each = matrices * self.model.hidden_size * self.model.expert_ffn_hidden_size
        return self.layers * self.model.num_experts * each

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch."""
        return self.training.seq_length * self.b

    @property
    def sbh(self) -> int:
        """Bytes of the activations between two blocks."""
        return self.e * self.tokens * self.model.hidden_size

    @property
    def kv(self) -> int:
        """Bytes of the keys and values of a micro-batch."""
        return 2 * self.e * self.tokens * self.model.kv_size

    @property
    def q(self) -> int:
        """Bytes of the queries of a micro-batch, and of the output of attention."""
        return self.e * self.tokens * self.model.q_size

    @property
    def share(self) -> float:
        """The share of a tensor that a GPU sends to gather it, or to reduce and scatter it."""
        return (self.n - 1) / self.n

    @property
    def all_reduce(self) -> float:
        """Bytes to all-reduce the gradients of the model."""
        return 2 * self.share * self.g * self.w


def _loss(s: Sizes, ranks: int) -> float:
    return LOSS_SUMS * 2 * (ranks - 1) / ranks * FP32_BYTES * s.tokens


def _tensor(s: Sizes) -> float:
    """Four all-reduces a block, one of the embedding, one of the head."""
    return s.m * (2 * s.share * (4 * s.layers + 2) * s.sbh + _loss(s, s.n))


def _sequence(s: Sizes) -> float:
    """Ten a block; two of the embedding; three of the head."""
    return s.m * (s.share * (10 * s.layers + 5) * s.sbh + _loss(s, s.n))


def _grid(s: Sizes) -> float:
    """Each product three times X and W; the table and its output twice; norms and the loss."""
    q = round(s.n**0.5)
    model, part = s.model, (q - 1) / q**2
    h, f = model.hidden_size, model.ffn_hidden_size
    first = 2 * f if model.gated_ffn else f
    products = (  # inputs and outputs of a token
        (h, model.q_size + 2 * model.kv_size),
        (model.q_size, h),
        (h, first),
        (f, h),
    )
    block = sum(s.e * (s.tokens * i + i * o) for i, o in products)
    vocabulary = s.e * (s.tokens * h + h * model.padded_vocab_size)
    sums = FP32_BYTES * (1 if model.norm is Norm.RMS_NORM else 2) * s.tokens / q
    norms = (2 * s.layers + 1) * 2 * 2 * (q - 1) / q * sums
    return s.m * (part * (3 * s.layers * block + (3 + 2) * vocabulary) + norms + _loss(s, q) / q)


def _messages(s: Sizes) -> float:
    return 2 * s.m * s.sbh


def _experts(s: Sizes) -> float:
    """Copies of tokens to their experts and back, and the gradients of the rest."""
    copies = s.model.experts_per_token * s.sbh
    return s.share * (4 * s.m * s.layers * copies + 2 * s.g * (s.w - s.experts))


# the bytes that the busiest GPU sends, by the name of the scheme
CLOSED_FORMS: dict[str, Callable[[Sizes], float]] = {
    "data parallel": lambda s: s.all_reduce,
    "ZeRO 1": lambda s: s.share * (s.g + s.e) * s.w,
    "ZeRO 2": lambda s: s.share * (s.m * s.g + s.e) * s.w,
    "ZeRO 3": lambda s: s.share * s.m * (s.g + 2 * s.e) * s.w,
    "tensor 1-D": _tensor,
    "tensor 1-D, sequence": _sequence,
    "tensor 2-D": _grid,
    "context, ring": lambda s: 3 * s.m * s.layers * s.share * s.kv + s.all_reduce,
    "context, all-gather": lambda s: 3 * s.m * s.layers * s.share * s.kv + s.all_reduce,
    "context, all-to-all": lambda s: (
        s.m * s.layers * s.share * (2 * s.q + 2 * s.kv + 3 * s.q) / s.n + s.all_reduce
    ),
    "pipeline, GPipe": _messages,
    "pipeline, 1F1B": _messages,
    "pipeline, ZB-V": lambda s: 2 * _messages(s),
    "pipeline, DualPipeV": lambda s: 2 * _messages(s),
    "pipeline, early R": _messages,
    "pipeline, last no R": _messages,
    "pipeline, SCP": _messages,
    "pipeline, interleaved": lambda s: (
        _messages(s) * s.layers / s.n
    ),  # a layer on each virtual stage
    "expert parallel": _experts,
}
