"""Attention over sequences that context-parallel ranks divide: what it sends (EQUATIONS T5).

Each of cp ranks has two pieces of a sequence, piece i and piece 2 cp - 1 - i of 2 cp, so that a
causal mask leaves every rank the same work (zigzag, Llama 3, arXiv 2407.21783, section 3.3.2). With
n bytes of keys and values on a rank, micro-batch and block:

    ring         forward (cp - 1) messages of n, backward as many of 2 n (with the gradients); each
                 runs under the attention with the piece that came before it
    all-gather   forward one gather to cp n; backward the gather again and a reduce-scatter
    all-to-all   forward one exchange of queries, keys and values and one of the output, backward
                 the same
    two-level    the exchanges of all-to-all over a neighbours, and a ring over the cp / a groups

The heads are what all-to-all divides. Ranks beyond the heads of keys and values hold copies of
them.
"""

from __future__ import annotations

from parplan.costmodels.communication.collectives import (
    Collective,
    collective_time,
    point_to_point_time,
)
from parplan.costmodels.communication.hiding import under
from parplan.costmodels.communication.mesh import Mesh, Placement, place_axis
from parplan.costmodels.operators.compute import FREE, OperatorTime
from parplan.costmodels.operators.sharding import Sharding
from parplan.profiles.divisors import divisors
from parplan.profiles.elementwise import Number
from parplan.profiles.machines.hardware import Cluster
from parplan.profiles.machines.shipped_profiles import Machine
from parplan.profiles.models.operator_graph import Operator
from parplan.profiles.models.spec import ModelSpec
from parplan.profiles.provenance import Seconds
from parplan.profiles.stack import ContextForm


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
    if mesh.cp == 1 or near is not None:
        return None
    if mesh.context_form is ContextForm.ALL_TO_ALL:
        return f"cp {mesh.cp} does not divide the {heads // mesh.tp} heads of a rank"
    return f"cp {mesh.cp} has no part inside a node that divides the {heads // mesh.tp} heads"


def context_time(
    operator: Operator, sharding: Sharding, alone: OperatorTime, machine: Machine
) -> OperatorTime:
    """Seconds that attention waits for other ranks, forward and backward.

    alone    its compute on this rank
    """
    heads, gpus_per_node = operator.size("heads"), machine.cluster.gpus_per_node
    near = ranks_with_heads(sharding.context_form, sharding.cp, sharding.tp, heads, gpus_per_node)
    assert near is not None, "an illegal form is no candidate"
    kv_bytes = keys_and_values_bytes(operator, sharding)
    sent = FREE
    if near > 1:
        kv_bytes *= max(1, near * sharding.tp * operator.unit("heads") // heads)
        sent = _exchanged(operator, sharding, near, kv_bytes, machine)
    if sharding.context_form is ContextForm.ALL_GATHER:
        sent = sent.plus(_gathered(sharding, kv_bytes, machine))
    elif near < sharding.cp:
        sent = sent.plus(_passed_round(sharding, near, kv_bytes, alone, machine))
    return OperatorTime(
        machine.corrected("tensor", sent.forward), machine.corrected("tensor", sent.backward)
    )


def _exchanged(
    operator: Operator, sharding: Sharding, near: int, kv_bytes: Number, machine: Machine
) -> OperatorTime:
    """The exchanges of queries, keys and values, and of the output, among `near` neighbours."""
    where = _place(near, sharding, machine)
    queries = operator.size("heads") * operator.size("head_dim")
    read_bytes = _bytes_of(queries, operator, sharding) + kv_bytes
    made_bytes = sharding.tensor_bytes(operator, operator.outputs[0])
    both = collective_time(Collective.ALL_TO_ALL, read_bytes, where, machine) + collective_time(
        Collective.ALL_TO_ALL, made_bytes, where, machine
    )
    return OperatorTime(both, both)


def _gathered(sharding: Sharding, kv_bytes: Number, machine: Machine) -> OperatorTime:
    """The gathers of keys and values, and the reduce-scatter of their gradients."""
    where, whole_bytes = _place(sharding.cp, sharding, machine), sharding.cp * kv_bytes
    gathered = collective_time(Collective.ALL_GATHER, whole_bytes, where, machine)
    reduced = collective_time(Collective.REDUCE_SCATTER, whole_bytes, where, machine)
    return OperatorTime(gathered, gathered + reduced)


def _passed_round(
    sharding: Sharding, near: int, kv_bytes: Number, alone: OperatorTime, machine: Machine
) -> OperatorTime:
    """The messages of a ring over groups of `near` ranks, beside the attention of the others."""
    gpus_per_node, groups = machine.cluster.gpus_per_node, sharding.cp // near

    def hops(n_bytes: Number, compute: Seconds) -> Seconds:
        hop = point_to_point_time(
            n_bytes,
            crosses_nodes=sharding.cp * sharding.tp > gpus_per_node,
            sharing=min(near * sharding.tp, gpus_per_node),
            machine=machine,
        )
        before_last = compute.value_s * (groups - 1) / groups
        return under(hop.scaled(groups - 1), before_last, machine)

    return OperatorTime(hops(kv_bytes, alone.forward), hops(2 * kv_bytes, alone.backward))


def _place(ranks: int, sharding: Sharding, machine: Machine) -> Placement:
    num_ranks = sharding.cp * sharding.tp
    return place_axis(ranks, sharding.tp, num_ranks, machine.cluster.gpus_per_node)


def keys_and_values_bytes(operator: Operator, sharding: Sharding) -> Number:
    """Bytes of the keys and values of a rank's tokens that its heads read."""
    assert operator.attention is not None
    return _bytes_of(operator.attention.kv_features, operator, sharding)


def _bytes_of(features: int, operator: Operator, sharding: Sharding) -> Number:
    """Bytes on one rank of as many features of a token, divided as the output is."""
    out = operator.outputs[0]
    return sharding.tensor_bytes(operator, out) * features // out.dims[-1].size
