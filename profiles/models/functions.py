"""The functions and factors of a model that change its values and none of its costs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from parplan.profiles.errors import coerce_choice


class Activations(StrEnum):
    """The activation of a feed-forward network; a gated one has it on its gate.

    bounded-silu   g sigmoid(1.702 g) (u + 1) of gate g and up u, both bounded by 7 (gpt-oss)
    """

    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu-tanh"
    QUICK_GELU = "quick-gelu"
    RELU = "relu"
    RELU_SQUARED = "relu-squared"
    BOUNDED_SILU = "bounded-silu"


class RouterScores(StrEnum):
    """The function that makes scores of experts of a router's logits.

    sigmoid-inputs   a score multiplies the input of its expert, not the output (Llama 4)
    """

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"
    SIGMOID_INPUTS = "sigmoid-inputs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Functions:
    """The functions and factors of a model.

    activation          None: silu where the feed-forward network is gated, else gelu-tanh
    score_factor        the factor of attention's scores; 0: head_dim^-1/2
    embedding_factor    the factor of the token embeddings
    residual_factor     the factor of every branch that is added to the residual stream
    logit_divisor       the divisor of the logits
    window_rope_theta   the base of the rotary angles in blocks with a window; 0: as in all others
    router_scores       the function of the router's logits
    router_normed       whether the weights of a token's experts are divided by their sum
    router_factor       the factor of these weights
    """

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    activation: Activations | None = None
    score_factor: float = 0.0
    embedding_factor: float = 1.0
    residual_factor: float = 1.0
    logit_divisor: float = 1.0
    window_rope_theta: float = 0.0
    router_scores: RouterScores = RouterScores.SOFTMAX
    router_normed: bool = True
    router_factor: float = 1.0

    def __post_init__(self) -> None:
        coerce_choice(self, "router_scores", RouterScores)
        if self.activation is not None:
            coerce_choice(self, "activation", Activations)


PLAIN_FUNCTIONS = Functions()
