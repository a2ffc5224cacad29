"""The tensors that travel from layer to layer of a model, as a stack whose last one is on top.

A layer takes the top one and puts its output there. The patches of a tower take none of them: the
output of the embedding lies under the tensor of the tower until the projector takes both. Where
blocks attend to a tower, its output goes to the bottom and stays there. A cut of the pipeline sends
the stack.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor, nn

from parplan.executor.data.seen_images import IMAGE_PLACES, PIXELS
from parplan.executor.sharding.overlap import HalvedOutput
from parplan.profiles.models.operator_graph import LayerKind, ModelPart, layer_kind
from parplan.profiles.models.spec import ModelSpec, TrainingSpec
from parplan.profiles.models.transformer import build_graph

PLACES = "places"  # of tokens in their documents
TARGETS = "targets"  # the tokens behind each, which a head with modules ahead reads
Inputs = Mapping[
    str, Tensor
]  # beside token ids, those of images too; the first dim is of sequences


def layer_name(index: int, num_blocks: int) -> str:
    """Returns the name of a layer by its number, which is 0 for the embedding."""
    kind = layer_kind(index, num_blocks)
    return f"block{index - 1}" if kind is LayerKind.BLOCK else kind.value


def parts_by_name(model: ModelSpec, training: TrainingSpec) -> dict[str, ModelPart]:
    """Returns the part of the model that each layer is of."""
    graph = build_graph(model, training, 1)
    return {
        layer_name(index, model.num_blocks): graph.layer_class(graph.key(index)).part
        for index in range(model.num_blocks + 2)
    }


def run_layers(
    layers: Iterable[tuple[str, nn.Module]],
    parts: Mapping[str, ModelPart],
    stack: list[Tensor],
    inputs: Inputs,
    *,
    attended: bool = False,
) -> list[Tensor]:
    """Runs layers in their order and returns the stack behind them, which is `stack`.

    stack      that before them; the first is token ids before the embedding
    attended   the blocks of the language model attend to the output of the tower
    """
    for name, layer in layers:
        out = layer(*_read(name, parts[name], stack, inputs, attended=attended))
        at = 0 if attended and parts[name] is ModelPart.PROJECTOR else len(stack)
        stack.insert(at, out)
    return stack


def _read(
    name: str, part: ModelPart, stack: list[Tensor], inputs: Inputs, *, attended: bool
) -> tuple[Tensor, ...]:
    """Takes what a layer reads from the stack, at whose bottom an attended tensor stays."""
    if part is ModelPart.PATCHES:
        return (inputs[PIXELS],)
    x = stack.pop()
    if part is ModelPart.TOWER or (attended and part is ModelPart.PROJECTOR):
        return (x,)
    if part is ModelPart.PROJECTOR:
        return x, stack.pop(), inputs[IMAGE_PLACES]
    read = x.inputs() if isinstance(x, HalvedOutput) else (x,)
    if attended and stack and name != LayerKind.HEAD:
        return (*read, stack[0])
    packed = (inputs[PLACES],) if PLACES in inputs else ()
    in_head = (inputs[TARGETS],) if name == LayerKind.HEAD and TARGETS in inputs else ()
    return (*read, *packed, *in_head)
