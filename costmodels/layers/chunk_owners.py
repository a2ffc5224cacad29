"""The ranks that own the elements of a communication group of chunks together (EQUATIONS O5).

Data-parallel ranks own equal parts of the parameters that all of them hold. Where experts are
divided over ranks, each rank holds the parameters of its own experts, and the ranks with the same
experts own equal parts of those:

    dp          ranks that hold the same part of attention, norms and router
    D_e         = dp tp / (ep etp) ranks that hold the same experts
    own chunk   = s / dp + e / D_e elements of a group with s shared ones and e of experts
"""

from __future__ import annotations

from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.layers.model_states import owned_parameters
from parplan.costmodels.operators.sharding import Sharding
from parplan.profiles.models.operator_graph import LayerClass


def expert_owners(mesh: Mesh) -> int:
    """Returns the ranks that own experts together where others own the rest, else 0.

    With one data-parallel rank nothing is gathered, and each rank owns all that it holds.
    """
    divided = mesh.ep * mesh.etp > 1 and mesh.dp > 1
    return mesh.expert_replicas if divided and mesh.expert_replicas != mesh.dp else 0


def expert_elements(layer: LayerClass, sharding: Sharding, mesh: Mesh) -> int:
    """Elements of a layer's parameters on one rank that have owners of their own."""
    if not expert_owners(mesh):
        return 0
    return owned_parameters(layer, sharding, of_experts=True)


def own_elements(elements: int, experts: int, mesh: Mesh) -> int:
    """Elements of the largest own part of a group.

    elements    of the group on one rank, once it is gathered
    experts     the part of them that has owners of its own
    """
    shared = -(-(elements - experts) // mesh.dp)
    return shared + (-(-experts // expert_owners(mesh)) if experts else 0)
