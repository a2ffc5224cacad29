"""ModelSpec -> ModelGraph: the operators of a decoder-only transformer.

The families are GPT, NeoX, Llama, Mistral, Mixtral and Qwen. The saved tensors reproduce, term by
term, the activation memory of Korthikanti et al. 2022, arXiv 2205.05198 (EQUATIONS M3) and the
FLOPs of Narayanan et al. 2021, arXiv 2104.04473 (EQUATIONS K4). Left out: the statistics that a
norm saves (8 bytes a token), token ids, and the rotary tables.

Experts: routing is taken as balanced, so that every rank and every expert gets the same number of
tokens. The FLOPs are those of the experts that a token passes (*active*).
"""

from __future__ import annotations

from parplan.profiles.models.operator_graph import (
    EXPERT_WIDTH,
    EXPERTS_DIM,
    Dim,
    LayerKind,
    ModelGraph,
    Operator,
    OperatorKind,
    Parameter,
    RepeatedLayer,
    Tensor,
    layer_class,
)
from parplan.profiles.models.spec import ModelSpec, Norm, Positions, TrainingSpec
from parplan.profiles.stack import AttentionKernel

MASK_BYTES = 1  # a dropout mask is one byte an element
FP32_BYTES = 4
CHOICE_BYTES = 12  # number (int64) and weight (fp32) of one chosen expert
_POSITIONED = (("sequence", "positions are counted from the first token of a rank's part"),)
_CHOICE = "the choice of a token's experts needs all of its scores"
_EXPERTS_UNDIVIDED = (
    ("hidden", "the ranks of an expert divide its width"),
    ("chosen", "the experts of a token are on the ranks that hold them"),
)


