"""A cell is a rank up to 1,024 of them, and a part of a node or some nodes beyond."""

from __future__ import annotations

import pytest

from parplan.costmodels.communication.mesh import Mesh
from parplan.report.page.mesh_chart import MOST_CELLS, axes_of, cell_rows, mesh_cells
from tests.helpers.synthetic_runs import estimated


@pytest.mark.parametrize(
    ("dp", "ranks_per_cell"),
    [
        pytest.param(2, 1, id="16 ranks"),
        pytest.param(128, 1, id="1,024 ranks"),
        pytest.param(256, 2, id="2,048 ranks"),
        pytest.param(2048, 16, id="16,384 ranks"),
    ],
)
def test_cells_hold_every_rank_once(dp, ranks_per_cell):
    plan = estimated(pp=4, dp=dp, tp=2)
    cells = mesh_cells(plan)
    rows = cell_rows(plan, cells)

    assert cells.ranks_per_cell == ranks_per_cell
    assert len(rows) == cells.num_cells == 8 * dp // ranks_per_cell <= MOST_CELLS
    assert rows[-1]["ranks"].split("-")[-1] == str(8 * dp - 1)
    assert [row["pp"] for row in (rows[0], rows[-1])] == ["0", "3"]


def test_a_coordinate_follows_from_the_degree_and_the_stride_of_an_axis():
    mesh = Mesh(pp=2, dp=4, tp=2, ep=4)
    axes = axes_of(mesh)

    for rank in range(mesh.num_ranks):
        at = {name: rank // axis["stride"] % axis["degree"] for name, axis in axes.items()}
        pp, dp, _, tp = mesh.coordinates(rank)
        assert (at["pp"], at["dp"], at["tp"]) == (pp, dp, tp)
        assert at["ep"] == rank % 8 % 4
