"""The model (ModelSpec) and its training (TrainingSpec): the two inputs that are not hardware."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from parplan.profiles.documents.ranges import require_range, require_ranges
from parplan.profiles.errors import ConfigError, coerce_choice
from parplan.profiles.stack import AttentionKernel, Stack

_FORBID = {"extra": "forbid"}
FP8 = "fp8"  # the key of the fp8 peak of a device


class Norm(StrEnum):
    LAYER_NORM = "layer_norm"
    RMS_NORM = "rms_norm"


class Positions(StrEnum):
    LEARNED = "learned"
    ROTARY = "rotary"


class Precision(StrEnum):
    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"

    @property
    def num_bytes(self) -> int:
        return 4 if self is Precision.FP32 else 2


class Optimizer(StrEnum):
    """The optimizers whose states and update are priced (costmodels/operators/optimizers.py)."""

    ADAM = "adam"
    ADAM_8BIT = "adam-8bit"
    MUON = "muon"
    ADAFACTOR = "adafactor"
    SGD = "sgd"
    SGD_MOMENTUM = "sgd-momentum"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The shape of a decoder-only transformer.

    ffn_hidden_size: the width of one of the two halves, where the feed-forward network is gated
    num_experts: 0 for a dense model; else every block is a mixture of that many experts of width
        `expert_ffn_hidden_size`, each token passes `experts_per_token` of them, and there is no
        `ffn_hidden_size`. No expert is shared, none has a bias
    vocab_multiple: the vocabulary is padded to a multiple of it; 128, as Megatron's
        --make-vocab-size-divisible-by, makes every tensor parallel degree up to 128 legal; 1: no
        padding
    """

    __pydantic_config__ = _FORBID

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_hidden_size: int = 0
    vocab_size: int
    max_seq_length: int
    norm: Norm = Norm.LAYER_NORM
    positions: Positions = Positions.LEARNED
    gated_ffn: bool = False
    linear_bias: bool = True
    qkv_bias: bool = True
    dropout: float = 0.0
    tied_embeddings: bool = True
    parallel_residual: bool = False
    rope_theta: float = 10000.0
    rotary_fraction: float = 1.0
    norm_epsilon: float = 1e-5
    vocab_multiple: int = 128
    num_experts: int = 0
    experts_per_token: int = 0
    expert_ffn_hidden_size: int = 0

    def __post_init__(self) -> None:
        coerce_choice(self, "norm", Norm)
        coerce_choice(self, "positions", Positions)
        block_fields = (
            ("num_experts", "experts_per_token", "expert_ffn_hidden_size")
            if self.num_experts
            else ("ffn_hidden_size",)
        )
        require_ranges(self, f"model {self.name}")
        for field in block_fields:
            if getattr(self, field) < 1:
                raise ConfigError(
                    f"model {self.name}: {field} is {getattr(self, field)}, it must be at least 1"
                )
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"model {self.name}: num_heads {self.num_heads} is not a multiple of "
                f"num_kv_heads {self.num_kv_heads}"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ConfigError(f"model {self.name}: dropout is {self.dropout}, it must be in [0, 1)")
        self._check_experts()

    def _check_experts(self) -> None:
        if not self.num_experts:
            for field in ("experts_per_token", "expert_ffn_hidden_size"):
                if getattr(self, field):
                    raise ConfigError(
                        f"model {self.name}: {field} is {getattr(self, field)} without num_experts",
                        hint="add num_experts",
                    )
            return
        if self.experts_per_token > self.num_experts:
            raise ConfigError(
                f"model {self.name}: experts_per_token {self.experts_per_token} is more "
                f"than num_experts {self.num_experts}"
            )
        if self.ffn_hidden_size:
            raise ConfigError(
                f"model {self.name}: ffn_hidden_size is {self.ffn_hidden_size}, but every "
                "block is a mixture of experts",
                hint=(
                    "give expert_ffn_hidden_size alone; models with dense and expert blocks "
                    "are not supported"
                ),
            )
        if self.linear_bias:
            raise ConfigError(
                f"model {self.name}: linear_bias is true, experts have no bias",
                hint="set linear_bias: false",
            )

    @property
    def padded_vocab_size(self) -> int:
        """The vocabulary rounded up to its multiple, as Megatron pads it."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSpec:
    """One optimizer step: `global_batch_size` sequences of `seq_length` tokens.

    gradient_precision: the type in which gradients accumulate and are reduced (fp32 by default, as
        Megatron does for bf16)
    overlap_grad_reduce: the gradient reduction runs under the last backward pass (FSDP2; Megatron's
        flag of that name)
    fp8_matmuls: the products of the blocks run in fp8, with operands that are scaled by tensor and
        cast each time; all else runs in `precision`
    stack: the software that runs the step. It has no default here:
        parplan.commands.requests.requests.request_of takes that of the command
    """

    __pydantic_config__ = _FORBID

    global_batch_size: int
    seq_length: int
    precision: Precision = Precision.BF16
    gradient_precision: Precision = Precision.FP32
    optimizer: Optimizer = Optimizer.ADAM
    attention: AttentionKernel = AttentionKernel.FLASH
    overlap_grad_reduce: bool = True
    fp8_matmuls: bool = False
    stack: Stack

    def __post_init__(self) -> None:
        coerce_choice(self, "precision", Precision)
        coerce_choice(self, "gradient_precision", Precision)
        coerce_choice(self, "optimizer", Optimizer)
        coerce_choice(self, "attention", AttentionKernel)
        for field in ("global_batch_size", "seq_length"):
            require_range(field, getattr(self, field), f"training: {field}")
        if self.precision is Precision.FP32 and self.gradient_precision is not Precision.FP32:
            raise ConfigError(
                f"training: gradient_precision {self.gradient_precision} is below precision fp32",
                hint="use fp32 gradients",
            )

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch_size * self.seq_length


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEntry:
    """A model with the default batch size and sequence length of its file."""

    spec: ModelSpec
    global_batch_size: int
    seq_length: int
    source: str
