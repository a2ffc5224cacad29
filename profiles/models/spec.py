"""The model (ModelSpec) and its training (TrainingSpec): the two inputs that are not hardware."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from enum import StrEnum

from parplan.profiles.documents.ranges import require_range, require_values
from parplan.profiles.errors import ConfigError, coerce_choice, shortened
from parplan.profiles.models.blocks import (
    BlockRun,
    DeltaRule,
    LatentAttention,
    Mixer,
    NormLayout,
    QkNorm,
    SharedExperts,
    StateSpace,
    block_kinds,
    require_positive,
)
from parplan.profiles.models.documents import Documents
from parplan.profiles.models.fine_tuning import FineTuning
from parplan.profiles.models.functions import PLAIN_FUNCTIONS, Functions
from parplan.profiles.models.towers import ENDS, Tower
from parplan.profiles.product_formats import ProductFormat
from parplan.profiles.stack import AttentionKernel, Stack

_FORBID = {"extra": "forbid"}
_RARE_NAMES = (
    "blocks",
    "latent",
    "output_bias",
    "qk_norm",
    "sinks",
    "bidirectional",
    "attention_soft_cap",
    "logit_soft_cap",
    "norm_layout",
    "shared_experts",
    "expert_latent_size",
    "expert_bias",
    "router_bias",
    "state_space",
    "delta_rule",
    "attention_gate",
    "mtp_layers",
    "functions",
    "key_bias",
    "tower",
    "left_out",
)


class Norm(StrEnum):
    LAYER_NORM = "layer_norm"
    RMS_NORM = "rms_norm"


class Positions(StrEnum):
    LEARNED = "learned"
    ROTARY = "rotary"
    NONE = "none"


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
    """The shape of a transformer of one stack of blocks: a decoder, or an encoder.

    ffn_hidden_size: the width of one of the two halves, where the feed-forward network is gated
    num_experts: 0 for a dense model; else blocks are mixtures of that many experts of width
        `expert_ffn_hidden_size`, each token passes `experts_per_token` of them, and
        `ffn_hidden_size` is that of dense blocks among them, if there are any
    vocab_multiple: the vocabulary is padded to a multiple of it; 128, as Megatron's
        --make-vocab-size-divisible-by, makes every tensor parallel degree up to 128 legal; 1: no
        padding
    blocks: runs of unlike blocks, which repeat until `num_layers`; empty: all blocks are alike
    latent: attention with compressed keys and values; `head_dim` is then that of queries and keys
    output_bias: whether the attention's output product has a bias; None: as `linear_bias`
    qk_norm: the norm of queries and keys
    bidirectional: a token reads those behind it as well (BERT)
    sinks: one trained number a head takes part in the softmax (gpt-oss)
    attention_soft_cap, logit_soft_cap: a bound of the scores and of the logits, c tanh(x / c); 0
        for none
    norm_layout: the norms of a block's parts
    shared_experts: a dense network beside the experts
    expert_latent_size: width to which tokens are projected before they are sent to their experts,
        and from which they come back (Nemotron 3 Super); 0: they are sent as they are
    expert_bias, router_bias: whether the experts' and the router's products have a bias
    state_space: the shape of the blocks with `mixer: state_space`
    delta_rule: the shape of the blocks with `mixer: delta_rule`
    attention_gate: a gate of every feature multiplies the output of attention (Qwen3-Next)
    mtp_layers: multi-token prediction modules behind the blocks (DeepSeek-V3)
    functions: functions and factors that cost nothing, such as the activation
    key_bias: False: queries and values have a bias, keys have none (Whisper)
    tower: the network that makes tokens of images
    left_out: parts of the published model that are not planned, such as a vision tower
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
    blocks: tuple[BlockRun, ...] = ()
    latent: LatentAttention | None = None
    output_bias: bool | None = None
    qk_norm: QkNorm = QkNorm.NONE
    sinks: bool = False
    bidirectional: bool = False
    attention_soft_cap: float = 0.0
    logit_soft_cap: float = 0.0
    norm_layout: NormLayout = NormLayout.PRE
    shared_experts: SharedExperts | None = None
    expert_latent_size: int = 0
    expert_bias: bool = False
    router_bias: bool = False
    state_space: StateSpace | None = None
    delta_rule: DeltaRule | None = None
    attention_gate: bool = False
    mtp_layers: int = 0
    functions: Functions = PLAIN_FUNCTIONS
    key_bias: bool = True
    tower: Tower | None = None
    left_out: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        coerce_choice(self, "norm", Norm)
        coerce_choice(self, "positions", Positions)
        coerce_choice(self, "qk_norm", QkNorm)
        coerce_choice(self, "norm_layout", NormLayout)
        where = f"model {shortened(self.name)}"
        require_values(self, where)
        for error in (*self._shape_errors(), *self._part_errors(), *self._expert_errors()):
            raise ConfigError(f"{where}: {error[0]}", hint=error[1])
        parts = self.latent, self.shared_experts, self.state_space, self.delta_rule
        for record in (*self.blocks, *parts):
            if record is not None:
                require_positive(record, where, zero=("window", "chunk", "q_rank"))

    def _shape_errors(self) -> Iterator[tuple[str, str]]:
        """Yields what is wrong with the sizes of the model, each with a hint."""
        kinds = self.block_kinds
        fed = [kind for kind in kinds if kind.feed_forward]
        needed = {"ffn_hidden_size": any(not (self.num_experts and kind.experts) for kind in fed)}
        if self.num_experts:
            needed |= dict.fromkeys(("experts_per_token", "expert_ffn_hidden_size"), True)
        for field, is_needed in needed.items():
            if is_needed and getattr(self, field) < 1:
                yield f"{field} is {getattr(self, field)}, it must be at least 1", f"give {field}"
        if self.num_heads % self.num_kv_heads:
            yield (
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}",
                "correct num_kv_heads",
            )
        if not 0.0 <= self.dropout < 1.0:
            yield f"dropout is {self.dropout}, it must be in [0, 1)", "correct dropout"

    def _part_errors(self) -> Iterator[tuple[str, str]]:
        """Yields what contradicts itself in the parts of the blocks, each with a hint."""
        latent = self.latent
        if latent is not None and self.head_dim != latent.key_head_dim:
            yield (
                f"head_dim is {self.head_dim}, a head of latent attention has "
                f"{latent.nope_head_dim} + {latent.rope_head_dim} features",
                f"set head_dim: {latent.key_head_dim}",
            )
        if latent is not None and self.num_kv_heads != self.num_heads:
            yield (
                f"num_kv_heads is {self.num_kv_heads}, latent attention has as many as heads",
                f"set num_kv_heads: {self.num_heads}",
            )
        if latent is not None and self.qk_norm is not QkNorm.NONE:
            yield f"qk_norm is {self.qk_norm}, latent attention has its own", "leave out qk_norm"
        mixers = {kind.mixer for kind in self.block_kinds}
        for mixer in (Mixer.STATE_SPACE, Mixer.DELTA_RULE):
            if mixer in mixers and getattr(self, mixer.value) is None:
                yield f"blocks have mixer {mixer} without {mixer}", f"give {mixer}"
        rule = self.delta_rule
        if rule is not None and rule.value_heads % rule.key_heads:
            yield (
                f"delta_rule has {rule.value_heads} heads of values, no multiple of the "
                f"{rule.key_heads} of keys",
                "correct value_heads",
            )
        if self.attention_gate and latent is not None:
            yield "attention_gate with latent attention, which has none", "leave out attention_gate"
        if self.parallel_residual and self.norm_layout in (NormLayout.POST, NormLayout.BOTH):
            yield (
                f"norm_layout is {self.norm_layout}, parallel residuals have norms before parts",
                "set norm_layout: pre or shared",
            )
        tower = self.tower
        if tower is not None and self.dropout:
            yield f"dropout is {self.dropout}, a tower has none", "set dropout: 0"
        if tower is not None and tower.width != self.hidden_size:
            yield (
                f"the {tower.name} tower ends in {tower.width} features, hidden_size is "
                f"{self.hidden_size}",
                "correct the last width of projector",
            )
        if self.norm_layout is NormLayout.SHARED and not self.parallel_residual:
            yield "norm_layout is shared without parallel_residual", "set parallel_residual: true"

    def _expert_errors(self) -> Iterator[tuple[str, str]]:
        """Yields what is wrong with the fields of experts, each with a hint."""
        fields_of_experts = ("experts_per_token", "expert_ffn_hidden_size", "shared_experts")
        if not self.num_experts:
            for field in (*fields_of_experts, "expert_latent_size", "expert_bias", "router_bias"):
                if getattr(self, field):
                    yield (
                        f"{field} is {getattr(self, field)} without num_experts",
                        "add num_experts",
                    )
            return
        if self.experts_per_token > self.num_experts:
            yield (
                f"experts_per_token {self.experts_per_token} is more "
                f"than num_experts {self.num_experts}",
                "correct experts_per_token",
            )
        dense = any(kind.feed_forward and not kind.experts for kind in self.block_kinds)
        if self.ffn_hidden_size and not dense:
            yield (
                f"ffn_hidden_size is {self.ffn_hidden_size}, but every "
                "block is a mixture of experts",
                "give expert_ffn_hidden_size alone, or blocks with experts: false",
            )
        if self.linear_bias:
            yield (
                "linear_bias is true, experts have no bias",
                "set linear_bias: false; output_bias and expert_bias are apart",
            )

    @property
    def block_kinds(self) -> tuple[BlockRun, ...]:
        """The kind of each block, in their order."""
        return block_kinds(self.blocks, self.num_layers)

    @property
    def num_blocks(self) -> int:
        """Layers between the embedding and the head: those of the tower and the blocks."""
        return self.num_layers + (self.tower.num_layers + ENDS if self.tower else 0)

    @property
    def image_tokens(self) -> int:
        """Tokens of a sequence that are of images."""
        return self.tower.images * self.tower.image_tokens if self.tower else 0

    @property
    def tensor_parallel_sizes(self) -> tuple[tuple[str, int], ...]:
        """The sizes that tensor parallelism divides, each with its name; 0 where there is none."""
        shared, scans = self.shared_experts, self.state_space
        return (
            ("attention heads", self.num_heads),
            ("key-value heads", self.num_kv_heads),
            ("ffn width", self.ffn_hidden_size),
            ("width of the shared experts", shared.ffn_hidden_size if shared else 0),
            ("state-space groups", scans.num_groups if scans else 0),
            ("key heads of the delta rule", self.delta_rule.key_heads if self.delta_rule else 0),
            ("vocabulary", self.padded_vocab_size),
            ("heads of the tower", self.tower.num_heads if self.tower else 0),
        )

    @property
    def attention_output_bias(self) -> bool:
        return self.linear_bias if self.output_bias is None else self.output_bias

    @property
    def padded_vocab_size(self) -> int:
        """The vocabulary rounded up to its multiple, as Megatron pads it."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    @property
    def value_head_dim(self) -> int:
        return self.head_dim if self.latent is None else self.latent.value_head_dim

    @property
    def context_size(self) -> int:
        """Features of a token that attention gives: those of the values of all heads."""
        return self.num_heads * self.value_head_dim

    @property
    def scans(self) -> bool:
        """True if it has blocks whose mixer hands a state on from token to token."""
        return self.state_space is not None or self.delta_rule is not None

    @property
    def shares_table(self) -> bool:
        """True if the head has a copy of the token table, as its product or for further tokens."""
        return self.tied_embeddings or self.mtp_layers > 0

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim


def text_alone(model: ModelSpec) -> ModelSpec:
    """Returns a model without its tower, which is then among the parts that are left out.

    Raises ConfigError for a model whose blocks attend to it.
    """
    if model.tower is None:
        return model
    if model.tower.attended:
        raise ConfigError(
            f"the blocks of {model.name} attend to its {model.tower.name} tower: there is no "
            "text alone",
            hint="choose another model, or leave out --images-per-sequence and --module",
        )
    return replace(model, tower=None, left_out=(*model.left_out, f"the {model.tower.name} tower"))


# fields of few models, which files leave out where they have their defaults
_RARE = tuple(field for field in fields(ModelSpec) if field.name in _RARE_NAMES)


def rare_defaults(model: ModelSpec) -> dict[str, object]:
    """Returns the fields of few models that have their defaults in this one, with these."""
    return {
        field.name: field.default for field in _RARE if getattr(model, field.name) == field.default
    }


def rare_parts(model: ModelSpec) -> dict[str, object]:
    """Returns the fields of few models that this one has, with the defaults of others."""
    return {
        field.name: field.default for field in _RARE if getattr(model, field.name) != field.default
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSpec:
    """One optimizer step: `global_batch_size` sequences of `seq_length` tokens.

    gradient_precision: the type in which gradients accumulate and are reduced (fp32 by default, as
        Megatron does for bf16)
    overlap_grad_reduce: the gradient reduction runs under the last backward pass (FSDP2; Megatron's
        flag of that name)
    products: the format in which the products of the blocks run, whose operands are cast from
        `precision`; None: they run in `precision`, as all else does
    narrow_weights: data-parallel ranks gather the weights of these products in their format, and
        keep no copy in `precision` where the stack holds the casts
    fine_tuning: the trained part of the model; None for all of it
    expert_imbalance: copies of tokens that the ranks with the fullest experts get, over the mean of
        the ranks that divide the experts; 1 where routing is balanced
    expert_capacity: copies that each expert takes, over the mean: more are dropped and fewer are
        padded; 0 where none is dropped
    documents: lengths of the documents that sequences are packed from, in which attention reads
        alone; None where it reads whole sequences
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
    products: ProductFormat | None = None
    narrow_weights: bool = False
    fine_tuning: FineTuning | None = None
    expert_imbalance: float = 1.0
    expert_capacity: float = 0.0
    documents: Documents | None = None
    stack: Stack

    def __post_init__(self) -> None:
        coerce_choice(self, "precision", Precision)
        coerce_choice(self, "gradient_precision", Precision)
        coerce_choice(self, "optimizer", Optimizer)
        coerce_choice(self, "attention", AttentionKernel)
        if self.products is not None:
            coerce_choice(self, "products", ProductFormat)
        if self.narrow_weights and self.products not in self.stack.narrow_gathers:
            known = ", ".join(self.stack.narrow_gathers)
            raise ConfigError(
                f"training: stack {self.stack.name} gathers no weights in "
                f"{self.products or self.precision}",
                hint=f"use --precision with one of {known}" if known else "use another --stack",
            )
        if self.expert_imbalance < 1.0 or self.expert_capacity < 0.0:
            raise ConfigError(
                f"training: expert_imbalance is {self.expert_imbalance:g} and expert_capacity "
                f"{self.expert_capacity:g}, they must be at least 1 and 0"
            )
        for field in ("global_batch_size", "seq_length"):
            require_range(field, getattr(self, field), f"training: {field}")
        if self.documents is not None and self.documents.longest > self.seq_length:
            raise ConfigError(
                f"training: a document has {self.documents.longest:,.0f} tokens, seq_length is "
                f"{self.seq_length:,}",
                hint="cut longer documents, or raise the sequence length",
            )
        if self.precision is Precision.FP32 and self.gradient_precision is not Precision.FP32:
            raise ConfigError(
                f"training: gradient_precision {self.gradient_precision} is below precision fp32",
                hint="use fp32 gradients",
            )

    @property
    def has_masters(self) -> bool:
        """Tells that the optimizer updates copies of the parameters, cast for the passes."""
        return self.precision is not Precision.FP32 and self.stack.master_bytes > 0

    @property
    def routed_share(self) -> float:
        """Copies of tokens that the fullest rank computes, over the mean of all ranks.

        A capacity decides it alone, since every expert has as many then.
        """
        return self.expert_capacity or self.expert_imbalance

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
