"""Fits of collectives inside and between nodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from parplan.profiles.machines.curve_fitting import (
    Array,
    MeasurementTables,
    Row,
    Score,
    Where,
    crossed,
    fit,
    fit_score,
    rounded,
    sources_of,
    times_s,
)
from parplan.profiles.machines.curves import CollectiveCurve, spline_s
from parplan.profiles.machines.speeds import Inter, Intra
from parplan.profiles.provenance import Kind
from parplan.profiles.units import GB, US_PER_S

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
RANKS = (2, 4, 8)
KNOTS_BYTES = tuple(512 * 8**i for i in range(8))  # 512 B .. 1 GiB
NDR_BYTES_PER_S = 50 * GB  # the 400 Gb/s NIC of the GH200 nodes
LARGE_BYTES = 2**24


def _knots(rows: Sequence[Row]) -> tuple[int, ...]:
    """Returns the range of the rows' sizes and the powers of 8 well inside it."""
    sizes = [int(row["bytes"]) for row in rows]
    low, high = min(sizes), max(sizes)
    return (low, *(knot for knot in KNOTS_BYTES if 2 * low < knot < high / 2), high)


def _priced(rows: Sequence[Row], curve: CollectiveCurve) -> Array:
    return np.array([spline_s(curve, int(row["bytes"])) for row in rows])


def _spline(rows: Sequence[Row], empty: CollectiveCurve) -> CollectiveCurve:
    """Returns the rising log-log spline through the knots of `empty` that is nearest to the rows.

    The distance is the sum of |log|.
    """
    measured = times_s(rows)
    sizes = np.array([float(row["bytes"]) for row in rows])
    order = np.argsort(sizes)
    start = np.exp(np.interp(np.log(empty.bytes), np.log(sizes[order]), np.log(measured[order])))

    def curve(x: Array) -> CollectiveCurve:
        return replace(empty, time_us=tuple((np.cumsum(x) * US_PER_S).tolist()))

    rises = np.maximum(np.diff(start, prepend=0.0), 0.01 * start)
    fitted = curve(fit(lambda x: _priced(rows, curve(x)), measured, rises.tolist()))
    return replace(fitted, time_us=tuple(rounded(time_us) for time_us in fitted.time_us))


def _curves(
    tables: MeasurementTables,
    device: str,
    gpus: tuple[str, ...],
    sources: tuple[str, ...],
    scores: list[Score],
    collectives: tuple[str, ...] = COLLECTIVES,
) -> Iterator[CollectiveCurve]:
    for collective in collectives:
        for ranks in RANKS:
            where: Where = {
                "gpu": gpus,
                "collective": collective,
                "nodes": "1",
                "ranks": str(ranks),
                "source": sources,
            }
            rows = tables.rows("collectives", where)
            if not rows:
                continue
            empty = CollectiveCurve(
                collective=collective,
                ranks=ranks,
                bytes=_knots(rows),
                time_us=(),
                rows=len(rows),
                median_error=0.0,
            )
            curve = _spline(rows, empty)
            name = f"{collective} on {ranks}"
            held_out = _held_out(rows, empty)
            score = fit_score(device, name, _priced(rows, curve), times_s(rows), held_out)
            scores.append(score)
            yield replace(curve, median_error=rounded(score.median))


def _held_out(rows: Sequence[Row], empty: CollectiveCurve) -> Array:
    return crossed(rows, lambda kept, left: _priced(left, _spline(kept, empty)))


def intra(
    tables: MeasurementTables,
    device: str,
    gpus: tuple[str, ...],
    sources: tuple[str, ...],
    link_bytes_per_s: float,
    scores: list[Score],
) -> Intra:
    """Returns the speeds inside a node: curves of its collectives, and shares of the link.

    The curves are on the measured numbers of ranks, the shares those of large rings and messages.
    """
    curves = tuple(_curves(tables, device, gpus, sources, scores))
    # not all-reduce, since a switch that reduces moves fewer bytes than a ring
    gathers = [curve for curve in curves if curve.collective == "all_gather"]
    ring = max(gathers, key=lambda curve: curve.ranks)
    pair = next(curve for curve in curves if (curve.collective, curve.ranks) == ("all_to_all", 2))
    bus_bytes_per_s = (1 - 1 / ring.ranks) * ring.bytes[-1] / spline_s(ring, ring.bytes[-1])
    message_bytes_per_s = pair.bytes[-1] / 2 / spline_s(pair, pair.bytes[-1])
    return Intra(
        link_bytes_per_s=link_bytes_per_s,
        link_share=rounded(bus_bytes_per_s / link_bytes_per_s),
        point_to_point_share=rounded(message_bytes_per_s / link_bytes_per_s),
        kind=Kind.INTERPOLATED,
        source=(
            f"{', '.join(sources)}: {', '.join(gpus)}, one node; a message is half of an "
            "all-to-all on 2"
        ),
        curves=curves,
    )


def reduced_intra(
    tables: MeasurementTables,
    device: str,
    gpu: str,
    sources: tuple[str, ...],
    assumed: Intra,
    scores: list[Score],
) -> Intra:
    """Returns the speeds inside a node of which only all-reduces were measured.

    Every ring reaches the share of the link of the all-reduce on most ranks, a message that of the
    all-reduce on two.
    """
    curves = tuple(_curves(tables, device, (gpu,), sources, scores, ("all_reduce",)))

    def link_share(curve: CollectiveCurve) -> float:
        bus_bytes = 2 * (1 - 1 / curve.ranks) * curve.bytes[-1]
        bytes_per_s = bus_bytes / spline_s(curve, curve.bytes[-1])
        return rounded(float(bytes_per_s / assumed.link_bytes_per_s))

    return replace(
        assumed,
        link_share=link_share(curves[-1]),
        point_to_point_share=link_share(curves[0]),
        kind=Kind.INTERPOLATED,
        source=f"{', '.join(sources)}: {gpu}, all-reduces on 2, 4 and 8 of the 16 GPUs of a node; "
        "all else at the share of the link that they reach",
        curves=curves,
    )


def inter(tables: MeasurementTables, scores: list[Score]) -> Inter:
    """Returns the speeds between nodes, of GH200 nodes with one 400 Gb/s NIC each.

    They are those of all-reduce as EQUATIONS C1 over 2, 4 and 8 nodes, and of messages of 16 MiB
    and more.
    """
    rows = tables.rows("collectives", {"gpu": "GH200-96GB", "collective": "all_reduce"})
    sizes = np.array([float(row["bytes"]) for row in rows])
    ranks = np.array([float(row["ranks"]) for row in rows])

    def ring_s(x: Array) -> Array:
        seconds: Array = 2 * (ranks - 1) * (x[0] + sizes / (ranks * x[1] * NDR_BYTES_PER_S))
        return seconds

    constants = fit(ring_s, times_s(rows), (1e-5, 0.9))
    scores.append(
        fit_score("GH200", "all_reduce between nodes (C1)", ring_s(constants), times_s(rows))
    )
    messages = tables.rows("collectives", {"gpu": "GH200-96GB", "collective": "p2p"})
    large = [row for row in messages if int(row["bytes"]) >= LARGE_BYTES]
    shares = [float(row["busbw_gbps"]) * GB / NDR_BYTES_PER_S for row in large]
    return Inter(
        nic_share=rounded(min(float(constants[1]), 1.0)),
        point_to_point_share=rounded(float(np.median(shares))),
        kind=Kind.ANALYTIC,
        source=(
            f"{sources_of(rows)}: shares of a 400 Gb/s NIC on 2 to 8 GH200 nodes, taken for "
            "every NIC; latency of the cluster file"
        ),
    )
