"""The mesh of a page: a cell for each rank on its node, and lines to those that it talks to."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from parplan.costmodels.communication.mesh import Axis, Mesh
from parplan.planner.plan.traced_plan import AnyPlan
from parplan.report.page.chart_theme import (
    COLOURS,
    INK,
    MUTED,
    PAGE,
    Row,
    colour_scale,
    named_data,
    specification,
)

if TYPE_CHECKING:
    import altair

MOST_CELLS = 1_024  # beyond, a cell stands for several ranks
LINKS = "links"  # the data that the page's script fills
_POINT: Row = {"axis": "", "from": 0, "to": 0}  # a scale needs a row
_LINE_COLOURS = (COLOURS[1], INK, COLOURS[3], COLOURS[2], COLOURS[4])
_NAMED = 3  # pipeline ranks that a legend names for one colour
_BLOCK = 8  # cells side by side where a cell is a node or more


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshCells:
    """The cells of a mesh.

    ranks_per_cell    neighbouring ranks that a cell stands for
    cells_per_block   cells side by side under one label
    """

    num_ranks: int
    ranks_per_cell: int
    cells_per_block: int

    @property
    def num_cells(self) -> int:
        return math.ceil(self.num_ranks / self.ranks_per_cell)

    @property
    def num_blocks(self) -> int:
        return math.ceil(self.num_cells / self.cells_per_block)


def mesh_cells(plan: AnyPlan) -> MeshCells:
    """Returns a cell for each rank, or, of a large mesh, for a part of a node or for some nodes."""
    ranks, per_node = plan.mesh.num_ranks, min(plan.cluster.gpus_per_node, plan.mesh.num_ranks)
    parts = [part for part in range(1, per_node + 1) if per_node % part == 0]
    for part in parts:
        if ranks <= MOST_CELLS * part:
            cells = per_node // part if part < per_node else _BLOCK
            return MeshCells(num_ranks=ranks, ranks_per_cell=part, cells_per_block=cells)
    nodes = math.ceil(ranks / per_node / MOST_CELLS)
    return MeshCells(num_ranks=ranks, ranks_per_cell=nodes * per_node, cells_per_block=_BLOCK)


def axes_of(mesh: Mesh) -> dict[str, dict[str, int]]:
    """Returns degree and stride of each axis of more than one rank; a coordinate follows from both.

    coordinate = rank // stride % degree
    """
    axes = {
        axis.value: {"degree": mesh.degree(axis), "stride": mesh.stride(axis)}
        for axis in (Axis.TP, Axis.CP, Axis.DP, Axis.PP)
        if mesh.degree(axis) > 1
    }
    if mesh.ep > 1:
        axes["ep"] = {"degree": mesh.ep, "stride": mesh.etp}
    return axes


def axis_palette(mesh: Mesh) -> dict[str, str]:
    """Returns the colour of the lines of each axis."""
    return dict(zip(axes_of(mesh), _LINE_COLOURS, strict=False))


def stage_palette(mesh: Mesh) -> dict[str, str]:
    """Returns the colour of each pipeline rank's cells; ranks beyond the colours share them."""
    names: dict[str, list[str]] = {}
    for stage in range(mesh.pp):
        names.setdefault(COLOURS[stage % len(COLOURS)], []).append(str(stage))
    return {
        f"pipeline rank {', '.join(stages[:_NAMED])}{', ...' if len(stages) > _NAMED else ''}": hue
        for hue, stages in names.items()
    }


def cell_rows(plan: AnyPlan, cells: MeshCells) -> list[Row]:
    """Returns one row a cell: its ranks, their nodes and their pipeline ranks."""
    rows = []
    for cell in range(cells.num_cells):
        first = cell * cells.ranks_per_cell
        last = min(first + cells.ranks_per_cell, cells.num_ranks) - 1
        stage = plan.mesh.coordinates(first)[0]
        rows.append(
            {
                "c": cell,
                "ranks": _range(first, last),
                "node": _range(
                    first // plan.cluster.gpus_per_node, last // plan.cluster.gpus_per_node
                ),
                "pp": _stages(plan.mesh, first, last),
                "hue": stage % len(COLOURS),
            }
        )
    return rows


def _stages(mesh: Mesh, first: int, last: int) -> str:
    stages = sorted({mesh.coordinates(rank)[0] for rank in range(first, last + 1)})
    return _range(stages[0], stages[-1])


def _range(first: int, last: int) -> str:
    return f"{first}" if first == last else f"{first}-{last}"


