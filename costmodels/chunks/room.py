"""What is on a device besides the blocks' chunks, moment by moment: outside layers' states, activations and temporaries (EQUATIONS M6, O3).

The classes are those of `costmodels.occupancy.rank_memory`, each when it is there:

    states of embedding and head        always; what FSDP2 gathers for them and reduces, in their passes, of an input of a reduction until
                                        the backward pass of the stage is over; a unit that begins and ends the passes stays gathered
    activations of a micro-batch        of each layer from its forward pass to its backward pass
    workspace of a layer                in its passes, in the backward pass with what it recomputes
    gradients of a block                as autograd makes them, in the precision of compute, in its backward pass
    what a stage sent                   to the end of the step, where the stack keeps it
    gradient of a shared token table    from the head's backward pass to the embedding's
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from costmodels.book import ActivationBytes, PriceBook
from costmodels.chunks.accesses import Pass
from costmodels.memory import owned_parameters
from costmodels.occupancy import layer_activations, rank_layers
from costmodels.strategy import LayerChoice, Strategy
from profiles.model import LayerKind

SHARD_GRADIENT_BYTES = 4  # FSDP2 keeps the gradients of fp32 shards in fp32, and reduces them so: gradients of 16 bits are of chunks


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Bytes on a device besides chunks.

    moments: during each; gaps: before each and behind the last, at their fullest, with the passes of embedding and head
    rests: behind each moment, when its temporaries are gone; end: behind all passes
    """

    moments: tuple[int, ...]
    gaps: tuple[int, ...]
    rests: tuple[int, ...]
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """Bytes of one layer: kept of a micro-batch, temporary forward and backward, of its gradient from there to the end of the stage's
    backward pass."""

    saved: int
    forward: int
    backward: int
    lasting: int = 0


def besides_chunks(strategy: Strategy, rank: int, passes: Iterable[Pass], book: PriceBook) -> Room:
    """What is on a device of pipeline rank `rank` besides the chunks of its blocks."""
    layers = {choice: _layer(choice, strategy, book) for choice in dict.fromkeys(rank_layers(strategy, rank))}
    sent = book.sent_bytes(strategy.frame.micro_batch_size, strategy.frame.sharding)
    moments, gaps, rests = list[int](), list[int](), list[int]()
    level = fullest = _always(strategy, rank, book)
    lasting, before = 0, None
    for one in passes:
        own = layers[one.layer]
        if before is not None and not one.same_action(before):
            level += sent * _sends(before, strategy) - lasting
            lasting, fullest = 0, max(fullest, level)
        before = one
        level += 0 if one.backward else own.saved
        during = level + (own.backward if one.backward else own.forward)
        level -= own.saved - own.lasting if one.backward else 0
        lasting += own.lasting if one.backward else 0
        if one.block is None:
            fullest = max(fullest, during)
            continue
        moments.append(during)
        gaps.append(fullest)
        rests.append(level)
        fullest = level
    return Room(moments=tuple(moments), gaps=(*gaps, max(fullest, level)), rests=tuple(rests), end=level)


def _sends(one: Pass, strategy: Strategy) -> bool:
    """Whether a stage hands on what a pass of it made: activations to the next, gradients to the one before."""
    return one.stage > 0 if one.backward else one.stage < strategy.frame.num_virtual_stages - 1


def _outside(strategy: Strategy, rank: int) -> tuple[LayerChoice, ...]:
    return tuple(choice for choice in rank_layers(strategy, rank) if choice.kind is not LayerKind.BLOCK)


def _joined(choice: LayerChoice, strategy: Strategy, book: PriceBook) -> bool:
    """Whether embedding and head are one unit of FSDP2."""
    return choice.kind is not LayerKind.BLOCK and book.tied and strategy.frame.mesh.pp == 1


def _parameter_bytes(choice: LayerChoice, strategy: Strategy, book: PriceBook) -> int:
    """Of a whole layer on one tensor-parallel rank, in the precision of compute."""
    frame = strategy.frame
    owned = owned_parameters(book.layer(choice.kind, 1), frame.sharding_of(choice), with_tied=book.counts_tied(frame.mesh))
    return book.training.precision.num_bytes * owned


def _always(strategy: Strategy, rank: int, book: PriceBook) -> int:
    """Outside states, and what of them stays gathered because its unit begins the passes and ends them."""
    frame, outside = strategy.frame, _outside(strategy, rank)
    held = [book.states(choice.kind, frame.mesh, frame.sharding_of(choice), choice.zero).states for choice in outside]
    wider = SHARD_GRADIENT_BYTES / book.training.gradient_precision.num_bytes - 1
    return sum(states.total + int(wider * states.gradients) for states in held) + sum(
        _parameter_bytes(choice, strategy, book) for choice in outside if choice.zero == 3 and _joined(choice, strategy, book))


def _layer(choice: LayerChoice, strategy: Strategy, book: PriceBook) -> _Layer:
    frame = strategy.frame
    size: ActivationBytes = layer_activations(choice, frame, book)
    whole = _parameter_bytes(choice, strategy, book)
    if choice.kind is LayerKind.BLOCK:
        return _Layer(saved=size.saved, forward=size.workspace, backward=size.workspace + whole)
    elements = whole // book.training.precision.num_bytes
    buffer = book.states(choice.kind, frame.mesh, frame.sharding_of(choice), choice.zero).zero_buffer
    if buffer:
        buffer += (SHARD_GRADIENT_BYTES - book.training.gradient_precision.num_bytes) * elements
    shared = book.shared_table_bytes(frame.mesh, frame.sharding) if choice.kind is LayerKind.HEAD else 0
    lasting = SHARD_GRADIENT_BYTES * elements if choice.zero else 0
    return _Layer(
        saved=size.saved, forward=size.workspace + (2 * whole if choice.zero == 3 else 0), backward=size.workspace + buffer,
        lasting=max(shared, lasting))
