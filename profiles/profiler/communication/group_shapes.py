"""The shapes of groups that a mesh can form on a world, and their members.

Ranks fill the nodes in order. A shape has the quantities that prices need
(costmodels/communication/mesh.py, Placement): ranks on each of some nodes, and the number of such
groups that share a node. Inside a node a group's ranks are neighbours, as tensor parallelism places
them; across nodes they are as far apart as data parallelism over the rest of the node makes them.
Strided groups inside a node are assumed to be as fast as neighbours.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from parplan.profiles.divisors import divisors
from parplan.profiles.errors import ConfigError

Members = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """`nodes` equal nodes of `ranks_per_node` ranks."""

    nodes: int
    ranks_per_node: int

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.ranks_per_node < 1 or self.num_ranks < 2:
            raise ConfigError(
                f"{self.nodes} nodes of {self.ranks_per_node} ranks: communication needs at least "
                "2 ranks",
                hint="start more of them: torchrun --nproc-per-node 2",
            )

    @property
    def num_ranks(self) -> int:
        return self.nodes * self.ranks_per_node


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A group of `ranks_per_node` ranks on each of `nodes` nodes.

    Every node with such ranks takes part in `groups` groups at once.
    """

    nodes: int
    ranks_per_node: int
    groups: int

    @property
    def num_ranks(self) -> int:
        return self.nodes * self.ranks_per_node


def group_shapes(world: World) -> tuple[tuple[Shape, ...], ...]:
    """The shapes of collectives, in levels, most informative first.

    Whole nodes and the whole world come first; then one rank per node and the parts of a node, all
    such groups at once; then fewer nodes; then one group alone, which shows the cost of sharing.
    """
    local, nodes = world.ranks_per_node, world.nodes
    levels = (
        (_at_once(1, local, world), _at_once(nodes, local, world)),
        (_at_once(nodes, 1, world), *(_at_once(1, ranks, world) for ranks in divisors(local)[:-1])),
        tuple(_at_once(nodes, ranks, world) for ranks in divisors(local)),
        tuple(
            _at_once(over, ranks, world)
            for over in divisors(nodes)[1:-1]
            for ranks in divisors(local)
        ),
        tuple(_alone(over, ranks) for over in (1, nodes) for ranks in divisors(local)),
    )
    return tuple(_fresh(levels))


def pair_shapes(world: World) -> tuple[tuple[Shape, ...], ...]:
    """The shapes of single messages, in levels, most informative first.

    One message inside a node, one between two nodes and one from every rank at once come first.
    """
    local = world.ranks_per_node
    inside = (
        [Shape(nodes=1, ranks_per_node=2, groups=pairs) for pairs in divisors(local // 2)]
        if local > 1
        else []
    )
    across = (
        [Shape(nodes=2, ranks_per_node=1, groups=pairs) for pairs in divisors(local)]
        if world.nodes > 1
        else []
    )
    return tuple(
        _fresh(((*inside[:1], *across[:1], *across[-1:]), (*inside[-1:],), (*across, *inside)))
    )


def _at_once(nodes: int, ranks: int, world: World) -> Shape:
    return Shape(nodes=nodes, ranks_per_node=ranks, groups=world.ranks_per_node // ranks)


def _alone(nodes: int, ranks: int) -> Shape:
    return Shape(nodes=nodes, ranks_per_node=ranks, groups=1)


def _fresh(levels: Iterable[tuple[Shape, ...]]) -> Iterator[tuple[Shape, ...]]:
    """Yields the levels without groups of one rank and without shapes of earlier levels."""
    seen: set[Shape] = set()
    for level in levels:
        kept = tuple(
            shape for shape in dict.fromkeys(level) if shape.num_ranks > 1 and shape not in seen
        )
        seen.update(kept)
        if kept:
            yield kept


def group_members(shape: Shape, world: World) -> Members:
    """The concurrent groups, by their ranks, rank 0's first. Takes shapes of `group_shapes`."""
    local = world.ranks_per_node
    alone = shape.groups == 1 and shape.ranks_per_node < local
    sets = 1 if alone else world.nodes // shape.nodes
    # `stride` is the distance between ranks of a group: neighbours in one node, else as far apart
    # as the node allows. `apart` is the distance between the first ranks of two groups.
    stride = 1 if shape.nodes == 1 else local // shape.ranks_per_node
    apart = shape.ranks_per_node if shape.nodes == 1 else 1
    return tuple(
        tuple(
            (start * shape.nodes + node) * local + group * apart + rank * stride
            for node in range(shape.nodes)
            for rank in range(shape.ranks_per_node)
        )
        for start in range(sets)
        for group in range(shape.groups)
    )


def pairs(shape: Shape, world: World) -> Members:
    """The senders and receivers of concurrent messages, on the first node or between the first two.

    They are neighbouring pipeline stages with `groups` ranks each. Takes shapes of `pair_shapes`.
    """
    apart = shape.groups if shape.nodes == 1 else world.ranks_per_node
    return tuple((rank, rank + apart) for rank in range(shape.groups))
