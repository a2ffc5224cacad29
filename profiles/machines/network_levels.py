"""The rows `levels` of a cluster file: islands inside a node, and tiers of the network above it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

from parplan.profiles.documents.plain import Limits
from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.hardware import Cluster, Island, Link, Tier
from parplan.profiles.units import GB, microseconds_of, seconds_of, shortest

_Positive = Annotated[float, Limits(gt=0)]
_NotNegative = Annotated[float, Limits(ge=0)]
_AtLeastOne = Annotated[float, Limits(ge=1)]
_Several = Annotated[int, Limits(ge=2)]
_FORBID = {"extra": "forbid"}


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelDocument:
    """A row of `levels`, of an island (`gpus`) or of a tier (`nodes`).

    gpus: number of neighbouring GPUs of a node that a link of their own joins, with `gb_per_s` of a
        GPU in one direction and the `latency_us` of a message
    nodes: number of nodes that one unit of the tier joins, with the `oversubscription` of the
        unit's uplinks (1 by default) and the `latency_us` that leaving it adds (0 by default)
    rails: true if each switch of the unit takes the same NIC of every node
    """

    __pydantic_config__ = _FORBID

    name: str
    source: str
    gpus: _Several | None = None
    gb_per_s: _Positive | None = None
    nodes: _Several | None = None
    oversubscription: _AtLeastOne | None = None
    latency_us: _NotNegative | None = None
    rails: bool | None = None


_OF_AN_ISLAND = ("gb_per_s", "latency_us")
_NOT_OF_AN_ISLAND = ("oversubscription", "rails")


def _checked(level: LevelDocument, where: str) -> LevelDocument:
    """Returns the row. Raises ConfigError for one that is neither an island nor a tier."""
    place = f"{where}: levels: {level.name}"
    if (level.gpus is None) == (level.nodes is None):
        raise ConfigError(
            f"{place}: found {'neither gpus nor nodes' if level.gpus is None else 'both'}",
            hint="state gpus of a part of a node, or nodes of a leaf, rack or pod",
        )
    if level.gpus is None and level.gb_per_s is not None:
        raise ConfigError(
            f"{place}: gb_per_s is of a level inside a node",
            hint="state the oversubscription of the tier: NIC bandwidth of its nodes over uplinks",
        )
    for key in _OF_AN_ISLAND if level.gpus is not None else ():
        if getattr(level, key) is None:
            raise ConfigError(f"{place}: {key} is missing", hint=f"state the {key} of its link")
    for key in _NOT_OF_AN_ISLAND if level.gpus is not None else ():
        if getattr(level, key) is not None:
            raise ConfigError(f"{place}: {key} is of a level of nodes", hint=f"leave out {key}")
    return level


def levels_of(
    rows: Iterable[LevelDocument], where: str
) -> tuple[tuple[Island, ...], tuple[Tier, ...]]:
    """Returns the islands and the tiers of the rows. Raises ConfigError with `where`."""
    islands, tiers = [], []
    for level in rows:
        _checked(level, where)
        if level.gpus is not None:
            link = Link(
                name=level.name,
                bytes_per_s=(level.gb_per_s or 0.0) * GB,
                latency_s=seconds_of(level.latency_us or 0.0),
                source=level.source,
            )
            islands.append(Island(gpus=level.gpus, link=link))
            continue
        tiers.append(
            Tier(
                name=level.name,
                nodes=level.nodes or 0,
                oversubscription=level.oversubscription or 1.0,
                latency_s=seconds_of(level.latency_us or 0.0),
                rails=bool(level.rails),
                source=level.source,
            )
        )
    return tuple(islands), tuple(tiers)


def level_documents(cluster: Cluster) -> tuple[LevelDocument, ...]:
    """Returns the rows of a cluster's levels, the inverse of `levels_of`."""
    islands = (
        LevelDocument(
            name=island.link.name,
            gpus=island.gpus,
            gb_per_s=shortest(island.link.bytes_per_s, GB, lambda gb_per_s: gb_per_s * GB),
            latency_us=microseconds_of(island.link.latency_s),
            source=island.link.source,
        )
        for island in cluster.islands
    )
    tiers = (
        LevelDocument(
            name=tier.name,
            nodes=tier.nodes,
            oversubscription=None if tier.oversubscription == 1 else tier.oversubscription,
            latency_us=microseconds_of(tier.latency_s) if tier.latency_s else None,
            rails=True if tier.rails else None,
            source=tier.source,
        )
        for tier in cluster.tiers
    )
    return (*islands, *tiers)