def _place(cell: str, cells: MeshCells, end: str = "") -> dict[str, str]:
    """Returns where a cell is, as expressions: blocks in rows of `columns`, cells in a block."""
    per_block = cells.cells_per_block
    block = f"floor({cell} / {per_block})"
    return {
        f"x{end}": f"({block} % columns) * {per_block + 1} + {cell} % {per_block}",
        f"y{end}": f"floor({block} / columns)",
    }


def _axes(cells: MeshCells) -> tuple[altair.X, altair.Y]:
    import altair as alt

    wide = alt.ExprRef(expr=f"columns * {cells.cells_per_block + 1} - 1")
    high = alt.ExprRef(expr=f"ceil({cells.num_blocks} / columns)")
    across = alt.Scale(domainMin=0, domainMax=wide, nice=False, zero=False)
    down = alt.Scale(domainMin=0, domainMax=high, nice=False, zero=False, reverse=True)
    return alt.X("x:Q", axis=None, scale=across), alt.Y("top:Q", axis=None, scale=down)


def _squares(plan: AnyPlan, cells: MeshCells) -> tuple[altair.Chart, altair.Chart]:
    """The cells, coloured by pipeline rank, and the names of the blocks."""
    import altair as alt

    x, y = _axes(cells)
    hues = alt.Scale(domain=list(range(len(COLOURS))), range=list(COLOURS))
    base = alt.Chart(named_data("cells")).transform_calculate(
        **_place("datum.c", cells),
        x2="datum.x + 0.92",
        top="datum.y + 0.42",
        bottom="datum.y + 0.96",
        label="'node ' + split(datum.node, '-')[0]",
    )
    squares = base.mark_rect(aria=False, cursor="pointer", fillOpacity=0.5).encode(
        x=x,
        x2="x2:Q",
        y=y,
        y2="bottom:Q",
        fill=alt.Fill("hue:O", scale=hues, legend=None),
        stroke=alt.condition("datum.c == chosen", alt.value(INK), alt.value(PAGE)),
        strokeWidth=alt.condition("datum.c == chosen", alt.value(3), alt.value(0.5)),
        tooltip=[
            alt.Tooltip("ranks:N", title="rank"),
            alt.Tooltip("node:N"),
            alt.Tooltip("pp:N", title="pipeline rank"),
        ],
    )
    names = (
        base.transform_filter(f"datum.c % {cells.cells_per_block} == 0")
        .mark_text(align="left", baseline="bottom", dy=-2, color=MUTED, fontSize=11)
        .encode(x=x, y=y, text="label:N")
    )
    return squares, names


def _lines(plan: AnyPlan, cells: MeshCells) -> tuple[altair.Chart, altair.Chart]:
    """Lines between cells and their ends, one for each row of the data `links`: from, to, axis.

    Each axis has its height in a cell, so that lines lie side by side.
    """
    import altair as alt

    axes = list(axes_of(plan.mesh))
    height = f"0.42 + 0.54 * (indexof({axes}, datum.axis) + 1) / {len(axes) + 1}"
    stroke = alt.Stroke("axis:N", scale=colour_scale(axis_palette(plan.mesh)), legend=None)
    seen = alt.condition("datum.axis == ''", alt.value(0), alt.value(1))
    base = (
        alt.Chart(named_data(LINKS))
        .transform_calculate(**_place("datum.from", cells, "1"), **_place("datum.to", cells, "2"))
        .transform_calculate(
            xa="datum.x1 + 0.46",
            xb="datum.x2 + 0.46",
            ya=f"datum.y1 + {height}",
            yb=f"datum.y2 + {height}",
        )
    )
    lines: altair.Chart = base.mark_rule(strokeWidth=2.5, aria=False).encode(
        x=alt.X("xa:Q", axis=None),
        x2="xb:Q",
        y=alt.Y("ya:Q", axis=None),
        y2="yb:Q",
        stroke=stroke,
        strokeOpacity=seen,
    )
    ends: altair.Chart = base.mark_point(size=12, strokeWidth=4, aria=False).encode(
        x=alt.X("xb:Q", axis=None),
        y=alt.Y("yb:Q", axis=None),
        stroke=stroke,
        strokeOpacity=seen,
    )
    return lines, ends


def mesh_chart(plan: AnyPlan, cells: MeshCells) -> Row:
    """Returns the cells in blocks; the page's script sets `columns` and fills the data `links`."""
    import altair as alt

    chart = alt.layer(*_squares(plan, cells), *_lines(plan, cells)).add_params(
        alt.param(name="columns", value=1), alt.param(name="chosen", value=0)
    )
    return specification(chart, 100, cells=cell_rows(plan, cells), **{LINKS: [_POINT]})
