"""The module of each operator of a described model: one row of a table for each.

A part of a model is a row here, from an operator of `parplan.profiles.models.transformer` to its
module, which has the same parameters. The operators of a mixture of experts are one module, which
`transformer_layers` makes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from parplan.executor.models.adapters import SUM, AdapterSum
from parplan.executor.models.attention_modules import (
    AttentionGate,
    CrossAttention,
    LatentRotary,
    QueryKeyNorm,
    Rotary,
    SelfAttention,
)
from parplan.executor.models.delta_rule_modules import (
    DeltaNorm,
    DeltaScan,
    DeltaSteps,
    delta_rule_convolution,
)
from parplan.executor.models.eight_bits import EightBitLinear
from parplan.executor.models.loss import Loss
from parplan.executor.models.operators import (
    Activation,
    Gated,
    Joined,
    LayerNorm,
    LearnedPositions,
    Linear,
    PartlyBiased,
    Residual,
    RMSNorm,
    SoftCap,
    Sum,
    Tokens,
)
from parplan.executor.models.state_space_modules import (
    GatedNorm,
    Scan,
    StepSizes,
    state_space_convolution,
)
from parplan.executor.models.tower_modules import (
    HEARD,
    Heard,
    ImageTokens,
    JoinedPatches,
    PatchRotary,
    PatchTables,
    ProjectorActivation,
)
from parplan.profiles.models.blocks import BlockRun, Mixer
from parplan.profiles.models.operator_graph import (
    Operator,
    OperatorKind,
)
from parplan.profiles.models.spec import ModelSpec, TrainingSpec
from parplan.profiles.models.towers import Tower


@dataclass(frozen=True, slots=True, kw_only=True)
class Blueprint:
    """The description of one operator's module.

    model   of which the layer has a block: that of a tower in a layer of one
    tower   in a layer of one, None in all others
    """

    operator: Operator
    model: ModelSpec
    training: TrainingSpec
    block: BlockRun
    tower: Tower | None = None


def linear_of(operator: Operator, head_dim: int = 1) -> nn.Module:
    """Returns the module of a product with a weight, and with a bias of all or some features."""
    weight, *bias = operator.parameters
    features, contracted = weight.shape
    if bias and bias[0].shape[0] < features:
        return PartlyBiased(contracted, features, bias[0].shape[0], head_dim)
    kind = EightBitLinear if weight.quantised else Linear
    return kind(contracted, features, bias=bool(bias))


def _norm(of: Blueprint) -> nn.Module:
    kind = LayerNorm if len(of.operator.parameters) > 1 else RMSNorm  # with a bias
    return kind(of.operator.outputs[0].dims[-1].size, eps=of.model.norm_epsilon)


def _tokens(of: Blueprint) -> nn.Module:
    return Tokens(of.model.padded_vocab_size, of.model.hidden_size)


def _rotary(of: Blueprint) -> nn.Module:
    if of.model.latent is not None:
        return LatentRotary(of.model, of.block)
    return Rotary(of.model, of.block, of.operator)


def _attention(of: Blueprint) -> nn.Module:
    work = of.operator.attention
    longest = work.in_documents.longest if work is not None and work.in_documents else 0
    causal = of.tower is None
    return SelfAttention(of.model, of.training.attention, of.block, longest, causal=causal)


_BY_KIND: dict[OperatorKind, Callable[[Blueprint], nn.Module]] = {
    OperatorKind.MATMUL: lambda of: linear_of(of.operator, of.model.head_dim),
    OperatorKind.NORM: _norm,
    OperatorKind.EMBEDDING: _tokens,
    OperatorKind.ATTENTION: _attention,
    OperatorKind.CROSS_ENTROPY: lambda of: Loss(skips=of.model.image_tokens > 0),
}
_BY_NAME: dict[str, Callable[[Blueprint], nn.Module]] = {
    "positions": lambda of: LearnedPositions(of.model),
    "rotary": _rotary,
    "qk_norm": lambda of: QueryKeyNorm(of.model, of.operator),
    "activation": lambda of: Activation(of.model),
    "shared_activation": lambda of: Activation(of.model),
    "residual1": lambda of: Residual(of.model),
    "residual2": lambda of: Residual(of.model),
    "shared_gated": lambda _: Gated(),
    "expert_sum": lambda _: Sum(),
    "cross_attention": lambda of: CrossAttention(of.model, of.training.attention),
    "cross_residual": lambda of: Residual(of.model),
    "attention_gate": lambda of: AttentionGate(of.model),
    "joined": lambda _: Joined(),
    "logit_cap": lambda of: SoftCap(of.model.logit_soft_cap),
}
_OF_TOWER: dict[str, Callable[[ModelSpec, Tower], nn.Module]] = {
    "rotary": PatchRotary,
    "positions": lambda _, tower: PatchTables(tower),
    "joined": lambda _, tower: JoinedPatches(tower),
    "frames_activation": lambda _, tower: ProjectorActivation(tower.functions.projector_activation),
    "patches_activation": lambda _, tower: ProjectorActivation(
        tower.functions.projector_activation
    ),
    "image_tokens": lambda _, tower: ImageTokens(tower),
}


_BY_MIXER: dict[Mixer, dict[str, Callable[[ModelSpec], nn.Module]]] = {
    Mixer.STATE_SPACE: {
        "conv": state_space_convolution,
        "steps": StepSizes,
        "scan": Scan,
        "gated_norm": GatedNorm,
    },
    Mixer.DELTA_RULE: {
        "conv": delta_rule_convolution,
        "steps": DeltaSteps,
        "scan": DeltaScan,
        "gated_norm": DeltaNorm,
    },
}


def module_of(of: Blueprint) -> nn.Module:
    """Returns the module of an operator outside of a mixture of experts. Raises KeyError."""
    operator = of.operator
    if of.tower is not None and operator.name in _OF_TOWER:
        return _OF_TOWER[operator.name](of.model, of.tower)
    if of.tower is not None and of.tower.frame_features and operator.name in HEARD:
        return Heard(operator, step=HEARD[operator.name])
    if of.tower is not None and operator.name.startswith("projection") and not operator.parameters:
        return ProjectorActivation(of.tower.functions.projector_activation)
    if of.tower is None and operator.name in (of_mixer := _BY_MIXER.get(of.block.mixer, {})):
        return of_mixer[operator.name](of.model)
    if operator.name in _BY_NAME:
        return _BY_NAME[operator.name](of)
    if operator.name.endswith(SUM):
        return AdapterSum()
    return _BY_KIND[operator.kind](of)