class _Shapes:
    """The dims and tensors that the operators share, for micro-batches of `batch` sequences."""

    def __init__(
        self, model: ModelSpec, training: TrainingSpec, batch: int, plain_dropout: bool, cp: int
    ) -> None:
        self.element_bytes = training.precision.num_bytes
        self.mask_bytes = self.element_bytes if plain_dropout else MASK_BYTES
        self.keeps_scores = training.attention is not AttentionKernel.FLASH or (
            plain_dropout and model.dropout > 0
        )
        self.batch = Dim("batch", batch)
        self.sequence = Dim("sequence", -(-training.seq_length // cp))
        self.keys = Dim("keys", training.seq_length)
        self.hidden = Dim("hidden", model.hidden_size)
        qkv_size = model.q_size + 2 * model.kv_size
        self.qkv = Dim("heads", qkv_size, qkv_size // model.num_kv_heads)
        self.context = Dim("heads", model.q_size, model.q_size // model.num_kv_heads)
        self.heads = Dim("heads", model.num_heads, model.num_heads // model.num_kv_heads)
        self.head_dim = Dim("head_dim", model.head_dim)
        halves = 2 if model.gated_ffn else 1
        width = model.expert_ffn_hidden_size or model.ffn_hidden_size
        name = EXPERT_WIDTH if model.num_experts else "ffn"
        self.fc1 = Dim(name, width * halves, halves)
        self.ffn = Dim(name, width)
        self.experts = Dim(EXPERTS_DIM, model.num_experts)
        self.routes = Dim("routes", model.num_experts)
        self.chosen = Dim("chosen", model.experts_per_token)
        self.vocab = Dim("vocab", model.padded_vocab_size)
        self.positions = Dim("positions", model.max_seq_length)

    def tokens(self, name: str, feature: Dim, element_bytes: int | None = None) -> Tensor:
        """Returns a [batch, sequence, feature] activation."""
        size = self.element_bytes if element_bytes is None else element_bytes
        return Tensor(name=name, dims=(self.batch, self.sequence, feature), element_bytes=size)

    def copies(self, name: str, feature: Dim) -> Tensor:
        """Returns a [batch, sequence, chosen experts, feature] activation.

        It has one copy of a token for every expert that the token chose.
        """
        return Tensor(
            name=name,
            dims=(self.batch, self.sequence, self.chosen, feature),
            element_bytes=self.element_bytes,
        )


def _norm(name: str, x: Tensor, out: Tensor, model: ModelSpec, shapes: _Shapes) -> Operator:
    weight = Parameter(name="weight", dims=(shapes.hidden,))
    bias = Parameter(name="bias", dims=(shapes.hidden,))
    parameters = (weight, bias) if model.norm is Norm.LAYER_NORM else (weight,)
    return Operator(
        name=name,
        kind=OperatorKind.NORM,
        dims=x.dims,
        inputs=(x,),
        outputs=(out,),
        parameters=parameters,
        saved=(x,),
        undivided=(("hidden", "a norm is over the whole of it"),),
    )


def _linear(
    name: str,
    x: Tensor,
    out: Tensor,
    *,
    parallel_dim: str | None,
    bias: bool,
    undivided: tuple[tuple[str, str], ...] = (),
) -> Operator:
    """Returns out[b, s, o] = x[b, s, i] weight[o, i]^T (+ bias[o]).

    Its backward pass is two products of the same size.
    """
    features, contracted = out.dims[-1], x.dims[-1]
    weight = Parameter(name="weight", dims=(features, contracted))
    dims = (*out.dims, contracted)
    flops = 2 * x.num_elements * features.size
    return Operator(
        name=name,
        kind=OperatorKind.MATMUL,
        dims=dims,
        inputs=(x,),
        outputs=(out,),
        saved=(x,),
        parameters=(weight, Parameter(name="bias", dims=(features,))) if bias else (weight,),
        contracted=contracted.name,
        parallel_dim=parallel_dim,
        undivided=undivided,
        flops_forward=flops,
        flops_backward=2 * flops,
    )


def _attention(
    qkv: Tensor, context: Tensor, model: ModelSpec, training: TrainingSpec, shapes: _Shapes
) -> Operator:
    """Returns softmax(q k^T) v for every head.

    Unfused attention saves the scores: 5 a S^2 b bytes with dropout, 2 a S^2 b without.
    """
    rows = (shapes.batch, shapes.heads, shapes.sequence)
    scores = (*rows, shapes.keys)
    if not shapes.keeps_scores:
        saved: tuple[Tensor, ...] = (
            qkv,
            Tensor(name="attention_logsumexp", dims=rows, element_bytes=FP32_BYTES),
        )
    else:
        saved = (
            qkv,
            Tensor(name="attention_softmax", dims=scores, element_bytes=shapes.element_bytes),
        )
        if model.dropout:
            saved += (
                Tensor(name="attention_mask", dims=scores, element_bytes=shapes.mask_bytes),
                Tensor(name="attention_dropped", dims=scores, element_bytes=shapes.element_bytes),
            )
    saved += _attention_copies(context, model, training, shapes)
    flops = 4 * shapes.batch.size * shapes.sequence.size * shapes.keys.size * model.q_size
    return Operator(
        name="attention",
        kind=OperatorKind.ATTENTION,
        dims=(*scores, shapes.head_dim),
        inputs=(qkv,),
        outputs=(context,),
        saved=saved,
        parallel_dim="heads",
        flops_forward=flops,
        flops_backward=2 * flops,
        causal=True,
        dropped=model.dropout > 0,
        undivided=(
            ("sequence", "attention reads every token of a sequence"),
            ("keys", "the softmax is over all of them"),
            ("head_dim", "the scores sum over it"),
        ),
    )


def _attention_copies(
    context: Tensor, model: ModelSpec, training: TrainingSpec, shapes: _Shapes
) -> tuple[Tensor, ...]:
    """Returns the copies that the stack's attention saves in addition.

    They are copies of keys and values, and of its output before batch and sequence change places.
    """
    stack = training.stack
    kv = Dim("heads", 2 * model.kv_size)
    outputs = (
        stack.attention_output_copies
        if shapes.batch.size > 1 and training.attention is AttentionKernel.FLASH
        else 0
    )
    return (
        *(shapes.tokens(f"attention_kv_{i}", kv) for i in range(stack.attention_kv_copies)),
        *(shapes.tokens(f"{context.name}_{i}", shapes.context) for i in range(outputs)),
    )


def _elementwise(
    name: str,
    inputs: tuple[Tensor, ...],
    out: Tensor,
    saved: tuple[Tensor, ...] = (),
    *,
    parallel_dim: str | None = None,
    undivided: tuple[tuple[str, str], ...] = (),
) -> Operator:
    return Operator(
        name=name,
        kind=OperatorKind.ELEMENTWISE,
        dims=out.dims,
        inputs=inputs,
        outputs=(out,),
        saved=saved,
        parallel_dim=parallel_dim,
        undivided=undivided,
    )


def _residual(
    name: str, inputs: tuple[Tensor, ...], out: Tensor, model: ModelSpec, shapes: _Shapes
) -> Operator:
    """Returns the dropout of a sublayer's output added to the residual; it saves only the mask."""
    mask = (
        (shapes.tokens(f"{name}_mask", shapes.hidden, shapes.mask_bytes),) if model.dropout else ()
    )
    return _elementwise(name, inputs, out, mask)


def _embedding_operators(model: ModelSpec, shapes: _Shapes) -> tuple[Operator, ...]:
    out = shapes.tokens("embedded", shapes.hidden)
    table = Parameter(name="weight", dims=(shapes.vocab, shapes.hidden))
    tokens = Operator(
        name="tokens",
        kind=OperatorKind.EMBEDDING,
        dims=(*out.dims, shapes.vocab),
        inputs=(),
        outputs=(out,),
        parameters=(table,),
        contracted="vocab",
        parallel_dim="vocab",
    )
    if model.positions is not Positions.LEARNED:
        return (tokens,)
    positioned = shapes.tokens("positioned", shapes.hidden)
    mask = (
        (shapes.tokens("embedding_mask", shapes.hidden, shapes.mask_bytes),)
        if model.dropout
        else ()
    )
    position_table = Parameter(name="weight", dims=(shapes.positions, shapes.hidden))
    positions = Operator(
        name="positions",
        kind=OperatorKind.ELEMENTWISE,
        dims=out.dims,
        inputs=(out,),
        outputs=(positioned,),
        parameters=(position_table,),
        saved=mask,
    )
    return tokens, positions


def _block_operators(
    model: ModelSpec, training: TrainingSpec, shapes: _Shapes
) -> tuple[Operator, ...]:
    hidden = shapes.hidden
    x, normed1 = shapes.tokens("block_input", hidden), shapes.tokens("norm1", hidden)
    qkv, context = shapes.tokens("qkv", shapes.qkv), shapes.tokens("context", shapes.context)
    attended, middle = shapes.tokens("attention_out", hidden), shapes.tokens("residual1", hidden)
    normed2, out = shapes.tokens("norm2", hidden), shapes.tokens("block_output", hidden)
    feed_forward_operators = _expert_operators if model.num_experts else _feed_forward_operators
    feed_forward = feed_forward_operators(normed2, model, training, shapes)
    fed = feed_forward[-1].outputs[0]

    rotary: tuple[Operator, ...] = ()
    rotated = qkv
    if model.positions is Positions.ROTARY:
        rotated = shapes.tokens("qkv_rotated", shapes.qkv)
        rotary = (
            _elementwise("rotary", (qkv,), rotated, parallel_dim="heads", undivided=_POSITIONED),
        )
    attention = (
        _norm("norm1", x, normed1, model, shapes),
        _linear("qkv", normed1, qkv, parallel_dim="heads", bias=model.qkv_bias),
        *rotary,
        _attention(rotated, context, model, training, shapes),
        _linear("attention_out", context, attended, parallel_dim="heads", bias=model.linear_bias),
    )
    ffn_input = x if model.parallel_residual else middle
    join = (
        ()
        if model.parallel_residual
        else (_residual("residual1", (x, attended), middle, model, shapes),)
    )
    summands = (x, attended, fed) if model.parallel_residual else (middle, fed)
    return (
        *attention,
        *join,
        _norm("norm2", ffn_input, normed2, model, shapes),
        *feed_forward,
        _residual("residual2", summands, out, model, shapes),
    )


def _feed_forward_operators(
    x: Tensor, model: ModelSpec, training: TrainingSpec, shapes: _Shapes
) -> tuple[Operator, ...]:
    fc1, fc2 = shapes.tokens("fc1", shapes.fc1), shapes.tokens("fc2", shapes.hidden)
    activated = shapes.tokens("activation", shapes.ffn)
    gate = (
        (shapes.tokens("activated_gate", shapes.ffn),)
        if model.gated_ffn and training.stack.keeps_activated_gate
        else ()
    )
    return (
        _linear("fc1", x, fc1, parallel_dim="ffn", bias=model.linear_bias),
        _elementwise("activation", (fc1,), activated, (fc1, *gate), parallel_dim="ffn"),
        _linear("fc2", activated, fc2, parallel_dim="ffn", bias=model.linear_bias),
    )


def _expert_operators(
    x: Tensor, model: ModelSpec, training: TrainingSpec, shapes: _Shapes
) -> tuple[Operator, ...]:
    """Returns the mixture of experts of a block: Mixtral, arXiv 2401.04088, section 2.1.

    Its operators are the router, the choice of the experts, the dispatch of tokens to their ranks,
    the experts, and the way back. The copies of the tokens are counted under balanced routing: as
    many arrive at a rank as leave it.
    """
    scores = shapes.tokens("router", shapes.routes)
    probabilities = shapes.tokens("router_probabilities", shapes.routes, FP32_BYTES)
    choice = shapes.tokens("choice", shapes.chosen, CHOICE_BYTES)
    sent, fc1 = shapes.copies("dispatch", shapes.hidden), shapes.copies("fc1", shapes.fc1)
    activated, fc2 = shapes.copies("activation", shapes.ffn), shapes.copies("fc2", shapes.hidden)
    combined = shapes.tokens("combine", shapes.hidden)
    gate = (
        (shapes.copies("activated_gate", shapes.ffn),)
        if model.gated_ffn and training.stack.keeps_activated_gate
        else ()
    )
    return (
        _linear(
            "router",
            x,
            scores,
            parallel_dim=None,
            bias=False,
            undivided=(("routes", _CHOICE), ("hidden", _CHOICE)),
        ),
        _elementwise(
            "choice",
            (scores,),
            choice,
            (probabilities,),
            undivided=(("routes", _CHOICE), ("chosen", _CHOICE)),
        ),
        _exchange("dispatch", OperatorKind.DISPATCH, (x, choice), sent, ()),
        _grouped("fc1", sent, fc1, shapes.experts),
        _elementwise(
            "activation",
            (fc1,),
            activated,
            (fc1, *gate),
            parallel_dim=EXPERT_WIDTH,
            undivided=_EXPERTS_UNDIVIDED,
        ),
        _grouped("fc2", activated, fc2, shapes.experts),
        _exchange("combine", OperatorKind.COMBINE, (fc2, choice), combined, (fc2, choice)),
    )


def _exchange(
    name: str,
    kind: OperatorKind,
    inputs: tuple[Tensor, ...],
    out: Tensor,
    saved: tuple[Tensor, ...],
) -> Operator:
    return Operator(
        name=name,
        kind=kind,
        dims=out.dims,
        inputs=inputs,
        outputs=(out,),
        saved=saved,
        undivided=_EXPERTS_UNDIVIDED,
    )


def _grouped(name: str, x: Tensor, out: Tensor, experts: Dim) -> Operator:
    """Returns out[token, o] = x[token, i] weight[expert of the token, o, i]^T.

    It runs for every token and every expert that the token chose.
    """
    features, contracted = out.dims[-1], x.dims[-1]
    flops = 2 * x.num_elements * features.size
    return Operator(
        name=name,
        kind=OperatorKind.EXPERTS,
        dims=(*out.dims, contracted),
        inputs=(x,),
        outputs=(out,),
        saved=(x,),
        parameters=(Parameter(name="weight", dims=(experts, features, contracted)),),
        contracted=contracted.name,
        parallel_dim=EXPERT_WIDTH,
        undivided=_EXPERTS_UNDIVIDED,
        flops_forward=flops,
        flops_backward=2 * flops,
    )


def _head_operators(model: ModelSpec, shapes: _Shapes) -> tuple[Operator, ...]:
    """Returns the last norm, the product with the vocabulary, and the loss.

    The loss saves its probabilities in fp32 (EQUATIONS M5).
    """
    x = shapes.tokens("head_input", shapes.hidden)
    normed = shapes.tokens("head_norm", shapes.hidden)
    logits = shapes.tokens("logits", shapes.vocab)
    probabilities = shapes.tokens("probabilities", shapes.vocab, FP32_BYTES)
    loss = Tensor(name="loss", dims=(shapes.batch, shapes.sequence), element_bytes=FP32_BYTES)
    weight = Parameter(
        name="weight", dims=(shapes.vocab, shapes.hidden), tied=model.tied_embeddings
    )
    flops = 2 * x.num_elements * shapes.vocab.size
    return (
        _norm("norm", x, normed, model, shapes),
        Operator(
            name="lm_head",
            kind=OperatorKind.MATMUL,
            dims=(*logits.dims, shapes.hidden),
            inputs=(normed,),
            outputs=(logits,),
            parameters=(weight,),
            saved=(normed,),
            contracted="hidden",
            parallel_dim="vocab",
            flops_forward=flops,
            flops_backward=2 * flops,
        ),
        Operator(
            name="loss",
            kind=OperatorKind.CROSS_ENTROPY,
            dims=logits.dims,
            inputs=(logits,),
            outputs=(loss,),
            saved=(probabilities,),
            parallel_dim="vocab",
        ),
    )


def build_graph(
    model: ModelSpec,
    training: TrainingSpec,
    micro_batch_size: int,
    *,
    plain_dropout: bool = False,
    cp: int = 1,
) -> ModelGraph:
    """Returns the operator graph of `model` for micro-batches of `micro_batch_size` sequences.

    A sequence has `training.seq_length` tokens, of which the operators have one of `cp` parts, and
    attention reads the keys of all.
    plain_dropout: dropout is no fused kernel, it saves a mask of its input's type; attention that
    drops out saves its scores
    """
    shapes = _Shapes(model, training, micro_batch_size, plain_dropout, cp)
    return ModelGraph(
        name=model.name,
        micro_batch_size=micro_batch_size,
        layers=(
            RepeatedLayer(layer_class(LayerKind.EMBEDDING, _embedding_operators(model, shapes)), 1),
            RepeatedLayer(
                layer_class(LayerKind.BLOCK, _block_operators(model, training, shapes)),
                model.num_layers,
            ),
            RepeatedLayer(layer_class(LayerKind.HEAD, _head_operators(model, shapes)), 1),
        ),
    )
