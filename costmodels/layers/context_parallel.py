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
from parplan.costmodels.communication.mesh import place_axis
from parplan.costmodels.operators.compute import OperatorTime
from parplan.costmodels.operators.sharding import Sharding
from parplan.profiles.divisors import divisors
from parplan.profiles.elementwise import Number
from parplan.profiles.machines.shipped_profiles import Machine
from parplan.profiles.models.operator_graph import Operator
from parplan.profiles.provenance import ZERO, Seconds
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


def context_time(
    operator: Operator, sharding: Sharding, alone: OperatorTime, machine: Machine
) -> OperatorTime:
    """Seconds that attention waits for other ranks, forward and backward.

    alone    its compute on this rank
    """
    cp, tp, gpus_per_node = sharding.cp, sharding.tp, machine.cluster.gpus_per_node
    near = ranks_with_heads(sharding.context_form, cp, tp, operator.size("heads"), gpus_per_node)
    assert near is not None, "an illegal form is no candidate"
    kv_bytes = keys_and_values_bytes(operator, sharding)
    forward = backward = ZERO
    if near > 1:
        where = place_axis(near, tp, cp * tp, gpus_per_node)
        copies = max(1, near * tp * operator.unit("heads") // operator.size("heads"))
        queries = operator.size("heads") * operator.size("head_dim")
        read = _bytes_of(queries, operator, sharding) + copies * kv_bytes
        for n_bytes in (read, sharding.tensor_bytes(operator, operator.outputs[0])):
            exchanged = collective_time(Collective.ALL_TO_ALL, n_bytes, where, machine)
            forward, backward = forward + exchanged, backward + exchanged
        kv_bytes = copies * kv_bytes
    if sharding.context_form is ContextForm.ALL_GATHER:
        where = place_axis(cp, tp, cp * tp, gpus_per_node)
        gathered = collective_time(Collective.ALL_GATHER, cp * kv_bytes, where, machine)
        reduced = collective_time(Collective.REDUCE_SCATTER, cp * kv_bytes, where, machine)
        forward, backward = forward + gathered, backward + gathered + reduced
    hops = cp // near - 1
    if hops and sharding.context_form is not ContextForm.ALL_GATHER:
        stride = near * tp
        share = hops / (hops + 1)  # of the compute, after the first piece

        def ring(n_bytes: Number, compute_s: Number) -> Seconds:
            hop = point_to_point_time(
                n_bytes,
                crosses_nodes=cp * tp > gpus_per_node,
                sharing=min(stride, gpus_per_node),
                machine=machine,
            )
            return under(hop.scaled(hops), share * compute_s, machine)

        forward += ring(kv_bytes, alone.forward.value_s)
        backward += ring(2 * kv_bytes, alone.backward.value_s)
    return OperatorTime(machine.corrected("tensor", forward), machine.corrected("tensor", backward))


def keys_and_values_bytes(operator: Operator, sharding: Sharding) -> Number:
    """Bytes of the keys and values of a rank's tokens that its heads read."""
    assert operator.attention is not None
    return _bytes_of(operator.attention.kv_features, operator, sharding)


def _bytes_of(features: int, operator: Operator, sharding: Sharding) -> Number:
    """Bytes on one rank of as many features of a token, divided as the output is."""
    out = operator.outputs[0]
    return sharding.tensor_bytes(operator, out) * features // out.dims[-1].size
