"""Places of the ranks of an axis (EQUATIONS C6), checked against the rank formula itself."""

from __future__ import annotations

import itertools

import pytest

from parplan.costmodels.communication.mesh import (
    Axis,
    Mesh,
    MeshOrder,
    Placement,
    crosses_nodes,
    place,
    place_copies,
    where_axes_lie,
)
from parplan.profiles.errors import ConfigError
from parplan.profiles.stack import ContextForm
from tests.helpers.cases import mostly_slow


def groups(mesh: Mesh, axis: Axis) -> list[list[int]]:
    """The ranks of every group of `axis`, from the rank formula of the order."""
    coordinates = itertools.product(range(mesh.pp), range(mesh.dp), range(mesh.cp), range(mesh.tp))
    index = list(Axis).index(axis)
    by_rest: dict[tuple[int, ...], list[int]] = {}
    for coordinate in coordinates:
        pp, dp, cp, tp = coordinate
        rest = coordinate[:index] + coordinate[index + 1 :]
        outer = pp * mesh.dp + dp
        if mesh.order is MeshOrder.DP_PP_TP:
            outer = dp * mesh.pp + pp
        rank = (outer * mesh.cp + cp) * mesh.tp + tp
        by_rest.setdefault(rest, []).append(rank)
    return list(by_rest.values())


@pytest.mark.parametrize(
    ("axis", "degree", "stride"),
    [
        pytest.param(Axis.PP, 2, 32, id="pp-is-outermost"),
        pytest.param(Axis.DP, 4, 8, id="dp"),
        pytest.param(Axis.TP, 8, 1, id="tp-ranks-adjacent"),
    ],
)
def test_degrees_and_strides_follow_the_rank_order(axis, degree, stride):
    mesh = Mesh(pp=2, dp=4, tp=8)

    assert (mesh.degree(axis), mesh.stride(axis)) == (degree, stride)
    assert mesh.num_ranks == 64


@pytest.mark.parametrize("axis", list(Axis))
def test_a_degree_below_one_is_refused(axis):
    degrees = {"pp": 1, "dp": 1, "tp": 1, "context_form": None, axis.value: 0}
    if axis is Axis.CP:
        degrees["context_form"] = ContextForm.RING

    with pytest.raises(ConfigError, match=f"mesh: {axis} is 0, it must be from 1 to 10,000,000"):
        Mesh(**degrees)


@pytest.mark.parametrize(
    ("mesh", "axis", "expected"),
    [
        pytest.param(
            Mesh(pp=1, dp=8, tp=8),
            Axis.TP,
            Placement(nodes=1, ranks_per_node=8, groups_per_node=1),
            id="tp-fills-a-node",
        ),
        pytest.param(
            Mesh(pp=1, dp=8, tp=8),
            Axis.DP,
            Placement(nodes=8, ranks_per_node=1, groups_per_node=8),
            id="8-dp-groups-share-the-nics",
        ),
        pytest.param(
            Mesh(pp=1, dp=64, tp=1),
            Axis.DP,
            Placement(nodes=8, ranks_per_node=8, groups_per_node=1),
            id="one-dp-group-has-them-all",
        ),
        pytest.param(
            Mesh(pp=8, dp=1, tp=8),
            Axis.PP,
            Placement(nodes=8, ranks_per_node=1, groups_per_node=8),
            id="pp-across-nodes",
        ),
        pytest.param(
            Mesh(pp=1, dp=2, tp=2),
            Axis.DP,
            Placement(nodes=1, ranks_per_node=2, groups_per_node=1),
            id="half-a-node",
        ),
        pytest.param(
            Mesh(pp=1, dp=4, tp=16),
            Axis.TP,
            Placement(nodes=2, ranks_per_node=8, groups_per_node=1),
            id="tp-over-two-nodes",
        ),
    ],
)
def test_placements_by_hand_on_nodes_of_eight(mesh, axis, expected):
    assert place(mesh, axis, 8) == expected


POWERS = (1, 2, 4, 8, 16)
MESHES = tuple(
    Mesh(pp=pp, dp=dp, tp=tp, order=order)
    for order in MeshOrder
    for pp, dp, tp in itertools.product(POWERS, repeat=3)
) + tuple(
    Mesh(pp=pp, dp=dp, cp=cp, tp=tp, context_form=ContextForm.RING)
    for pp, dp, cp, tp in itertools.product((1, 4), (1, 8), (2, 4, 16), (1, 2, 8))
)


