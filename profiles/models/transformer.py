"""ModelSpec -> ModelGraph: the operators of a decoder-only transformer, with a tower if it has one.

The parts are in `profiles/models/parts/`. The saved tensors reproduce, term by term, the activation
memory of Korthikanti et al. 2022, arXiv 2205.05198 (EQUATIONS M3) and the FLOPs of Narayanan et al.
2021, arXiv 2104.04473 (EQUATIONS K4). Left out: the statistics that a norm saves (8 bytes a token),
token ids, and the rotary tables.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import count, groupby

from parplan.profiles.models.blocks import BlockRun, Mixer, kind_names
from parplan.profiles.models.fine_tuned_graph import fine_tuned
from parplan.profiles.models.operator_graph import (
    BlockClass,
    LayerClass,
    LayerKind,
    ModelGraph,
    ModelPart,
    Operator,
    RepeatedLayer,
    layer_class,
)
from parplan.profiles.models.parts.block import block_operators
from parplan.profiles.models.parts.cross_attention import attended
from parplan.profiles.models.parts.ends import embedding_operators, head_operators
from parplan.profiles.models.parts.shapes import Shapes
from parplan.profiles.models.parts.tower import (
    TowerShapes,
    patch_operators,
    projector_operators,
    tower_block_operators,
)
from parplan.profiles.models.spec import ModelSpec, TrainingSpec


def build_graph(
    model: ModelSpec,
    training: TrainingSpec,
    micro_batch_size: int,
    *,
    plain_dropout: bool = False,
    cp: int = 1,
    exchanged: bool = False,
) -> ModelGraph:
    """Returns the operator graph of `model` for micro-batches of `micro_batch_size` sequences.

    A sequence has `training.seq_length` tokens, of which the operators have one of `cp` parts, and
    attention reads the keys of all.
    exchanged: the experts lie over several ranks, of which this is the fullest
    plain_dropout: dropout is no fused kernel, it saves a mask of its input's type; attention that
    drops out saves its scores
    """

    def shapes(block: BlockRun | None = None) -> Shapes:
        return Shapes(
            model, training, micro_batch_size, plain_dropout, block, cp=cp, exchanged=exchanged
        )

    names = block_classes(model)
    outside = frozenset(tensor.name for tensor in (attended(shapes()),) if tensor)
    classes = {
        kind: layer_class(LayerKind.BLOCK, block_operators(shapes(kind)), outside, name)
        for kind, name in names.items()
    }
    blocks = tuple(
        _run(classes[kind], len(list(alike))) for kind, alike in groupby(model.block_kinds)
    )
    graph = ModelGraph(
        name=model.name,
        micro_batch_size=micro_batch_size,
        layers=(
            _run(layer_class(LayerKind.EMBEDDING, embedding_operators(shapes())), 1),
            *_tower_runs(shapes(), len(classes)),
            *blocks,
            _run(layer_class(LayerKind.HEAD, head_operators(shapes(last_kind(model)))), 1),
        ),
    )
    return fine_tuned(graph, training.fine_tuning)


def block_classes(model: ModelSpec) -> dict[BlockRun, BlockClass | None]:
    """Returns the name of each kind of blocks, in the order of the first; None for one alone.

    Kinds of a tower are apart; beside them a kind alone has a name.
    """
    kinds = tuple(dict.fromkeys(model.block_kinds))
    if len(kinds) == 1:
        return {kinds[0]: BlockClass(0, ModelPart.LANGUAGE) if model.tower else None}
    names = kind_names(kinds, experts=bool(model.num_experts))
    return {kind: BlockClass(number, names[number]) for number, kind in enumerate(kinds)}


def has_unlike_blocks(model: ModelSpec, training: TrainingSpec) -> bool:
    """Returns whether the blocks of a model are of several classes, or some of them frozen."""
    tuning = training.fine_tuning
    frozen = 0
    if tuning is not None:
        frozen = sum(tuning.freezes_block(block) for block in range(model.num_layers))
    several = len(block_classes(model)) > 1 or model.tower is not None
    return several or 0 < frozen < model.num_layers


def _tower_runs(text: Shapes, number: int) -> tuple[RepeatedLayer, ...]:
    """Returns the layers of the tower, whose classes are numbered from `number` on."""
    tower = text.model.tower
    if tower is None:
        return ()
    shapes = TowerShapes(text, tower)
    kinds = tuple(dict.fromkeys(tower.block_kinds))
    names = kind_names(kinds, experts=False)
    numbers = count(number)

    def made(operators: tuple[Operator, ...], part: ModelPart, *words: str) -> LayerClass:
        name = "-".join((tower.name, *filter(None, words)))
        block = BlockClass(next(numbers), name)
        return layer_class(LayerKind.BLOCK, operators, block=block, part=part)

    patches = made(patch_operators(shapes), ModelPart.PATCHES, "patches")
    blocks = {
        kind: made(tower_block_operators(TowerShapes(text, tower, kind)), ModelPart.TOWER, name)
        for kind, name in zip(kinds, names, strict=True)
    }
    last = "norm" if tower.attended else "projector"
    projector = made(projector_operators(shapes), ModelPart.PROJECTOR, last)
    return (
        _run(patches, 1),
        *(_run(blocks[kind], len(list(alike))) for kind, alike in groupby(tower.block_kinds)),
        _run(projector, 1),
    )


def all_block_kinds(model: ModelSpec) -> tuple[BlockRun, ...]:
    """Returns the kind of each layer between embedding and head, those of a tower included."""
    tower = model.tower
    of_tower = (BlockRun(), *tower.block_kinds, BlockRun()) if tower else ()
    return (*of_tower, *model.block_kinds)


def last_kind(model: ModelSpec) -> BlockRun:
    """Returns the kind of the blocks of multi-token prediction: attention and what the last has."""
    last = model.block_kinds[-1]
    return replace(last, mixer=Mixer.ATTENTION, feed_forward=True) if model.mtp_layers else last


def _run(layer: LayerClass, count: int) -> RepeatedLayer:
    return RepeatedLayer(layer, count)
