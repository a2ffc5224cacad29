"""What is on a device besides the blocks' chunks, moment by moment: outside layers' states,
activations and temporaries (EQUATIONS M6).

Its peak is R of EQUATIONS O3; that chunks may use what it leaves at every moment is EQUATIONS O7.

The classes are those of `parplan.costmodels.memory.rank_memory.rank_memory`, each when it is there:

    states of embedding and head        always, their gradients from the first backward pass on
    where the stack frees them
    what FSDP2 gathers and reduces      of embedding and head, in their passes; a unit that begins
    and ends the passes stays gathered activations of a micro-batch        of each layer from its
    forward pass to its backward pass
    workspace of a layer                in its passes, in the backward pass with what it recomputes
    gradients of a block                as autograd makes them, in the precision of compute, in its
                                        backward pass, until chunks have them
    ids and targets                     of all micro-batches, always; norms and the loss keep a few
                                        numbers of every token besides
    between two layers                  what the first hands to the second
    what a stage sent                   to the end of the step, where the stack keeps it; the logits
                                        of a pipeline to their backward pass
    gradient of a shared token table    from the head's backward pass to the embedding's
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from parplan.costmodels.chunks.accesses import LayerPass
from parplan.costmodels.layers.layer_price_cache import ActivationBytes
from parplan.costmodels.layers.model_states import StateBytes, owned_parameters
from parplan.costmodels.memory.rank_memory import rank_activations, rank_layers, stashes
from parplan.costmodels.operators.sharding import Sharding
from parplan.costmodels.price_cache import PriceCache
from parplan.costmodels.strategy import LayerChoice, ParallelLayout, Strategy
from parplan.profiles.models.operator_graph import LayerKind, OperatorKind

# FSDP2 keeps the gradients of fp32 shards in fp32, and reduces them so: gradients of 16 bits are of
# chunks
SHARD_GRADIENT_BYTES = 4
IDS_BYTES = 16  # of a token: its id and its target, as int64
# messages received: the gradient that a backward pass began with, and one for the next pass
# (executor/pipeline/messages.py)
POSTED = 2
RANDOM_STATE_BYTES = (
    5056  # of torch.get_rng_state, a CPU tensor that torch's checkpoint keeps for every pass
)
NORM_BYTES = 8  # of a token: mean and deviation in fp32
LOSS_KEPT_BYTES, LOSS_MADE_BYTES = (
    16,
    24,
)  # of a token: where its target is; its largest logit, its sum (executor/models/loss.py)


@dataclass(frozen=True, slots=True, kw_only=True)
class NonChunkBytes:
    """Bytes on a device besides chunks.

    moments: during each; gaps: before each and behind the last, at their fullest, with the passes
    of embedding and head
    rests: behind each moment, when its temporaries are gone; made: the gradients that are there
    then, until chunks have them
    end: behind all passes
    """

    moments: tuple[int, ...]
    gaps: tuple[int, ...]
    rests: tuple[int, ...]
    made: tuple[int, ...]
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """Bytes of one layer.

    saved: kept of a micro-batch; forward, backward: temporary in its passes; made: gradients at the
    end of a block's backward pass
    lasting: from its backward pass to the end of the stage's; gradients: from its first backward
    pass on
    """

    saved: int
    forward: int
    backward: int
    made: int = 0
    lasting: int = 0
    gradients: int = 0


def besides_chunks(
    strategy: Strategy, rank: int, passes: Iterable[LayerPass], price_cache: PriceCache
) -> NonChunkBytes:
    """What is on a device of pipeline rank `rank` besides the chunks of its blocks."""
    layers = {
        choice: _layer(choice, size, strategy, price_cache)
        for choice, size in rank_activations(strategy, rank, price_cache).items()
    }
    sent = price_cache.sent_bytes(strategy.layout.micro_batch_size, strategy.layout.sharding)
    handed = _handed_bytes(strategy, price_cache)
    moments, gaps, rests, made, begun = (
        list[int](),
        list[int](),
        list[int](),
        list[int](),
        set[LayerChoice](),
    )
    level = fullest = _always(strategy, rank, price_cache) - sum(
        layer.gradients for layer in layers.values()
    )
    lasting, before = 0, None
    for one in passes:
        own = layers[one.layer]
        if before is not None and not one.same_action(before):
            level += sent * _sends(before, strategy) - lasting
            lasting, fullest = 0, max(fullest, level + handed)
        before = one
        if one.backward:
            during = level + own.backward
            level += own.lasting - own.saved + (0 if one.layer in begun else own.gradients)
            lasting += own.lasting
            begun.add(one.layer)
        else:
            level += own.saved
            during = level + own.forward
        if one.block is None:
            fullest = max(fullest, during)
            continue
        moments.append(during)
        made.append(own.made if one.backward else 0)
        gaps.append(fullest)
        fullest = level + handed
        rests.append(fullest)
    return NonChunkBytes(
        moments=tuple(moments),
        gaps=(*gaps, max(fullest, level)),
        rests=tuple(rests),
        made=tuple(made),
        end=level,
    )


def _sends(one: LayerPass, strategy: Strategy) -> bool:
    """Whether a stage hands on what a pass of it made: activations to the next, gradients to the
    one before.
    """
    return one.stage > 0 if one.backward else one.stage < strategy.layout.num_virtual_stages - 1


def _handed_bytes(strategy: Strategy, price_cache: PriceCache) -> int:
    """The activation between two layers, or its gradient."""
    boundary, sharding = (
        price_cache.graph(strategy.layout.micro_batch_size).block.input,
        strategy.layout.sharding,
    )
    assert boundary is not None, "a block reads what the layer before it made"
    return sharding.local_bytes(boundary, sharding.boundary)


def _layer(
    choice: LayerChoice, size: ActivationBytes, strategy: Strategy, price_cache: PriceCache
) -> _Layer:
    layout, training = strategy.layout, price_cache.training
    tokens = layout.micro_batch_size * training.seq_length
    norms = {
        operator.name
        for operator in price_cache.layer(choice.kind, 1).operators
        if operator.kind is OperatorKind.NORM
    }
    kept = (
        NORM_BYTES
        * tokens
        * len(norms.difference(price_cache.recompute_operators(choice.kind, choice.recompute)))
    )
    made = size.workspace + NORM_BYTES * tokens * len(norms)
    if choice.kind is LayerKind.BLOCK:
        gradients = _parameter_bytes(
            choice, strategy, price_cache
        )  # the workspace has those of one operator again: more than there is
        return _Layer(
            saved=size.saved + kept + _random_bytes(choice, price_cache),
            forward=made,
            backward=made + gradients,
            made=gradients,
        )
    shared, of_loss = (
        price_cache.shared_table_bytes(layout.mesh, layout.sharding),
        tokens * (choice.kind is LayerKind.HEAD),
    )
    freed = training.stack.frees_gradients and not price_cache.offloads_states
    made += LOSS_MADE_BYTES * of_loss
    if of_loss:
        kept += LOSS_KEPT_BYTES * tokens + _logits_bytes(
            layout, layout.sharding_of(choice), price_cache
        )
    plain = _Layer(
        saved=size.saved + kept,
        forward=made,
        backward=made,
        lasting=shared if of_loss else 0,
        gradients=_states(choice, strategy, price_cache).gradients if freed else 0,
    )
    if price_cache.offloads_states:
        buffer = price_cache.states(
            choice.kind, layout.mesh, layout.sharding_of(choice), choice.zero
        ).zero_buffer
        return replace(plain, forward=plain.forward + buffer, backward=plain.backward + buffer)
    return _sharded(plain, choice, strategy, price_cache) if choice.zero == 3 else plain


def _logits_bytes(layout: ParallelLayout, sharding: Sharding, price_cache: PriceCache) -> int:
    """Of a micro-batch in a pipeline, which keeps what its last stage gives as it keeps what others
    send: to the backward pass.
    """
    if layout.mesh.pp == 1 or not price_cache.training.stack.keeps_sent:
        return 0
    loss = price_cache.layer(LayerKind.HEAD, layout.micro_batch_size).operators[-1]
    return sharding.tensor_bytes(loss, loss.inputs[0])


def _random_bytes(choice: LayerChoice, price_cache: PriceCache) -> int:
    """The state of the random numbers that a block is recomputed with, which on GPUs the host
    keeps.
    """
    on_host = price_cache.machine.cluster.device.is_host
    return RANDOM_STATE_BYTES * (
        on_host and bool(price_cache.recompute_operators(choice.kind, choice.recompute))
    )


def _sharded(
    plain: _Layer, choice: LayerChoice, strategy: Strategy, price_cache: PriceCache
) -> _Layer:
    """As FSDP2 runs it: gathered through a buffer as large as the parameters, given up before its
    gradients are copied to be reduced.

    The input of the reduction stays until the stage's backward pass is over. The workspace has the
    gradient of the largest operator.
    """
    whole, layout = _parameter_bytes(choice, strategy, price_cache), strategy.layout
    width = price_cache.training.precision.num_bytes
    copied = whole // width * SHARD_GRADIENT_BYTES
    largest = max(
        layout.sharding_of(choice).parameter_elements(operator)
        for operator in price_cache.layer(choice.kind, 1).operators
    )
    rest = max(0, whole - width * largest)
    gathered = 0 if _joined(choice, strategy, price_cache) else whole
    return replace(
        plain,
        forward=gathered + max(whole, plain.forward),
        backward=max(gathered + max(whole, plain.backward + rest), whole + 2 * copied),
        lasting=plain.lasting + copied,
    )


def _joined(choice: LayerChoice, strategy: Strategy, price_cache: PriceCache) -> bool:
    """Whether embedding and head are one unit of FSDP2, which begins the passes and ends them."""
    return choice.zero == 3 and price_cache.tied and strategy.layout.mesh.pp == 1


def _parameter_bytes(choice: LayerChoice, strategy: Strategy, price_cache: PriceCache) -> int:
    """Of a whole layer on one tensor-parallel rank, in the precision of compute."""
    layout = strategy.layout
    owned = owned_parameters(
        price_cache.layer(choice.kind, 1),
        layout.sharding_of(choice),
        with_tied=price_cache.counts_tied(layout.mesh),
    )
    return price_cache.training.precision.num_bytes * owned


def numbers_bytes(
    layout: ParallelLayout, rank: int, num_blocks: int, price_cache: PriceCache
) -> int:
    """At most what a device of a rank with `num_blocks` blocks holds that a peak without chunks
    leaves out (`rank_memory`): the batch, received messages, logits of a pipeline, and the few
    numbers of every token that norms and the loss keep.
    """
    tokens = layout.micro_batch_size * price_cache.training.seq_length
    norms = sum(
        operator.kind is OperatorKind.NORM
        for operator in price_cache.layer(LayerKind.BLOCK, 1).operators
    )
    random = RANDOM_STATE_BYTES * (price_cache.machine.cluster.device.is_host)
    in_flight = stashes(LayerKind.BLOCK, rank, layout) * -(-num_blocks // layout.virtual_stages) + 1
    found = _batch_bytes(layout, price_cache) + (NORM_BYTES * norms * tokens + random) * in_flight
    if rank == layout.rank_of(layout.num_virtual_stages - 1):
        each = (2 * NORM_BYTES + LOSS_KEPT_BYTES) * tokens + _logits_bytes(
            layout, layout.sharding, price_cache
        )
        found += stashes(LayerKind.HEAD, rank, layout) * each + LOSS_MADE_BYTES * tokens
    return found


def _batch_bytes(layout: ParallelLayout, price_cache: PriceCache) -> int:
    """Ids and targets of a step, and messages that are received."""
    batch = (
        IDS_BYTES
        * price_cache.training.seq_length
        * layout.micro_batch_size
        * layout.num_micro_batches
    )
    return batch + POSTED * price_cache.sent_bytes(layout.micro_batch_size, layout.sharding) * (
        layout.mesh.pp > 1
    )


def _always(strategy: Strategy, rank: int, price_cache: PriceCache) -> int:
    """States of embedding and head, what stays gathered of them, the batch, and messages that are
    received.
    """
    outside = [
        choice for choice in rank_layers(strategy, rank) if choice.kind is not LayerKind.BLOCK
    ]
    held = [_states(choice, strategy, price_cache) for choice in outside]
    return (
        _batch_bytes(strategy.layout, price_cache)
        + sum(states.total for states in held)
        + sum(
            _parameter_bytes(choice, strategy, price_cache)
            for choice in outside
            if _joined(choice, strategy, price_cache)
        )
    )


def _states(choice: LayerChoice, strategy: Strategy, price_cache: PriceCache) -> StateBytes:
    """Of embedding or head, with gradients as FSDP2 keeps them."""
    layout = strategy.layout
    states = price_cache.states(
        choice.kind, layout.mesh, layout.sharding_of(choice), choice.zero
    ).states
    return replace(
        states,
        gradients=states.gradients
        * SHARD_GRADIENT_BYTES
        // price_cache.training.gradient_precision.num_bytes,
    )
