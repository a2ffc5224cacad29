"""One block: its mixer and its feed-forward network, with norms around them and residuals."""

from __future__ import annotations

from parplan.profiles.models.blocks import Mixer, NormLayout
from parplan.profiles.models.operator_graph import Operator, Tensor
from parplan.profiles.models.parts.attention import attention_operators
from parplan.profiles.models.parts.cross_attention import attended, cross_attention_operators
from parplan.profiles.models.parts.delta_rule import delta_rule_operators
from parplan.profiles.models.parts.experts import expert_operators
from parplan.profiles.models.parts.feed_forward import feed_forward_operators
from parplan.profiles.models.parts.shapes import Shapes
from parplan.profiles.models.parts.state_space import state_space_operators

Part = tuple[Operator, ...]


def block_operators(shapes: Shapes) -> Part:
    """Returns the operators of a block in the order of its forward pass."""
    x = shapes.tokens("block_input", shapes.hidden)
    if shapes.model.parallel_residual:
        return _parallel(x, shapes)
    block = shapes.block
    out = shapes.tokens("block_output", shapes.hidden)
    mixes = block.mixer is not Mixer.NONE
    if not block.feed_forward:
        return _mixed(x, out, shapes)
    if not mixes:
        return _fed(x, out, shapes)
    middle = shapes.tokens("residual1", shapes.hidden)
    mixed = _mixed(x, middle, shapes)
    states = attended(shapes)
    if states is None:
        return (*mixed, *_fed(middle, out, shapes))
    crossed = shapes.tokens("cross_residual", shapes.hidden)
    return (*mixed, *_crossed(middle, crossed, states, shapes), *_fed(crossed, out, shapes))


def _mixed(x: Tensor, out: Tensor, shapes: Shapes) -> Part:
    """Returns the mixer with its norms, added to `x`."""
    before, normed = _norm_before("norm1", x, shapes)
    mixed = _mixer(normed, shapes)
    behind, added = _norm_behind("post_norm1", mixed[-1].outputs[0], shapes)
    return (*before, *mixed, *behind, shapes.residual("residual1", (x, added), out))


def _crossed(x: Tensor, out: Tensor, states: Tensor, shapes: Shapes) -> Part:
    """Returns the attention to the output of a tower with its norms, added to `x`."""
    before, normed = _norm_before("cross_norm", x, shapes)
    crossed = cross_attention_operators(normed, states, shapes)
    behind, added = _norm_behind("post_cross_norm", crossed[-1].outputs[0], shapes)
    return (*before, *crossed, *behind, shapes.residual("cross_residual", (x, added), out))


def _fed(x: Tensor, out: Tensor, shapes: Shapes) -> Part:
    """Returns the feed-forward network with its norms, added to `x`."""
    before, normed = _norm_before("norm2", x, shapes)
    fed = _feed_forward(normed, shapes)
    behind, added = _norm_behind("post_norm2", fed[-1].outputs[0], shapes)
    return (*before, *fed, *behind, shapes.residual("residual2", (x, added), out))


def _parallel(x: Tensor, shapes: Shapes) -> Part:
    """Returns both parts of the same input, added to it at once (GPT-NeoX, Falcon)."""
    norm1, normed1 = _norm_before("norm1", x, shapes)
    norm2: Part = ()
    normed2 = normed1
    if shapes.model.norm_layout is not NormLayout.SHARED:
        norm2, normed2 = _norm_before("norm2", x, shapes)
    mixed, fed = _mixer(normed1, shapes), _feed_forward(normed2, shapes)
    summands = (x, mixed[-1].outputs[0], fed[-1].outputs[0])
    out = shapes.tokens("block_output", shapes.hidden)
    return (*norm1, *mixed, *norm2, *fed, shapes.residual("residual2", summands, out))


def _mixer(x: Tensor, shapes: Shapes) -> Part:
    if shapes.block.mixer is Mixer.STATE_SPACE:
        return state_space_operators(x, shapes)
    if shapes.block.mixer is Mixer.DELTA_RULE:
        return delta_rule_operators(x, shapes)
    return attention_operators(x, shapes)


def _feed_forward(x: Tensor, shapes: Shapes) -> Part:
    if shapes.model.num_experts and shapes.block.experts:
        return expert_operators(x, shapes)
    return feed_forward_operators(x, shapes)


def _norm_before(name: str, x: Tensor, shapes: Shapes) -> tuple[Part, Tensor]:
    """Returns the norm before a part, if there is one, and the part's input."""
    if shapes.model.norm_layout is NormLayout.POST:
        return (), x
    normed = shapes.tokens(name, shapes.hidden)
    return (shapes.norm(name, x, normed),), normed


def _norm_behind(name: str, x: Tensor, shapes: Shapes) -> tuple[Part, Tensor]:
    """Returns the norm behind a part, if there is one, and the summand of the residual."""
    if shapes.model.norm_layout not in (NormLayout.POST, NormLayout.BOTH):
        return (), x
    normed = shapes.tokens(name, shapes.hidden)
    return (shapes.norm(name, x, normed),), normed
