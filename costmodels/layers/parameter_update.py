"""Seconds of an optimizer's update of one layer on one rank (EQUATIONS K5, K6).

Every optimizer streams the parameters that the rank owns. Muon and Adafactor also need more than a
rank's part of a matrix:

Muon makes the momentum of a whole matrix orthogonal: the distributed Muon of Liu et al. 2025, arXiv
2502.16982, algorithm 1. The momentum stays divided. Ranks that ZeRO divides a matrix over deal the
matrices out: each gathers some in 16 bits, computes them and sends the others their parts, so that
the work is divided too. Inside a stage the ranks gather the matrix and all compute it. Ranks with
copies of a matrix compute the same. Left out: matrices that cannot be dealt out evenly.

Adafactor adds up the row sums of a matrix whose columns are divided, and the column sums of one
whose rows are (Shazeer and Stern 2018, arXiv 1804.04235, algorithm 4). Left out: single numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from parplan.costmodels.communication.collectives import Collective, collective_time
from parplan.costmodels.communication.mesh import (
    Axis,
    Mesh,
    Placement,
    place_axis,
    place_copies,
)
from parplan.costmodels.layers.model_states import (
    LocalParameter,
    LocalParameters,
    StateSharding,
    chunk_shape,
)
from parplan.costmodels.operators.compute import kernel_time, optimizer_time
from parplan.costmodels.operators.kernels import (
    FORWARD,
    product_kernel,
    update_bytes_per_parameter,
)
from parplan.costmodels.operators.optimizers import FP32_BYTES, NEWTON_SCHULZ_STEPS, OPTIMIZERS
from parplan.profiles.machines.shipped_profiles import Machine
from parplan.profiles.models.spec import TrainingSpec
from parplan.profiles.provenance import ZERO, Seconds

GATHERED_BYTES = 2  # the products run in 16 bits


def update_time(
    parameters: LocalParameters,
    mesh: Mesh,
    states: StateSharding,
    machine: Machine,
    training: TrainingSpec,
) -> Seconds:
    """Seconds of the update of one layer, with all that it gathers (EQUATIONS K5, K6)."""
    updates = OPTIMIZERS[training.optimizer]
    shards = states.shards if states.zero else 1
    each = [p for p in parameters.each if states.with_tied or not p.tied]
    owned, moved_bytes = 0, 0
    for parameter in each:
        shape = chunk_shape(parameter.shape, parameter.sharers(shards))
        moments = updates.moments_of(parameter.whole)
        width = update_bytes_per_parameter(training)
        if parameter.whole.matrix and moments is updates.of_matrices:
            width += updates.further_bytes
        owned += math.prod(shape)
        moved_bytes += width * math.prod(shape)
        moved_bytes += 2 * moments.num_bytes(shape, parameter.whole, training.stack.moment_bytes)
    total = optimizer_time(owned, machine, training, moved_bytes)
    matrices = [p for p in each if p.whole.matrix and p.elements]
    if updates.orthogonal:
        blocks = [p for p in matrices if not p.whole.table]
        return total + _orthogonal(blocks, mesh, shards, machine, training)
    if updates.of_matrices.factored:
        for parameter in matrices:
            total += _factors(parameter, mesh, shards, machine)
    return total


def newton_schulz_time(
    rows: int, columns: int, machine: Machine, training: TrainingSpec
) -> Seconds:
    """Seconds of the products that make a matrix X orthogonal (EQUATIONS K6).

        s = min(rows, columns), l = max(rows, columns):     A = X X^T      2 s^2 l FLOPs
                                                            B = b A + c A A   2 s^3
                                                            X = a X + B X     2 s^2 l

    five times (Jordan et al. 2024, kellerjordan.github.io/posts/muon; torch.optim.Muon). Each is
    priced by the curve of forward products at the precision of training; torch runs bf16. Left out:
    the norm of X, and sums that products do not add themselves.
    """
    short, long = min(rows, columns), max(rows, columns)
    width = training.precision.num_bytes
    total = ZERO
    for sizes in ((short, short, long), (short, short, short), (short, long, short)):
        product = product_kernel(FORWARD, sizes, width, width)
        total += kernel_time(product, machine, training).scaled(NEWTON_SCHULZ_STEPS)
    return machine.corrected("optimizer", total)


def _orthogonal(
    matrices: Sequence[LocalParameter],
    mesh: Mesh,
    shards: int,
    machine: Machine,
    training: TrainingSpec,
) -> Seconds:
    """The exchanges of a layer's matrices with their owners, their gathers and their products."""
    moved, products = ZERO, ZERO
    for of_experts in (False, True):
        some = [p for p in matrices if p.of_experts is of_experts]
        holders = some[0].sharers(shards) if some else 1
        if holders > 1:
            parts = sum(math.prod(chunk_shape(p.shape, holders)) for p in some)
            where = _over_data(some[0], mesh, holders, machine)
            sent = collective_time(Collective.ALL_TO_ALL, GATHERED_BYTES * parts, where, machine)
            moved += sent.scaled(2)  # to the owners and back
        for parameter in some:
            inside = parts_inside(parameter)
            if inside > 1:
                gathered = collective_time(
                    Collective.ALL_GATHER,
                    GATHERED_BYTES * parameter.elements * inside,
                    _over_stage(inside, mesh, machine),
                    machine,
                )
                moved += gathered.scaled(1 / holders)
            rows, columns = parameter.whole.matrix
            each = newton_schulz_time(rows, columns, machine, training)
            products += each.scaled(parameter.matrices / holders)
    return machine.corrected("data", moved) + products


def _factors(parameter: LocalParameter, mesh: Mesh, shards: int, machine: Machine) -> Seconds:
    """The sums of one matrix's factors over the ranks that divide its rows or columns."""
    inside, holders = parts_inside(parameter), parameter.sharers(shards)
    columns = parameter.shape[-1]
    total = ZERO
    if holders > 1:
        where = _over_data(parameter, mesh, holders, machine)
        total += collective_time(Collective.ALL_REDUCE, FP32_BYTES * columns, where, machine)
    if inside > 1:
        by_columns = columns < parameter.whole.matrix[-1]
        rows = math.prod(chunk_shape(parameter.shape, holders)[:-1])
        summed = FP32_BYTES * (rows if by_columns else columns)
        where = _over_stage(inside, mesh, machine)
        total += collective_time(Collective.ALL_REDUCE, summed, where, machine)
    return machine.corrected("data", total)


def parts_inside(parameter: LocalParameter) -> int:
    """The parts of a matrix over the ranks inside a stage, of which this rank has one."""
    whole = parameter.matrices * math.prod(parameter.whole.matrix)
    return -(-whole // parameter.elements)


def _over_data(parameter: LocalParameter, mesh: Mesh, holders: int, machine: Machine) -> Placement:
    gpus_per_node = machine.cluster.gpus_per_node
    return place_copies(mesh, holders, gpus_per_node, of_experts=parameter.of_experts)


def _over_stage(inside: int, mesh: Mesh, machine: Machine) -> Placement:
    stride = mesh.stride(Axis.TP)
    return place_axis(inside, stride, mesh.num_ranks, machine.cluster.gpus_per_node)
