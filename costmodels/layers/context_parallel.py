"""Attention over sequences that context-parallel ranks divide: what it sends (EQUATIONS T5).

Each of cp ranks has two pieces of a sequence, piece i and piece 2 cp - 1 - i of 2 cp, so that a
causal mask leaves every rank the same work (zigzag, Llama 3, arXiv 2407.21783, section 3.3.2). With
n bytes of keys and values on a rank, micro-batch and block:

    ring         forward (cp - 1) messages of n, backward twice as many (with the gradients); each
                 runs under the attention with the piece that came before it
    all-gather   forward one gather to cp n; backward the gather again and a reduce-scatter
    all-to-all   forward one exchange of queries, keys and values and one of the output, backward
                 one of the output with its gradient and one of the other gradients
    two-level    the exchanges of all-to-all over a neighbours, and a ring over the cp / a groups

The heads are what all-to-all divides. Ranks beyond the heads of keys and values hold copies of
them. Where a token reads no further than a window, or the longest document, some stacks send a
piece to those ranks alone that read it, in place of a ring or a gather: forward once, backward
again and with its gradients. Ranks wait for the one with the longest documents
(costmodels/layers/document_waits.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from parplan.costmodels.communication.collectives import (
    Collective,
    collective_time,
    point_to_point_time,
)
from parplan.costmodels.communication.hiding import under
from parplan.costmodels.communication.mesh import Mesh, place_axis
from parplan.costmodels.layers.document_waits import context_share, wait_of
from parplan.costmodels.layers.sequence_pieces import most_read_from_others
from parplan.costmodels.operators.compute import OperatorTime
from parplan.costmodels.operators.sharding import Sharding
from parplan.profiles.divisors import divisors
from parplan.profiles.elementwise import Number, anywhere
from parplan.profiles.machines.hardware import Cluster
from parplan.profiles.machines.shipped_profiles import Machine
from parplan.profiles.models.operator_graph import Operator
from parplan.profiles.models.spec import ModelSpec
from parplan.profiles.provenance import ZERO, Seconds
from parplan.profiles.stack import ContextForm, Stack


def ranks_with_heads(
    form: ContextForm | None, cp: int, tp: int, heads: int, gpus_per_node: int
) -> int | None:
    """Returns the neighbours among `cp` ranks that exchange tokens for heads, None if illegal.

    heads    attention heads of the model, of which each of `tp` ranks has its part

    Two levels take the most neighbours of a node that divide its heads, but not all of the ranks.
    """
    if form in (None, ContextForm.RING, ContextForm.ALL_GATHER):
        return 1
    local = heads // tp
    if form is ContextForm.ALL_TO_ALL:
        return cp if local % cp == 0 else None
    near = [a for a in divisors(cp)[1:-1] if local % a == 0 and a * tp <= gpus_per_node]
    return max(near, default=None)


def illegal_context(mesh: Mesh, model: ModelSpec, cluster: Cluster) -> str | None:
    """Returns why the ranks of a mesh cannot divide the sequences in its form, or None."""
    heads, gpus_per_node = model.num_heads, cluster.gpus_per_node
    near = ranks_with_heads(mesh.context_form, mesh.cp, mesh.tp, heads, gpus_per_node)
    kv_heads = max(1, model.num_kv_heads // mesh.tp)
    if mesh.cp == 1:
        return None
    if model.tower is not None:
        return f"context parallelism does not divide the images of the {model.tower.name} tower"
    if near is None and mesh.context_form is ContextForm.ALL_TO_ALL:
        return f"cp {mesh.cp} does not divide the {heads // mesh.tp} heads of a rank"
    if near is None:
        return f"cp {mesh.cp} has no part inside a node that divides the {heads // mesh.tp} heads"
    if kv_heads % near and near % kv_heads:
        return f"{near} ranks cannot have equal parts of the {kv_heads} heads of keys of a rank"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextCall:
    """Equal calls of attention in one pass of a micro-batch.

    kind       None for messages round a ring
    ranks      ranks of the collective, or of the ring
    chosen     an exchange in which a rank sends to those ranks alone that read it; `num_bytes` are
               those of the rank that receives the most
    """

    kind: Collective | None
    ranks: int
    num_bytes: Number
    calls: int = 1
    chosen: bool = False


def context_calls(
    operator: Operator, sharding: Sharding, gpus_per_node: int, stack: Stack
) -> tuple[tuple[ContextCall, ...], tuple[ContextCall, ...]]:
    """Returns what attention sends to other context-parallel ranks, forward and backward."""
    heads, cp = operator.size("heads"), sharding.cp
    near = ranks_with_heads(sharding.context_form, cp, sharding.tp, heads, gpus_per_node)
    assert near is not None, "an illegal form is no candidate"
    kv_bytes = keys_and_values_bytes(operator, sharding)
    exchanged: tuple[ContextCall, ...] = ()
    back: tuple[ContextCall, ...] = ()
    if near > 1:
        kv_bytes *= max(1, near * sharding.tp * operator.unit("heads") // heads)
        queries = _bytes_of(heads * operator.size("head_dim"), operator, sharding)
        made = sharding.tensor_bytes(operator, operator.outputs[0])
        read, given, asked = (
            ContextCall(kind=Collective.ALL_TO_ALL, ranks=near, num_bytes=num_bytes)
            for num_bytes in (queries + kv_bytes, made, 2 * made)
        )
        exchanged, back = (read, given), (asked, read)
    ring = cp // near
    read_bytes = _read_bytes(operator, kv_bytes, ring) if stack.sends_within_windows else None
    if ring > 1 and read_bytes is not None:
        sent = ContextCall(
            kind=Collective.ALL_TO_ALL, ranks=ring, num_bytes=read_bytes, chosen=True
        )
        return (*exchanged, sent), (*back, replace(sent, calls=2))
    if sharding.context_form is ContextForm.ALL_GATHER:
        gather, reduce = (
            ContextCall(kind=kind, ranks=cp, num_bytes=cp * kv_bytes)
            for kind in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER)
        )
        return (gather,), (gather, reduce)
    if ring == 1:
        return exchanged, back
    forward = ContextCall(kind=None, ranks=ring, num_bytes=kv_bytes, calls=ring - 1)
    return (*exchanged, forward), (*back, replace(forward, calls=2 * (ring - 1)))


def _read_bytes(operator: Operator, kv_bytes: Number, ring: int) -> Number | None:
    """Bytes of keys and values that a rank reads of others, None where it reads all of them."""
    attention, sequence = operator.attention, operator.size("keys")
    assert attention is not None
    if ring == 1 or not 0 < attention.reach < sequence:
        return None
    num_pieces = most_read_from_others(ring, max(1, sequence // (2 * ring)), attention.reach)
    return kv_bytes * num_pieces // 2


def context_time(
    operator: Operator, sharding: Sharding, alone: OperatorTime, machine: Machine, stack: Stack
) -> OperatorTime:
    """Seconds that attention waits for other ranks, forward and backward.

    alone    its compute on this rank
    """
    calls = context_calls(operator, sharding, machine.cluster.gpus_per_node, stack)
    forward, backward = (
        machine.corrected("tensor", _waited(of_pass, compute, sharding, machine))
        for of_pass, compute in zip(calls, (alone.forward, alone.backward), strict=True)
    )
    sent = OperatorTime(forward, backward)
    share = _document_share(operator, sharding, machine.cluster.gpus_per_node, stack)
    return sent.plus(wait_of(alone, share)) if anywhere(share) else sent


def _document_share(
    operator: Operator, sharding: Sharding, gpus_per_node: int, stack: Stack
) -> Number:
    """Returns the share by which attention of the fullest rank of a sequence exceeds the mean."""
    if stack.divides_documents:
        return 0.0
    heads, cp = operator.size("heads"), sharding.cp
    near = ranks_with_heads(sharding.context_form, cp, sharding.tp, heads, gpus_per_node)
    return context_share(operator, cp // (near or 1))


def _waited(
    calls: Iterable[ContextCall], compute: Seconds, sharding: Sharding, machine: Machine
) -> Seconds:
    """Seconds of the calls of one pass; messages run beside the attention of what came before."""
    num_ranks, unit_gpus = sharding.cp * sharding.tp, machine.cluster.unit_gpus
    total = ZERO
    for call in calls:
        if call.kind is not None and not call.chosen:
            where = place_axis(call.ranks, sharding.tp, num_ranks, unit_gpus[0])
            total += collective_time(call.kind, call.num_bytes, where, machine)
            continue
        hop = point_to_point_time(
            call.num_bytes,
            level=sum(num_ranks > gpus for gpus in unit_gpus),
            sharing=num_ranks // call.ranks,
            machine=machine,
        )
        before_last = compute.value_s * (call.ranks - 1) / call.ranks
        total += under(hop.scaled(call.calls), before_last, machine)
    return total


def keys_and_values_bytes(operator: Operator, sharding: Sharding) -> Number:
    """Bytes of the keys and values of a rank's tokens that its heads read."""
    assert operator.attention is not None
    return _bytes_of(operator.attention.kv_features, operator, sharding)


def _bytes_of(features: int, operator: Operator, sharding: Sharding) -> Number:
    """Bytes on one rank of as many features of a token, divided as the output is."""
    out = operator.outputs[0]
    return sharding.tensor_bytes(operator, out) * features // out.dims[-1].size
