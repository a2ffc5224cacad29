"""The token table on the host (`Offload.LOOKUP`, EQUATIONS O11).

Rows cross PCIe instead of the table, which never comes to a device.

Each of D data-parallel ranks has h / D columns of the table, of all V rows, in fp32 with their
gradient and Adam's moments: 16 V h / D bytes of its host. In a micro-batch of n = b S tokens a rank

    forward     gathers the tokens of all ranks (8 D n bytes), looks up its columns of them on the
                host, copies n h elements to the device and exchanges them, so that it has all
                columns of its own tokens
    backward    exchanges the gradients, copies n h elements to the host and adds them to the rows
                of its columns

in the precision of compute. Adam updates all rows once a step. Nothing of it is hidden: the next
pass needs it, and the host is the process that launches kernels. The price of a look-up is that of
its bytes. Left out: the scattered rows in memory, and the zeros that the gradients start from.
[derived]

A table that the head shares is needed whole on the device, since the head multiplies by it. Its
states alone are on the host then, as those of a layer are with `Offload.STATES` (EQUATIONS O9):
`PriceCache.groups` makes it a group of its own. The device has a copy in the compute precision and
the gradient, of the rows of its tensor-parallel rank, and ZeRO divides both as it does elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass

from parplan.costmodels.communication.collectives import Collective, collective_time
from parplan.costmodels.communication.mesh import Axis, Mesh, place
from parplan.costmodels.host.offload import HOST_STATE_BYTES, copy_time, host_adam_time, host_time
from parplan.profiles.machines.shipped_profiles import Machine
from parplan.profiles.models.operator_graph import (
    LayerClass,
    Operator,
    OperatorKind,
    Parameter,
    layer_class,
)
from parplan.profiles.provenance import ZERO, Seconds

FP32_BYTES = 4
TOKEN_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class HostEmbedding:
    """Cost of the host's token table for one rank.

    host_bytes  bytes of the rank's host
    elements    elements that a micro-batch moves each way
    num_tokens  tokens of a micro-batch
    forward, backward  look-up, or sums, and the copy
    exchange    all-to-all of either pass
    tokens      gather of tokens in the forward pass
    update      Adam of one step
    """

    host_bytes: int
    elements: int
    num_tokens: int
    forward: Seconds
    backward: Seconds
    exchange: Seconds
    tokens: Seconds
    update: Seconds


def table_of(embedding: LayerClass) -> tuple[Operator, Parameter]:
    """Returns the operator that looks tokens up, and its table."""
    operator = next(op for op in embedding.operators if op.kind is OperatorKind.EMBEDDING)
    return operator, operator.parameters[0]


def without_table(embedding: LayerClass) -> LayerClass:
    """Returns the part of an embedding on the device: its output comes from the host."""
    operator = table_of(embedding)[0]
    left = Operator(
        name=operator.name,
        kind=OperatorKind.VIEW,
        dims=operator.outputs[0].dims,
        inputs=(),
        outputs=operator.outputs,
    )
    return layer_class(
        embedding.kind,
        tuple(left if op is operator else op for op in embedding.operators),
    )


def illegal_host_embedding(mesh: Mesh, hidden_size: int, tied: bool) -> str | None:
    """Returns why the host cannot hold the token table on a mesh, or None.

    A tied table is looked up on the device, so that no mesh is in its way.
    """
    if tied:
        return None
    if mesh.tp > 1:
        return f"tp {mesh.tp} divides the rows of the token table, the host looks up in all of them"
    if mesh.cp > 1:
        return f"cp {mesh.cp} divides the tokens, the host looks up those of whole sequences"
    if hidden_size % mesh.dp:
        return f"dp {mesh.dp} does not divide the {hidden_size} columns of the token table"
    return None


def host_embedding_of(embedding: LayerClass, mesh: Mesh, machine: Machine) -> HostEmbedding:
    """Prices the look-up of one micro-batch for a rank; `embedding` includes its table."""
    operator, table = table_of(embedding)
    out, cluster = operator.outputs[0], machine.cluster
    owned = table.num_elements // mesh.dp
    num_tokens = out.num_elements // table.shape[-1]
    exchange = tokens = ZERO
    if mesh.dp > 1:
        where = place(mesh, Axis.DP, cluster.gpus_per_node)
        exchange = machine.corrected(
            "data", collective_time(Collective.ALL_TO_ALL, out.num_bytes, where, machine)
        )
        gathered = collective_time(
            Collective.ALL_GATHER, TOKEN_BYTES * num_tokens * mesh.dp, where, machine
        )
        tokens = machine.corrected("data", gathered)
    read = FP32_BYTES + out.element_bytes  # rows are read and cast
    summed = out.element_bytes + 2 * FP32_BYTES  # gradients are read, rows read and written
    return HostEmbedding(
        host_bytes=HOST_STATE_BYTES * owned,
        elements=out.num_elements,
        num_tokens=num_tokens,
        forward=host_time(read * out.num_elements, cluster) + copy_time(out.num_bytes, cluster),
        backward=copy_time(out.num_bytes, cluster, to_host=True)
        + host_time(summed * out.num_elements, cluster),
        exchange=exchange,
        tokens=tokens,
        update=host_adam_time(owned, cluster),
    )