@pytest.mark.parametrize("gpus_per_node", mostly_slow([1, 2, 4, 8], {4}))
@pytest.mark.parametrize("axis", list(Axis))
def test_placements_equal_the_nodes_that_the_ranks_of_each_group_sit_on(axis, gpus_per_node):
    for mesh in MESHES:
        placement = place(mesh, axis, gpus_per_node)

        for group in groups(mesh, axis):
            nodes = [rank // gpus_per_node for rank in group]
            assert placement.nodes == len(set(nodes)), (mesh, axis)
            assert placement.ranks_per_node == nodes.count(nodes[0]), (mesh, axis)
        assert placement.num_ranks == mesh.degree(axis)
        assert placement.crosses_nodes == (placement.nodes > 1)


@pytest.mark.parametrize("gpus_per_node", mostly_slow([2, 4, 8], {2}))
@pytest.mark.parametrize("axis", mostly_slow(Axis, {Axis.DP, Axis.TP}))
def test_the_groups_that_share_a_nodes_nics_are_the_groups_with_a_rank_on_it(axis, gpus_per_node):
    for mesh in MESHES:
        placement = place(mesh, axis, gpus_per_node)
        on_first_node = sum(
            any(rank < gpus_per_node for rank in group) for group in groups(mesh, axis)
        )

        if placement.crosses_nodes:
            assert placement.groups_per_node == on_first_node, (mesh, axis)
        else:
            assert placement.groups_per_node == 1


def test_degrees_that_do_not_divide_a_node_are_rounded_to_the_widest_spread():
    placement = place(Mesh(pp=1, dp=12, tp=1), Axis.DP, 8)

    assert (placement.nodes, placement.ranks_per_node) == (3, 4)


@pytest.mark.parametrize("order", list(MeshOrder))
def test_ranks_and_coordinates_are_inverse(order):
    cp = 5 if order is MeshOrder.PP_DP_TP else 1
    form = ContextForm.RING if cp > 1 else None
    mesh = Mesh(pp=3, dp=2, cp=cp, tp=4, order=order, context_form=form)
    coordinates = [mesh.coordinates(rank) for rank in range(mesh.num_ranks)]

    assert [mesh.rank(pp=pp, dp=dp, cp=cp, tp=tp) for pp, dp, cp, tp in coordinates] == list(
        range(mesh.num_ranks)
    )
    assert len(set(coordinates)) == mesh.num_ranks


@pytest.mark.parametrize("gpus_per_node", [2, 6, 8])
@pytest.mark.parametrize("order", list(MeshOrder))
def test_a_message_leaves_a_node_where_one_of_its_copies_does(order, gpus_per_node):
    for pp, dp, tp in itertools.product((2, 3, 4), (1, 2, 3, 8), (1, 2)):
        mesh = Mesh(pp=pp, dp=dp, tp=tp, order=order)
        copies = range(dp if order is MeshOrder.DP_PP_TP else 1)
        for here, there in itertools.pairwise(range(pp)):
            nodes = [
                (mesh.rank(here, dp) // gpus_per_node, mesh.rank(there, dp) // gpus_per_node)
                for dp in copies
            ]

            assert crosses_nodes(mesh, here, there, gpus_per_node) == any(
                sent != received for sent, received in nodes
            )


def test_orders_lie_alike_where_tensor_parallelism_fills_a_node():
    def where(gpus_per_node, order):
        return where_axes_lie(Mesh(pp=2, dp=4, tp=4, order=order), (gpus_per_node,))

    assert where(4, MeshOrder.PP_DP_TP) == where(4, MeshOrder.DP_PP_TP)
    assert where(8, MeshOrder.PP_DP_TP) != where(8, MeshOrder.DP_PP_TP)
    assert where(32, MeshOrder.PP_DP_TP) == where(32, MeshOrder.DP_PP_TP)


def test_experts_need_neighbours():
    with pytest.raises(ConfigError, match="the order is dp-pp-tp with ep 2"):
        Mesh(pp=2, dp=2, tp=1, ep=2, order=MeshOrder.DP_PP_TP)


@pytest.mark.parametrize("gpus_per_node", [2, 4, 8])
def test_replicas_are_the_ranks_of_both_axes_that_divide_no_parameter(gpus_per_node):
    for mesh in MESHES:
        ranks = sorted(mesh.rank(dp=dp, cp=cp) for dp in range(mesh.dp) for cp in range(mesh.cp))
        nodes = [rank // gpus_per_node for rank in ranks]
        placement = place_copies(mesh, mesh.replicas, gpus_per_node)

        assert placement.num_ranks == mesh.replicas == len(ranks)
        assert (placement.nodes, placement.ranks_per_node) == (len(set(nodes)), nodes.count(0))


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ({"cp": 2}, "mesh: context_form is None with cp 2"),
        ({"context_form": "ring"}, "mesh: context_form is ring with cp 1"),
        ({"cp": 2, "context_form": "cube"}, "context_form"),
        ({"tp": 4, "etp": 3}, "mesh: etp is 3, it must divide tp 4"),
        ({"tp": 4, "etp": 4, "ep": 16}, "ep 16 x etp 4 does not divide the 32 ranks of a stage"),
        (
            {"cp": 2, "context_form": "ring", "order": "dp-pp-tp"},
            "the order is dp-pp-tp with cp 2, whose ranks are neighbours",
        ),
    ],
)
def test_a_mesh_that_cannot_be_is_refused(mesh, message):
    with pytest.raises(ConfigError, match=message):
        Mesh(**{"pp": 1, "dp": 8, "tp": 1, **mesh})
