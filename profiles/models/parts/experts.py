"""The mixture of experts of a block: Mixtral, arXiv 2401.04088, section 2.1.

Every expert gets the same number of tokens, unless the training says how much more the fullest rank
gets (`TrainingSpec.routed_share`), or how many each expert takes.
The FLOPs are those of the experts that a token passes (*active*). Routers differ in the function of
their scores (softmax or sigmoid), in groups of experts and in corrections of the balance; none of
these has a cost of its own here, nor has a loss that balances the experts.
"""

from __future__ import annotations

from dataclasses import replace

from parplan.profiles.models.operator_graph import (
    EXPERT_WIDTH,
    EXPERTS_DIM,
    ROUTES,
    Dim,
    Operator,
    OperatorKind,
    Tensor,
)
from parplan.profiles.models.parts.feed_forward import kept_gate, shared_expert_operators
from parplan.profiles.models.parts.shapes import (
    FP32_BYTES,
    Grouping,
    Shapes,
    elementwise,
    grouped,
    linear,
)

CHOICE_BYTES = 12  # number (int64) and weight (fp32) of one chosen expert
_CHOICE = "the choice of a token's experts needs all of its scores"
_EXPERTS_UNDIVIDED = (
    ("hidden", "the ranks of an expert divide its width"),
    ("latent", "the ranks of an expert divide its width"),
    ("chosen", "the experts of a token are on the ranks that hold them"),
)


def expert_operators(x: Tensor, shapes: Shapes) -> tuple[Operator, ...]:
    """Returns the mixture of experts of a block, and the shared experts beside it.

    Its operators are the router, the choice of the experts, the dispatch of tokens to their ranks,
    the experts, and the way back. The copies of the tokens are counted under balanced routing: as
    many arrive at a rank as leave it. The way back multiplies outputs by the weights of the choice,
    for which it saves them, unless the stack multiplies the activation (`weighs_activations`): that
    is saved before and after, but for a gated one, which is one kernel with the weights.
    """
    model = shapes.model
    routes = Dim(ROUTES, model.num_experts)
    halves = 2 if model.gated_ffn else 1
    width = Dim(EXPERT_WIDTH, model.expert_ffn_hidden_size)
    scores = shapes.tokens("router", routes)
    probabilities = shapes.tokens("router_probabilities", routes, FP32_BYTES)
    choice = shapes.tokens("choice", shapes.chosen, CHOICE_BYTES)
    latent = Dim("latent", model.expert_latent_size)
    features = latent if model.expert_latent_size else shapes.hidden
    compressed = shapes.tokens("latent_down", latent) if model.expert_latent_size else x
    sent = shapes.copies("dispatch", features)
    fc1 = shapes.copies("fc1", Dim(EXPERT_WIDTH, width.size * halves, halves))
    activated, fc2 = shapes.copies("activation", width), shapes.copies("fc2", features)
    combined = shapes.tokens("combine", features)
    weighs = shapes.training.stack.weighs_activations
    kept = kept_gate(shapes.copies("activated_gate", width), shapes)
    if weighs and not model.gated_ffn:
        kept = (*kept, shapes.copies("unweighted", width))
    of_experts: Grouping = {
        "experts": Dim(EXPERTS_DIM, model.num_experts),
        "copies": shapes.batch.size * shapes.sequence.size * shapes.chosen.size,
        "parallel_dim": EXPERT_WIDTH,
        "bias": model.expert_bias,
        "undivided": _EXPERTS_UNDIVIDED,
    }
    operators = (
        linear(
            "router",
            x,
            scores,
            parallel_dim=None,
            bias=model.router_bias,
            undivided=(("routes", _CHOICE), ("hidden", _CHOICE)),
        ),
        elementwise(
            "choice",
            (scores,),
            choice,
            (probabilities,),
            undivided=(("routes", _CHOICE), ("chosen", _CHOICE)),
        ),
        *_projection("latent_down", x, compressed, features),
        _exchange("dispatch", OperatorKind.DISPATCH, (compressed, choice), sent, ()),
        grouped("fc1", sent, fc1, **of_experts),
        elementwise(
            "activation",
            (fc1,),
            activated,
            (fc1, *kept),
            parallel_dim=EXPERT_WIDTH,
            undivided=_EXPERTS_UNDIVIDED,
        ),
        grouped("fc2", activated, fc2, **of_experts),
        _exchange(
            "combine",
            OperatorKind.COMBINE,
            (fc2, choice),
            combined,
            (choice,) if weighs else (fc2, choice),
        ),
    )
    if model.expert_latent_size:
        restored = shapes.tokens("latent_up", shapes.hidden)
        operators = (*operators, *_projection("latent_up", combined, restored, shapes.hidden))
        combined = restored
    # executor/models/mixture_of_experts.py runs them as one module
    mixture = tuple(
        each if each.name == "activation" else replace(each, repeatable=False) for each in operators
    )
    if model.shared_experts is None:
        return mixture
    return (*mixture, *shared_expert_operators(x, combined, shapes))


def _projection(name: str, x: Tensor, out: Tensor, features: Dim) -> tuple[Operator, ...]:
    """Returns the product of a token with a whole matrix, none where it stays as it is."""
    if out is x:
        return ()
    return (
        linear(
            name,
            x,
            out,
            parallel_dim=None,
            bias=False,
            undivided=((features.name, "the experts of a token need all of it"),),
        ),
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
