"""Groups of ranks: shapes and members on four worlds by hand, placements, and case order."""

from __future__ import annotations

import pytest

from parplan.costmodels.communication.mesh import Axis, Mesh, Placement, place
from parplan.profiles.errors import ConfigError
from parplan.profiles.profiler.communication.comm_cases import (
    TIMED,
    comm_cases,
    ladder,
    shape_of,
    size_levels,
)
from parplan.profiles.profiler.communication.group_shapes import (
    Shape,
    World,
    group_members,
    group_shapes,
    pair_shapes,
    pairs,
)


def shape(nodes, ranks, groups):
    return Shape(nodes=nodes, ranks_per_node=ranks, groups=groups)


PAIR = World(nodes=1, ranks_per_node=2)
NODE = World(nodes=1, ranks_per_node=8)
TWO_NODES = World(nodes=2, ranks_per_node=8)
FOUR_NODES = World(nodes=4, ranks_per_node=4)
EVERY_WORLD = pytest.mark.parametrize(
    "world",
    [
        pytest.param(PAIR, id="1x2"),
        pytest.param(NODE, id="1x8"),
        pytest.param(TWO_NODES, id="2x8"),
        pytest.param(FOUR_NODES, id="4x4"),
        pytest.param(World(nodes=2, ranks_per_node=1), id="2x1"),
        pytest.param(World(nodes=3, ranks_per_node=6), id="3x6"),
    ],
)


@pytest.mark.parametrize(
    ("world", "expected"),
    [
        pytest.param(PAIR, {(1, 2, 1)}, id="1x2"),
        pytest.param(NODE, {(1, 8, 1), (1, 4, 2), (1, 2, 4), (1, 4, 1), (1, 2, 1)}, id="1x8"),
        pytest.param(
            TWO_NODES,
            {
                (1, 8, 1),
                (1, 4, 2),
                (1, 2, 4),
                (1, 4, 1),
                (1, 2, 1),
                (2, 8, 1),
                (2, 4, 2),
                (2, 2, 4),
                (2, 1, 8),
                (2, 4, 1),
                (2, 2, 1),
                (2, 1, 1),
            },
            id="2x8",
        ),
        pytest.param(
            FOUR_NODES,
            {
                (1, 4, 1),
                (1, 2, 2),
                (1, 2, 1),
                (2, 4, 1),
                (2, 2, 2),
                (2, 1, 4),
                (4, 4, 1),
                (4, 2, 2),
                (4, 1, 4),
                (4, 2, 1),
                (4, 1, 1),
            },
            id="4x4",
        ),
    ],
)
def test_the_shapes_of_collectives_by_hand(world, expected):
    shapes = [shape for level in group_shapes(world) for shape in level]

    assert {
        (group_shape.nodes, group_shape.ranks_per_node, group_shape.groups)
        for group_shape in shapes
    } == expected
    assert len(shapes) == len(expected)


def test_the_node_and_the_world_come_first_and_one_rank_a_node_before_the_rest():
    levels = group_shapes(TWO_NODES)

    assert levels[0] == (shape(1, 8, 1), shape(2, 8, 1))
    assert levels[1][0] == shape(2, 1, 8)


@pytest.mark.parametrize(
    ("world", "of", "expected"),
    [
        pytest.param(PAIR, (1, 2, 1), ((0, 1),), id="1x2-both"),
        pytest.param(
            NODE, (1, 2, 4), ((0, 1), (2, 3), (4, 5), (6, 7)), id="1x8-neighbours-at-once"
        ),
        pytest.param(NODE, (1, 4, 1), ((0, 1, 2, 3),), id="1x8-neighbours-alone"),
        pytest.param(
            TWO_NODES, (1, 8, 1), (tuple(range(8)), tuple(range(8, 16))), id="2x8-each-node"
        ),
        pytest.param(TWO_NODES, (1, 4, 1), ((0, 1, 2, 3),), id="2x8-part-of-one-node"),
        pytest.param(TWO_NODES, (2, 8, 1), (tuple(range(16)),), id="2x8-the-world"),
        pytest.param(
            TWO_NODES,
            (2, 1, 8),
            tuple((i, i + 8) for i in range(8)),
            id="2x8-one-rank-a-node-at-once",
        ),
        pytest.param(TWO_NODES, (2, 1, 1), ((0, 8),), id="2x8-one-rank-a-node-alone"),
        pytest.param(
            TWO_NODES,
            (2, 4, 2),
            ((0, 2, 4, 6, 8, 10, 12, 14), (1, 3, 5, 7, 9, 11, 13, 15)),
            id="2x8-every-other-rank",
        ),
        pytest.param(
            FOUR_NODES, (4, 2, 1), ((0, 2, 4, 6, 8, 10, 12, 14),), id="4x4-half-of-every-node"
        ),
        pytest.param(
            FOUR_NODES, (2, 4, 1), (tuple(range(8)), tuple(range(8, 16))), id="4x4-two-nodes-each"
        ),
        pytest.param(
            FOUR_NODES,
            (2, 1, 4),
            ((0, 4), (1, 5), (2, 6), (3, 7), (8, 12), (9, 13), (10, 14), (11, 15)),
            id="4x4-one-rank-of-two-nodes-at-once",
        ),
    ],
)
def test_the_ranks_of_a_group_by_hand(world, of, expected):
    assert group_members(shape(*of), world) == expected


