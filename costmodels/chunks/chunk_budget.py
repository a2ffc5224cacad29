"""Device bytes outside the blocks' chunks, moment by moment (EQUATIONS M6).

Their peak is R of EQUATIONS O3. Chunks may use the rest of the device at every moment (EQUATIONS
O7). The classes are those of `parplan.costmodels.memory.rank_memory.rank_memory`, each counted
while it is on the device:

    states of embedding and head        always; their gradients from the first backward pass on,
                                        if the stack frees gradients
    FSDP2 buffers of embedding, head    in their passes; a unit that begins and ends the passes
                                        stays gathered
    saved activations of a micro-batch  from a layer's forward pass to its backward pass
    workspace of a layer                in its passes, in the backward pass with its recompute
    gradients of a block                in its backward pass, in the compute precision, until
                                        chunks take them
    ids and targets                     of all micro-batches, always; norms and the loss also save
                                        a few numbers of every token
    output of a layer                   until the next layer has read it
    bytes besides the layers            of a stage of a traced module, from its forward pass to the
                                        end of its backward pass
    sent messages                       to the end of the step, if the stack keeps them; logits in
                                        a pipeline to their backward pass
    gradient of a shared token table    from the head's backward pass to the embedding's
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from parplan.costmodels.chunks.accesses import LayerPass
from parplan.costmodels.host.state_location import Access
from parplan.costmodels.layers.block_parts import parts_of
from parplan.costmodels.layers.layer_price_cache import LayerPriceCache
from parplan.costmodels.layers.layer_times import ActivationBytes
from parplan.costmodels.layers.model_states import StateBytes, owned_parameters
from parplan.costmodels.memory.rank_memory import (
    besides_bytes,
    rank_activations,
    rank_layers,
    stashes,
)
from parplan.costmodels.operators.sharding import Sharding
from parplan.costmodels.strategy import LayerChoice, ParallelLayout, Strategy, in_chunks
from parplan.profiles.models.operator_graph import LayerKey, LayerKind, OperatorKind

# FSDP2 keeps and reduces the gradients of fp32 shards in fp32; only chunks have 16-bit gradients
SHARD_GRADIENT_BYTES = 4
# received messages: the gradient that a backward pass began with, and one for the next pass
# (executor/pipeline/messages.py)
POSTED = 2
# torch.get_rng_state: a CPU tensor that torch's checkpoint saves for every pass
RANDOM_STATE_BYTES = 5056
NORM_BYTES = 8  # per token: mean and deviation in fp32
# per token (executor/models/loss.py): the place of its target; its largest logit and its sum
LOSS_KEPT_BYTES = 16
LOSS_MADE_BYTES = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class NonChunkBytes:
    """Device bytes outside the chunks of blocks.

    moments    during each moment
    gaps       peak before each moment and after the last, including passes of embedding and head
    rests      after each moment, without its temporaries
    made       gradients on the device at that time, until chunks take them
    end        after all passes
    """

    moments: tuple[int, ...]
    gaps: tuple[int, ...]
    rests: tuple[int, ...]
    made: tuple[int, ...]
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """Device bytes of one layer.

    saved        saved tensors of a micro-batch
    forward      temporaries of a forward pass
    backward     temporaries of a backward pass
    made         gradients at the end of a block's backward pass
    lasting      from its backward pass to the end of the stage's backward pass
    gradients    from its first backward pass on
    """

    saved: int
    forward: int
    backward: int
    made: int = 0
    lasting: int = 0
    gradients: int = 0


def non_chunk_bytes(
    strategy: Strategy, rank: int, passes: Iterable[LayerPass], price_cache: LayerPriceCache
) -> NonChunkBytes:
    """Returns the bytes on a device of pipeline rank `rank` outside the chunks of its blocks."""
    layers = {
        choice: _layer(choice, size, strategy, price_cache)
        for choice, size in rank_activations(strategy, rank, price_cache).items()
    }
    handed = handed_bytes(strategy.layout, price_cache)
    beside = _besides_bytes(strategy, rank, price_cache)
    moments = list[int]()
    gaps = list[int]()
    rests = list[int]()
    made = list[int]()
    begun = set[LayerChoice]()
    level = fullest = _always(strategy, rank, price_cache) - sum(
        layer.gradients for layer in layers.values()
    )
    lasting, before = 0, None
    for layer_pass in passes:
        layer = layers[layer_pass.layer]
        if before is None or not layer_pass.same_action(before):
            if before is not None:
                level += _sent_bytes(before, strategy, price_cache) - lasting
                lasting = 0
                if before.backward:
                    level -= beside[before.stage]
                fullest = max(fullest, level + handed)
            if not layer_pass.backward:
                level += beside[layer_pass.stage]
        before = layer_pass
        of_pass = _made(layer_pass, layer.made, price_cache, strategy.layout)
        if layer_pass.backward:
            during = level + layer.backward - layer.made + of_pass
            if layer_pass.access.ends:
                level += (
                    layer.lasting
                    - layer.saved
                    + (0 if layer_pass.layer in begun else layer.gradients)
                )
                lasting += layer.lasting
                begun.add(layer_pass.layer)
        else:
            level += layer.saved if layer_pass.begins else 0
            during = level + layer.forward
        if layer_pass.block is None:
            fullest = max(fullest, during)
            continue
        moments.append(during)
        made.append(of_pass)
        gaps.append(fullest)
        # between the parts of a block its temporaries stay
        fullest = level + (handed if layer_pass.access.ends else max(handed, layer.forward))
        rests.append(fullest)
    return NonChunkBytes(
        moments=tuple(moments),
        gaps=(*gaps, max(fullest, level)),
        rests=tuple(rests),
        made=tuple(made),
        end=level,
    )


def _made(
    layer_pass: LayerPass, made: int, price_cache: LayerPriceCache, layout: ParallelLayout
) -> int:
    """Bytes of the gradients at the end of a pass, of the `made` bytes of the whole layer."""
    if layer_pass.block is None or not layer_pass.makes:
        return 0
    if layout.access is Access.BLOCK:
        return made
    choice = layer_pass.layer
    sharding = layout.sharding_of(choice)
    parts = parts_of(price_cache.layer(choice.kind, 1), layout.access)
    owned = (
        sharding.parameter_elements(operator)
        for part in layer_pass.makes
        for operator in parts[part]
        if operator.parameters
    )
    return price_cache.training.precision.num_bytes * sum(owned)


def _sent_bytes(layer_pass: LayerPass, strategy: Strategy, price_cache: LayerPriceCache) -> int:
    """Bytes that a stage sends to another stage after the action of this pass, and keeps.

    Activations go to the next stage, gradients to the previous one.
    """
    first, end = strategy.layers_of(layer_pass.stage)
    cut = first if layer_pass.backward else end
    return _kept_bytes(cut, strategy.layout, price_cache)


def _kept_bytes(cut: int, layout: ParallelLayout, price_cache: LayerPriceCache) -> int:
    """Bytes of the message across a cut, zero at the ends of the model."""
    if not 0 < cut < price_cache.num_layers:
        return 0
    cut_class = price_cache.cut_class(cut)
    return price_cache.sent_bytes(cut_class, layout.micro_batch_size, layout.sharding)


def _besides_bytes(strategy: Strategy, rank: int, price_cache: LayerPriceCache) -> dict[int, int]:
    """Bytes of a micro-batch that each stage of a rank saves besides its layers."""
    saved = besides_bytes(strategy, rank, price_cache)
    return dict(zip(strategy.layout.stages_of(rank), map(math.ceil, saved), strict=True))


def handed_bytes(layout: ParallelLayout, price_cache: LayerPriceCache) -> int:
    """Most bytes of the activations between two layers, or of their gradients."""
    sharding, b = layout.sharding, layout.micro_batch_size

    def make() -> int:
        cuts = {price_cache.cut_class(cut) for cut in range(1, price_cache.num_layers)}
        return max(
            (
                sum(
                    sharding.local_bytes(tensor, sharding.boundary)
                    for tensor in price_cache.crossing_tensors(cut, b)
                )
                for cut in cuts
            ),
            default=0,
        )

    return price_cache.once(("handed", b, sharding), make)


def _layer(
    choice: LayerChoice, size: ActivationBytes, strategy: Strategy, price_cache: LayerPriceCache
) -> _Layer:
    layout, training = strategy.layout, price_cache.training
    tokens = layout.micro_batch_size * training.seq_length
    norms = _uncounted_norms(choice.kind, price_cache)
    kept = (
        NORM_BYTES
        * tokens
        * len(norms.difference(price_cache.recompute_operators(choice.kind, choice.recompute)))
    )
    made = size.workspace + NORM_BYTES * tokens * len(norms)
    if in_chunks(choice, layout):
        # the workspace counts the gradients of one operator a second time: an upper bound
        gradients = _parameter_bytes(choice, strategy, price_cache)
        return _Layer(
            saved=size.saved + kept + _random_bytes(choice, price_cache),
            forward=made,
            backward=made + gradients,
            made=gradients,
        )
    is_head = choice.kind.role is LayerKind.HEAD
    has_loss = is_head and not price_cache.counts_small_tensors
    freed = training.stack.frees_gradients and not price_cache.offloads_states
    if has_loss:
        made += LOSS_MADE_BYTES * tokens
        kept += LOSS_KEPT_BYTES * tokens + _logits_bytes(
            layout, layout.sharding_of(choice), price_cache
        )
    plain = _Layer(
        saved=size.saved + kept,
        forward=made,
        backward=made,
        lasting=price_cache.shared_table_bytes(layout.mesh, strategy.first_sharding)
        if is_head
        else 0,
        gradients=_states(choice, strategy, price_cache).gradients if freed else 0,
    )
    if price_cache.offloads_states:
        buffer = price_cache.states(
            choice.kind, layout.mesh, layout.sharding_of(choice), choice.zero
        ).zero_buffer
        return replace(plain, forward=plain.forward + buffer, backward=plain.backward + buffer)
    return _sharded(plain, choice, strategy, price_cache) if choice.zero == 3 else plain


def _uncounted_norms(kind: LayerKey, price_cache: LayerPriceCache) -> frozenset[str]:
    """Returns the norms of a layer whose statistics its saved bytes leave out."""
    if price_cache.counts_small_tensors:
        return frozenset()
    return frozenset(
        operator.name
        for operator in price_cache.layer(kind, 1).operators
        if operator.kind is OperatorKind.NORM
    )


def _logits_bytes(layout: ParallelLayout, sharding: Sharding, price_cache: LayerPriceCache) -> int:
    """Bytes of the logits of one micro-batch in a pipeline.

    The last stage keeps them until their backward pass, like any activation that was sent.
    """
    if layout.mesh.pp == 1 or not price_cache.training.stack.keeps_sent:
        return 0
    loss = price_cache.layer(LayerKind.HEAD, layout.micro_batch_size).operators[-1]
    return sharding.tensor_bytes(loss, loss.inputs[0])


def _random_bytes(choice: LayerChoice, price_cache: LayerPriceCache) -> int:
    """Bytes of the random state that a block's recompute restores.

    On GPUs the host keeps that state.
    """
    if not price_cache.machine.cluster.device.is_host:
        return 0
    recomputes = bool(price_cache.recompute_operators(choice.kind, choice.recompute))
    return RANDOM_STATE_BYTES if recomputes else 0


def _sharded(
    plain: _Layer, choice: LayerChoice, strategy: Strategy, price_cache: LayerPriceCache
) -> _Layer:
    """Returns a ZeRO-3 embedding or head as FSDP2 runs it.

    FSDP2 gathers through a buffer as large as the parameters, and frees the parameters before it
    copies their gradients for the reduction. The reduction's input stays until the end of the
    stage's backward pass. The workspace includes the gradient of the largest operator.
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


