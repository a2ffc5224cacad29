"""Products on a grid of tensor-parallel ranks send the bytes of the closed form (EQUATIONS T7)."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from parplan.costmodels.communication.collectives import Collective
from parplan.costmodels.operators.sharding import GRID
from parplan.costmodels.usage.rank_traffic import rank_traffic
from parplan.executor.checking.dry_run import dry_run
from parplan.executor.checking.parity import run_ranks
from parplan.executor.sharding.rank_place import rank_grid, rank_mesh
from parplan.executor.sharding.summa import COLUMNS, ROWS, GridProduct
from parplan.planner.plan.plan import Plan
from parplan.planner.plan.plan_strategy import prices_of_plan, strategy_of
from tests.helpers.executor_plans import GPT, LLAMA, make_plan

BATCH, SEQUENCE, INPUTS, OUTPUTS = 4, 3, 8, 12


class Sent(TorchDispatchMode):
    """Counts the bytes that this rank sends to others: all but its part of a tensor that is whole.

    The argument that is whole is the output of a gather and the input of a scatter.
    """

    WHOLE = {"_allgather_base_": 0, "_reduce_scatter_base_": 1}  # noqa: RUF012

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.ranks, self.num_bytes = ranks, 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        place = self.WHOLE.get(func.overloadpacket.__name__)
        if place is not None:
            self.num_bytes += args[place].nbytes * (self.ranks - 1) / self.ranks
        return func(*args, **(kwargs or {}))


def product(plan: Plan) -> tuple[float, float]:
    """Returns the bytes that a rank sends in both passes of one product, and its largest error."""
    grid = rank_grid(plan.mesh, rank_mesh(plan.mesh, torch.device("cpu")))
    row, column = grid.mesh.get_local_rank(ROWS), grid.mesh.get_local_rank(COLUMNS)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH, SEQUENCE, INPUTS, generator=generator, requires_grad=True)
    weight = torch.randn(OUTPUTS, INPUTS, generator=generator, requires_grad=True)
    gradient = torch.randn(BATCH, SEQUENCE, OUTPUTS, generator=generator)
    whole = x @ weight.t()
    whole.backward(gradient)

    def tile(tensor: torch.Tensor, *dims: int) -> torch.Tensor:
        by_row = tensor.chunk(plan.mesh.tp_rows, dims[0])[row]
        return by_row.chunk(plan.mesh.tp_columns, dims[1])[column].detach().contiguous()

    parts = tile(x, 0, 2).requires_grad_(), tile(weight, 1, 0).requires_grad_()
    dist.barrier()
    with Sent(2) as sent:
        out = GridProduct.apply(*parts, None, grid)
        out.backward(tile(gradient, 0, 2))
    pairs = ((out.detach(), tile(whole, 0, 2)), (parts[0].grad, tile(x.grad, 0, 2)))
    errors = [(a - b).abs().max() for a, b in (*pairs, (parts[1].grad, tile(weight.grad, 1, 0)))]
    return sent.num_bytes, float(max(errors))


@pytest.mark.multiproc
def test_a_product_on_gloo_sends_three_times_the_parts_of_both_matrices_that_a_rank_lacks():
    (results,) = run_ranks([make_plan(GPT, tp=4, tp_rows=2)], product)
    x_bytes, weight_bytes = 4 * BATCH * SEQUENCE * INPUTS, 4 * OUTPUTS * INPUTS
    expected = 3 * (2 - 1) / 2**2 * (x_bytes + weight_bytes)

    assert [num_bytes for num_bytes, _ in results] == [expected] * 4
    assert max(error for _, error in results) < 1e-5


@pytest.mark.parametrize(
    ("model", "rows", "columns", "recompute"),
    [
        pytest.param(GPT, 2, 2, (), id="tied", marks=pytest.mark.slow),
        pytest.param(LLAMA, 2, 2, "full", id="recomputed"),
        pytest.param(GPT, 2, 2, ("qkv", "norm2", "fc1"), id="listed", marks=pytest.mark.slow),
        pytest.param(GPT, 2, 4, (), id="wide", marks=pytest.mark.slow),
        pytest.param(LLAMA, 4, 2, (), id="high", marks=pytest.mark.slow),
    ],
)
def test_a_step_sends_as_many_bytes_in_as_many_calls_as_predicted(model, rows, columns, recompute):
    plan = make_plan(
        model, tp=rows * columns, tp_rows=rows, recompute=recompute, num_micro_batches=1
    )
    price_cache = prices_of_plan(plan)
    predicted = rank_traffic(strategy_of(plan, price_cache), 0, price_cache)
    counted = {(each.axis, each.kind): each for each in dry_run(plan, 0).use.sent}
    # vectors of norms and biases, which rows share, are in no price
    vectors = counted.pop((GRID[0], Collective.ALL_REDUCE))

    assert counted == {(each.axis, each.kind): each for each in predicted}
    assert vectors.calls == 1
    assert Counter(axis for axis, _ in counted) == {GRID[0]: 2, GRID[1]: 3}