@EVERY_WORLD
def test_groups_at_once_share_no_rank_and_each_node_is_in_as_many_as_the_shape_says(world):
    for group_shape in (level_shape for level in group_shapes(world) for level_shape in level):
        together = group_members(group_shape, world)
        ranks = [rank for group in together for rank in group]
        nodes = [{rank // world.ranks_per_node for rank in group} for group in together]

        assert len(ranks) == len(set(ranks))
        assert set(ranks) <= set(range(world.num_ranks))
        assert {len(group) for group in together} == {group_shape.num_ranks}
        assert {len(over) for over in nodes} == {group_shape.nodes}
        assert {sum(node in over for over in nodes) for node in set().union(*nodes)} == {
            group_shape.groups
        }


@EVERY_WORLD
def test_every_group_of_every_mesh_has_a_shape(world):
    """Placements of all meshes over all ranks are checked.

    Inside a node prices say one group, and all run at once.
    """
    local, number = world.ranks_per_node, world.num_ranks
    shapes = {group_shape for level in group_shapes(world) for group_shape in level}
    for tp in (d for d in range(1, number + 1) if number % d == 0):
        for dp in (d for d in range(1, number // tp + 1) if number // tp % d == 0):
            mesh = Mesh(pp=number // tp // dp, dp=dp, tp=tp)
            for axis in (Axis.DP, Axis.TP):
                placed = place(mesh, axis, local)
                lengths = (mesh.stride(axis), mesh.degree(axis) * mesh.stride(axis))
                if placed.num_ranks == 1 or any(
                    length % local and local % length for length in lengths
                ):
                    continue  # such a group has more ranks on one node than on another
                groups = (
                    placed.groups_per_node
                    if placed.crosses_nodes
                    else local // placed.ranks_per_node
                )
                assert shape(placed.nodes, placed.ranks_per_node, groups) in shapes, (mesh, axis)


def test_a_dp_group_over_the_tp_ranks_of_a_node_has_the_members_that_are_measured():
    mesh = Mesh(pp=1, dp=4, tp=4)
    placed = place(mesh, Axis.DP, 8)

    assert placed == Placement(nodes=2, ranks_per_node=2, groups_per_node=4)
    assert (1, 5, 9, 13) in group_members(shape(2, 2, 4), TWO_NODES)  # dp ranks 0..3 of tp rank 1


@pytest.mark.parametrize(
    ("world", "expected"),
    [
        pytest.param(PAIR, {(1, 2, 1): ((0, 1),)}, id="1x2"),
        pytest.param(
            NODE,
            {
                (1, 2, 1): ((0, 1),),
                (1, 2, 2): ((0, 2), (1, 3)),
                (1, 2, 4): ((0, 4), (1, 5), (2, 6), (3, 7)),
            },
            id="1x8",
        ),
        pytest.param(
            FOUR_NODES,
            {
                (1, 2, 1): ((0, 1),),
                (1, 2, 2): ((0, 2), (1, 3)),
                (2, 1, 1): ((0, 4),),
                (2, 1, 2): ((0, 4), (1, 5)),
                (2, 1, 4): ((0, 4), (1, 5), (2, 6), (3, 7)),
            },
            id="4x4",
        ),
    ],
)
def test_senders_and_receivers_by_hand(world, expected):
    shapes = [pair_shape for level in pair_shapes(world) for pair_shape in level]

    assert {
        (pair_shape.nodes, pair_shape.ranks_per_node, pair_shape.groups): pairs(pair_shape, world)
        for pair_shape in shapes
    } == expected


@pytest.mark.parametrize(("nodes", "ranks"), [(1, 1), (0, 8), (2, 0)])
def test_fewer_than_two_ranks_have_nothing_to_say_to_each_other(nodes, ranks):
    with pytest.raises(ConfigError, match="needs at least 2 ranks"):
        World(nodes=nodes, ranks_per_node=ranks)


def test_sizes_are_powers_of_four_from_1_kib_to_the_largest():
    assert ladder(2**30) == tuple(4**i for i in range(5, 16))
    assert ladder(3000) == (1024, 3000)
    with pytest.raises(ConfigError, match="at least 1 KiB"):
        ladder(1023)


@pytest.mark.parametrize(
    ("count", "expected"),
    [(1, (0,)), (2, (0, 0)), (3, (0, 1, 0)), (5, (0, 2, 1, 2, 0)), (6, (0, 2, 1, 2, 3, 0))],
)
def test_ends_come_first_then_the_middle_then_the_quarters(count, expected):
    assert size_levels(count) == expected


@EVERY_WORLD
def test_every_collective_is_measured_at_every_shape_and_size_once(world):
    cases = comm_cases(world, largest_bytes=2**20, precision="fp32", product=64)
    keys = [case.key for case in cases]
    timed = [case for case in cases if case.work in TIMED]
    groups = sum(map(len, group_shapes(world)))
    messages = sum(map(len, pair_shapes(world)))

    assert len(keys) == len(set(keys))
    assert len(timed) == len(ladder(2**20)) * (4 * groups + messages)
    assert all(case.passes[0].sizes == tuple(size for _, size in case.sizes) for case in timed)
    assert all(
        case.size("bytes") % (4 * shape_of(case).num_ranks) == 0
        for case in timed
        if case.work == "all_gather"
    )


def test_a_short_budget_gets_the_ends_of_the_all_reduce_of_a_node_and_then_the_middle():
    cases = comm_cases(NODE, largest_bytes=2**30, precision="bf16", product=64)
    of_node = [
        case.size("bytes")
        for case in cases
        if case.work == "all_reduce" and shape_of(case).ranks_per_node == 8
    ]

    assert of_node[:3] == [2**10, 2**30, 2**20]
    assert {case.work for case in cases[:3]} == {"communicator", "all_reduce"}
