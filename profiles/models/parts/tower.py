"""The tower's layers: its patches, its blocks, and the projector into the language model.

The tower runs behind the token embedding, whose output travels past it, and its last operator puts
the tokens of the images among those of the text. Images are sequences of their own: the batch of
the tower is that of the micro-batch times the images of a sequence. Its blocks are those of
`block_operators` without a causal mask. The feed-forward products of a width that tensor
parallelism does not divide are whole on every rank.

The projector joins patches by a copy. The gradient of the pixels, which no pass needs, is priced
with the product of the patches.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from parplan.profiles.models.blocks import BlockRun
from parplan.profiles.models.functions import Functions
from parplan.profiles.models.operator_graph import (
    Dim,
    Operator,
    Parameter,
    Tensor,
)
from parplan.profiles.models.parts.block import Part, block_operators
from parplan.profiles.models.parts.cross_attention import attended
from parplan.profiles.models.parts.shapes import Shapes, elementwise, linear
from parplan.profiles.models.spec import ModelSpec, Norm, Positions, TrainingSpec
from parplan.profiles.models.towers import CONVOLVED, Tower

FFN = "ffn"


@lru_cache(maxsize=64)
def as_model(tower: Tower) -> ModelSpec:
    """Returns a tower as the model whose blocks it has."""
    return ModelSpec(
        name=tower.name,
        num_layers=tower.num_layers,
        hidden_size=tower.hidden_size,
        num_heads=tower.num_heads,
        num_kv_heads=tower.num_heads,
        head_dim=tower.hidden_size // tower.num_heads,
        ffn_hidden_size=tower.ffn_hidden_size,
        vocab_size=1,
        vocab_multiple=1,
        max_seq_length=tower.tokens,
        norm=Norm.RMS_NORM if tower.rms_norm else Norm.LAYER_NORM,
        positions=Positions.ROTARY if tower.rotary else Positions.NONE,
        gated_ffn=tower.gated_ffn,
        linear_bias=tower.linear_bias,
        qkv_bias=tower.qkv_bias,
        key_bias=tower.key_bias,
        blocks=tower.blocks,
        rope_theta=tower.functions.rope_theta,
        norm_epsilon=tower.functions.norm_epsilon,
        functions=Functions(activation=tower.functions.activation),
    )


class TowerShapes(Shapes):
    """The dims and tensors of a tower, whose sequences are images."""

    causal = False

    def __init__(self, text: Shapes, tower: Tower, block: BlockRun | None = None) -> None:
        self.text, self.tower = text, tower
        training: TrainingSpec = replace(text.training, seq_length=tower.tokens, documents=None)
        batch = text.batch.size * tower.images
        super().__init__(as_model(tower), training, batch, False, block)

    def image(self, name: str, tokens: int, feature: Dim) -> Tensor:
        """Returns a [images, tokens, feature] activation."""
        dims = (self.batch, Dim("sequence", tokens), feature)
        return Tensor(name=name, dims=dims, element_bytes=self.element_bytes)


def patch_operators(shapes: TowerShapes) -> Part:
    """Returns the product of each patch, the trained token, the positions, and the first norm."""
    tower, hidden = shapes.tower, shapes.hidden
    made = list(_patches(shapes))
    patches = made[-1].outputs[0]
    if tower.class_token or tower.position_table:
        positioned = shapes.tokens("positioned", hidden)
        tables = []
        if tower.class_token:
            tables.append(Parameter(name="class_token", dims=(hidden,)))
        if tower.position_table:
            trained = not tower.fixed_positions
            dims = shapes.positions, hidden
            tables.append(Parameter(name="weight", dims=dims, trained=trained))
        whole = ((hidden.name, "its tables are whole on every rank"),)
        added = elementwise("positions", (patches,), positioned, undivided=whole)
        made.append(replace(added, parameters=tuple(tables)))
    if tower.norm_first:
        x = made[-1].outputs[0]
        made.append(shapes.norm("norm", x, shapes.tokens("normed", hidden)))
    return tuple(made)


def _patches(shapes: TowerShapes) -> Part:
    """Returns the products of the frames, if there are any, and of the patches."""
    tower, hidden = shapes.tower, shapes.hidden
    patches = shapes.image("patches", tower.patches, hidden)
    if not tower.frame_features:
        pixels = shapes.image("pixels", tower.patches, Dim("patch", tower.patch_features))
        return (linear("patches", pixels, patches, parallel_dim=None, bias=tower.patch_bias),)
    sound = shapes.image("sound", 2 * tower.patches, Dim("frame", tower.frame_features))
    frames = shapes.image("frames", 2 * tower.patches, hidden)
    heard = replace(frames, name="frames_activation")
    activated = replace(patches, name="patches_activation")
    return (
        _convolution(sound, frames, CONVOLVED * tower.frame_features, tower.patch_bias),
        elementwise(heard.name, (frames,), heard, (frames,)),
        _convolution(heard, patches, tower.patch_features, tower.patch_bias),
        elementwise(activated.name, (patches,), activated, (patches,)),
    )


def _convolution(x: Tensor, out: Tensor, features: int, bias: bool) -> Operator:
    """Returns the convolution that makes each token of `out` from `features` numbers of `x`."""
    convolved = Dim("convolved", features)
    unfolded = replace(out, dims=(*out.dims[:2], convolved))
    neighbours = "its weight is whole, a convolution of neighbouring frames"
    undivided = tuple((dim.name, neighbours) for dim in (out.dims[-1], convolved))
    product = linear(out.name, unfolded, out, parallel_dim=None, bias=bias, undivided=undivided)
    return replace(product, inputs=(x,), saved=(x,))


def tower_block_operators(shapes: TowerShapes) -> Part:
    """Returns the operators of a block of the tower."""
    return tuple(map(_whole_where_uneven, block_operators(shapes)))


def projector_operators(shapes: TowerShapes) -> Part:
    """Returns the last norm, the joining of patches, the products, and their place in the text."""
    tower, hidden = shapes.tower, shapes.hidden
    x = shapes.tokens("block_input", hidden)
    made: list[Operator] = []
    if tower.norm_last:
        made.append(shapes.norm("norm", x, shapes.tokens("normed", hidden)))
    norms = tower.projector_norm or tower.projector_rms_norm
    if norms and not tower.pooled:
        made.append(_projector_norm(made[-1].outputs[0] if made else x, tower.tokens, shapes))
    if tower.merged > 1 or tower.class_token:
        width = hidden.size if tower.pooled else hidden.size * tower.merged
        feature = hidden if tower.pooled else Dim("joined", width)
        joined = shapes.image("joined", tower.image_tokens, feature)
        read = made[-1].outputs[0] if made else x
        whole = ((feature.name, "its features are those of several patches"),)
        made.append(elementwise("joined", (read,), joined, undivided=whole))
    if norms and tower.pooled:
        made.append(_projector_norm(made[-1].outputs[0], tower.image_tokens, shapes))
    if tower.attended:
        states = attended(shapes.text)
        assert states is not None, "the blocks attend to the tower"
        return (replace(made[-1], outputs=(states,)),)
    made += _products(made[-1].outputs[0] if made else x, shapes)
    return (*made, _placed(made[-1].outputs[0], shapes.text))


def _projector_norm(x: Tensor, tokens: int, shapes: TowerShapes) -> Operator:
    out = shapes.image("projector_normed", tokens, shapes.hidden)
    norm = shapes.norm("projector_norm", x, out)
    names = ("weight",) if shapes.tower.projector_rms_norm else ("weight", "bias")
    parameters = tuple(Parameter(name=name, dims=(shapes.hidden,)) for name in names)
    return replace(norm, parameters=parameters)


def _products(x: Tensor, shapes: TowerShapes) -> list[Operator]:
    """Returns the products of the projector, of which two may be divided as those of a block."""
    tower, made = shapes.tower, []
    divided = tower.divided_widths
    for number, product in enumerate(tower.projector):
        reads_divided = number > 0 and divided[number - 1] > 0
        feature = Dim(FFN if divided[number] else f"projected{number}", product.width)
        out = shapes.image(f"projection{number}", tower.image_tokens, feature)
        dim = FFN if divided[number] or reads_divided else None
        made.append(linear(out.name, x, out, parallel_dim=dim, bias=product.bias))
        x = out
        if product.activated:
            x = replace(out, name=f"projection{number}_activation")
            by = FFN if divided[number] else None
            made.append(elementwise(x.name, (out,), x, (out,), parallel_dim=by))
    return [_whole_where_uneven(operator) for operator in made]


def _placed(projected: Tensor, text: Shapes) -> Operator:
    """Returns the operator that puts the tokens of the images among those of the text."""
    embedded = text.tokens("embedded", text.hidden)
    return elementwise(
        "image_tokens",
        (projected, embedded),
        text.tokens("mixed", text.hidden),
        undivided=((text.batch.name, "the places of images are those of all sequences"),),
    )


def _whole_where_uneven(operator: Operator) -> Operator:
    return replace(operator, whole_where_uneven=operator.parallel_dim == FFN)
