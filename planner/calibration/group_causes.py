"""The cause of a traced collective: the axis of the mesh that its group lies along.

A group's ranks say the axis; else its name, its size where one axis alone has that degree, or the
one axis that is divided at all. A collective of which nothing of these is known has no factor.
"""

from __future__ import annotations

import re

from parplan.costmodels.communication.mesh import Axis, Mesh
from parplan.profiles.traces.trace_record import TracedCollective
from parplan.profiles.traces.work_classes import MESSAGES, USER_BUFFERS

TENSOR = "tensor"
DATA = "data"
PIPELINE = "pipeline"
UNKNOWN_AXIS = "unknown axis"
# Parts of names: of Megatron-LM's groups, of DeviceMesh's axes, of DeepSpeed's.
_NAMES = (
    (PIPELINE, r"pipeline|(?:^|_)pp(?:$|_)|embedding"),
    (TENSOR, r"tensor|(?:^|_)tp(?:$|_)|context_parallel|(?:^|_)cp(?:$|_)|expert_model|(?:^|_)ep"),
    (DATA, r"data_parallel|(?:^|_)dp(?:$|_)|fsdp|shard|replicate|zero"),
)


def cause_of(collective: TracedCollective, mesh: Mesh) -> str:
    """Returns the cause of a collective's time: tensor, data, pipeline, or an unknown axis.

    Context-parallel and expert exchanges count as tensor, as in the factors of a calibration.
    """
    axes = _axes(collective, mesh)
    if collective.operation in ("all_to_all", USER_BUFFERS):
        return TENSOR
    if axes:
        return _cause_of_axes(axes, collective.operation)
    return _named(collective.group) or UNKNOWN_AXIS


def _cause_of_axes(axes: set[Axis], operation: str) -> str:
    if Axis.PP in axes:
        return PIPELINE if operation in MESSAGES else DATA
    if Axis.DP in axes:
        return DATA
    if Axis.TP in axes:
        return TENSOR
    return DATA if operation in ("all_reduce", "reduce_scatter") else TENSOR


def _axes(collective: TracedCollective, mesh: Mesh) -> set[Axis]:
    """Returns the axes along which the ranks of a group differ, empty where they are unknown."""
    divided = {axis for axis in Axis if mesh.degree(axis) > 1}
    ranks = collective.ranks
    if ranks and max(ranks) < mesh.num_ranks and len(ranks) > 1:
        places = zip(*(mesh.coordinates(rank) for rank in ranks), strict=True)
        return {axis for axis, at in zip(Axis, places, strict=True) if len(set(at)) > 1}
    if collective.operation in MESSAGES and Axis.PP in divided:
        return {Axis.PP}
    if len(divided) == 1:
        return divided
    if collective.group_size and not _named(collective.group):
        alike = {axis for axis in divided if mesh.degree(axis) == collective.group_size}
        return alike if len(alike) == 1 else set()
    return set()


def _named(group: str) -> str | None:
    return next(
        (cause for cause, pattern in _NAMES if re.search(pattern, group, re.IGNORECASE)), None
    )