def _joined(choice: LayerChoice, strategy: Strategy, price_cache: LayerPriceCache) -> bool:
    """True if a layer is one FSDP2 unit with others, which begins and ends the passes."""
    return choice.zero == 3 and price_cache.stays_gathered(choice.kind, strategy.layout.mesh)


def _parameter_bytes(choice: LayerChoice, strategy: Strategy, price_cache: LayerPriceCache) -> int:
    """Bytes of a layer's parameters on one tensor-parallel rank, in the compute precision."""
    layout = strategy.layout
    owned = owned_parameters(
        price_cache.layer(choice.kind, 1),
        layout.sharding_of(choice),
        with_tied=price_cache.counts_tied(layout.mesh),
    )
    return price_cache.training.precision.num_bytes * owned


def uncounted_bytes(
    layout: ParallelLayout, rank: int, num_blocks: int, price_cache: LayerPriceCache
) -> int:
    """Upper bound of the bytes that a peak without chunks leaves out (`rank_memory`).

    On a device of a rank with `num_blocks` blocks these are the batch, received messages, the
    logits of a pipeline, and the few numbers of every token that norms and the loss save.
    """
    tokens = layout.micro_batch_size * price_cache.training.seq_length
    described = not price_cache.counts_small_tensors
    norms = len(_uncounted_norms(LayerKind.BLOCK, price_cache)) if described else 0
    random = RANDOM_STATE_BYTES if price_cache.machine.cluster.device.is_host else 0
    in_flight = stashes(LayerKind.BLOCK, rank, layout) * -(-num_blocks // layout.virtual_stages) + 1
    total = _batch_bytes(layout, price_cache) + (NORM_BYTES * norms * tokens + random) * in_flight
    if described and rank == layout.rank_of(layout.num_virtual_stages - 1):
        head = price_cache.own_sharding(LayerKind.HEAD, layout.sharding)
        logits_bytes = _logits_bytes(layout, head, price_cache)
        each = (2 * NORM_BYTES + LOSS_KEPT_BYTES) * tokens + logits_bytes
        total += stashes(LayerKind.HEAD, rank, layout) * each + LOSS_MADE_BYTES * tokens
    return total


def _batch_bytes(layout: ParallelLayout, price_cache: LayerPriceCache) -> int:
    """Bytes of the batch of a step, and of received messages, the largest of all cuts."""
    batch = price_cache.batch_bytes * layout.micro_batch_size * layout.num_micro_batches
    if layout.mesh.pp == 1:
        return batch
    received = price_cache.once(
        ("received", layout.micro_batch_size, layout.sharding),
        lambda: max(
            _kept_bytes(cut, layout, price_cache) for cut in range(1, price_cache.num_layers)
        ),
    )
    return batch + POSTED * received


def _always(strategy: Strategy, rank: int, price_cache: LayerPriceCache) -> int:
    """Bytes that stay all step: states of embedding and head, the batch, received messages."""
    outside = [
        choice for choice in rank_layers(strategy, rank) if not in_chunks(choice, strategy.layout)
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


def _states(choice: LayerChoice, strategy: Strategy, price_cache: LayerPriceCache) -> StateBytes:
    """States of embedding or head, with fp32 gradients as FSDP2 has them."""
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
