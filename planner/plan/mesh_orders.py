"""One plan in each order of its mesh axes, to say what the chosen order gains (survey, S5)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from parplan.costmodels.communication.mesh import Axis, MeshOrder, distinct_orders, place
from parplan.planner.plan.plan import Plan
from parplan.planner.plan.reprice import reprice


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderPrice:
    """The price of a plan's choices in one order of its axes.

    chosen         whether it is the order of the plan
    step_s         simulated step
    data_s, p2p_s  its seconds of data parallelism and of messages between stages
    dp_nodes       nodes over which a data-parallel group lies
    """

    order: MeshOrder
    chosen: bool
    step_s: float
    data_s: float
    p2p_s: float
    dp_nodes: int


def order_prices(plan: Plan) -> tuple[OrderPrice, ...]:
    """Returns the price in each order that the stack can start in, that of the plan first.

    Of orders that lie alike on the nodes there is one, so that one price means no choice.
    """
    gpus_per_node = plan.cluster.gpus_per_node
    orders = (plan.mesh.order, *map(MeshOrder, plan.training.stack.mesh_orders))
    if plan.pools:
        orders = orders[:1]  # another would put one stage on several pools
    prices = []
    for mesh in distinct_orders(plan.mesh, orders, plan.cluster.unit_gpus):
        predicted = reprice(replace(plan, mesh=mesh)).plan.predicted
        prices.append(
            OrderPrice(
                order=mesh.order,
                chosen=mesh == plan.mesh,
                step_s=predicted.step_time_s.value,
                data_s=predicted.breakdown.dp_comm_s.value,
                p2p_s=predicted.breakdown.pp_comm_s.value,
                dp_nodes=place(mesh, Axis.DP, gpus_per_node).nodes,
            )
        )
    return tuple(prices)
