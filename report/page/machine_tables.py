"""The tables of a page on the machine: which links carry what, assumptions, kinds and sources."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from parplan.costmodels.communication.mesh import Axis, Placement, place
from parplan.costmodels.usage.rank_traffic import SentBytes
from parplan.planner.plan.plan import Plan
from parplan.planner.plan.prediction import Band
from parplan.planner.plan.traced_plan import AnyPlan, TracedPlan
from parplan.profiles.machines.hardware import Cluster, Device, Link, Tier
from parplan.profiles.machines.unequal_cluster import Join, UnequalCluster
from parplan.profiles.units import GB, gib
from parplan.report.names import OPTIMIZER_NAMES, attention_text
from parplan.report.page.figures import Form
from parplan.report.page.mesh_chart import axes_of
from parplan.report.page.page_tables import Cells, FiguredPlan, PageTable, speed_name
from parplan.report.page.reported_plan import ReportedPlan
from parplan.report.plans.coverage_notes import coverage_of_profile, coverage_text
from parplan.report.plans.network_fact import expert_placement, reach
from parplan.report.text import band_text, gib_text

_SECONDS_OF = {"tp": "tp_comm_s", "cp": "tp_comm_s", "ep": "tp_comm_s", "dp": "dp_comm_s"}
_STATES = {
    0: "gradients, all-reduced once a step",
    1: "gradients, reduce-scattered, and parameters, gathered, once a step",
    2: "gradients, reduce-scattered, and parameters, gathered, once a step",
    3: "parameters, gathered for every pass, and gradients, reduce-scattered",
}
KIND_TEXTS = {
    "measured": "read from a table of measurements, or exactly zero",
    "interpolated": "between measured points of such a table",
    "analytic": "from a cost model: datasheets and formulas, with fitted terms",
}


@dataclass(frozen=True, slots=True)
class _Nodes:
    """The equal nodes of a plan's cluster, or of one of its pools.

    key      the place of their figures in the document
    suffix   ` of POOL`, nothing where all nodes are equal
    """

    cluster: Cluster
    key: str = "cluster"
    suffix: str = ""


def _nodes(plan: AnyPlan) -> list[_Nodes]:
    if not isinstance(plan.cluster, UnequalCluster):
        return [_Nodes(plan.cluster)]
    return [
        _Nodes(pool.cluster, f"cluster.pools.{number}", f" of {pool.name}")
        for number, pool in enumerate(plan.cluster.pools)
    ]


def links_table(each: FiguredPlan) -> PageTable | None:
    """Returns for each axis its groups, their slowest link, and what it carries."""
    plan = each.reported.plan
    rows = [
        _link_row(each, name, where, nodes)
        for nodes in _nodes(plan)
        for name, where in _placed(plan, nodes.cluster).items()
    ]
    if isinstance(plan.cluster, UnequalCluster):
        rows += [_join_row(each, number, join) for number, join in enumerate(plan.cluster.joins)]
    if not rows:
        return None
    return PageTable(
        caption="The links of each axis, and what they carry; GiB of the collectives of one GPU",
        heading=(
            "axis",
            "ranks",
            "a group lies",
            "link",
            "GB/s",
            "carries",
            "GiB a step",
            "exposed time",
        ),
        rows=tuple(rows),
        texts=frozenset({"a group lies", "link", "carries"}),
    )


def _placed(plan: AnyPlan, cluster: Cluster) -> dict[str, Placement]:
    """Returns where the groups of each axis lie; a pool with one stage has no pipeline."""
    axes = [Axis.TP, Axis.CP, Axis.DP]
    if cluster.num_gpus > plan.mesh.ranks_per_stage:
        axes.append(Axis.PP)
    placed = {
        axis.value: place(plan.mesh, axis, cluster.gpus_per_node)
        for axis in axes
        if plan.mesh.degree(axis) > 1
    }
    if plan.mesh.ep > 1:
        placed["ep"] = expert_placement(plan.mesh, cluster)
    return placed


def _join_row(each: FiguredPlan, number: int, join: Join) -> Cells:
    rate = "gb_per_s_of_node" if join.total_bytes_per_s is None else "gb_per_s_in_total"
    return (
        "pp",
        each.figures("mesh.pp", Form.COUNT),
        "across pools",
        f"{join.name}, {'of a node' if join.total_bytes_per_s is None else 'in total'}",
        each.figures(f"cluster.joins.{number}.{rate}", Form.NUMBER),
        _carried(each.reported.plan, "pp"),
        "",
        "",
    )


def _link_row(each: FiguredPlan, name: str, where: Placement, nodes: _Nodes) -> Cells:
    cluster = nodes.cluster
    degree = each.figures(f"mesh.{name}", Form.COUNT)
    lies = f"{reach(where, cluster)}: {where.ranks_per_node} on each of {where.nodes} nodes"
    if where.crosses_nodes:
        shared = cluster.group_nic_bytes_per_s(where.ranks_per_node, where.groups_per_node)
        link, bytes_per_s = f"{cluster.nic.name}, a group's share of a node", shared
    else:
        inside = cluster.link_of(where.num_ranks * where.distance)
        link, bytes_per_s = inside.name, inside.bytes_per_s
    field = _SECONDS_OF.get(name, "pp_comm_s")
    sharing = [axis for axis in axes_of(each.reported.plan.mesh) if _SECONDS_OF.get(axis) == field]
    together = f" ({', '.join(sharing)} together)" if len(sharing) > 1 else ""
    return (
        name + nodes.suffix,
        degree,
        lies if where.crosses_nodes else reach(where, cluster),
        link,
        each.figures.derived(bytes_per_s / GB, Form.NUMBER, nodes.key),
        _carried(each.reported.plan, name),
        _most_sent(each, name),
        each.figures(f"predicted.breakdown.{field}.value", Form.SECONDS) + together,
    )


def _most_sent(each: FiguredPlan, axis: str) -> str:
    """Returns the GiB of the pipeline rank that sends most over an axis, empty if not priced."""
    if not each.reported.sent:
        return ""
    most = max(_sent_gib(of_rank, axis) for of_rank in each.reported.sent)
    return each.figures.derived(most, Form.GIB, f"collectives over {axis} as they are priced")


def sent_texts(reported: ReportedPlan) -> dict[str, list[str]]:
    """Returns by axis and pipeline rank what one device sends or receives in a step."""
    return {
        axis: [f"{gib_text(_sent_gib(of_rank, axis))} GiB" for of_rank in reported.sent]
        for axis in (axes_of(reported.plan.mesh) if reported.sent else ())
    }


def _sent_gib(of_rank: Sequence[SentBytes], axis: str) -> float:
    return gib(sum(sent.num_bytes for sent in of_rank if sent.axis == axis))


def _carried(plan: AnyPlan, axis: str) -> str:
    if axis == "tp":
        sequence = isinstance(plan, Plan) and any(
            layer.sequence_parallel for layer in plan.layer_plans.values()
        )
        how = "gathered and reduce-scattered" if sequence else "all-reduced"
        return f"activations of every layer, {how}"
    if axis == "dp":
        return _STATES[_highest_zero(plan)]
    return {
        "cp": "keys and values of attention",
        "ep": "tokens to their experts and back",
        "pp": "activations of each micro-batch, and their gradients",
    }[axis]


def _highest_zero(plan: AnyPlan) -> int:
    if isinstance(plan, TracedPlan):
        return max(stage.zero for stage in plan.stages)
    return max(layer.highest_zero for layer in plan.layer_plans.values())


def assumptions_table(each: FiguredPlan) -> PageTable:
    """Returns the facts that the prices take for granted."""
    return PageTable(
        caption="Assumptions",
        heading=("assumption", "value"),
        rows=tuple(_assumptions(each)),
        texts=frozenset({"value"}),
    )


def _assumptions(each: FiguredPlan) -> Iterator[Cells]:
    plan, figures = each.reported.plan, each.figures
    training = plan.training
    yield "sequences in a step", figures("training.global_batch_size", Form.COUNT)
    yield "length of a sequence", figures("training.seq_length", Form.COUNT)
    products = f", {training.products} products" if training.products else ""
    yield (
        "arithmetic",
        f"{training.precision}{products}; gradients in {training.gradient_precision}",
    )
    yield "optimizer", OPTIMIZER_NAMES[training.optimizer]
    for nodes in _nodes(plan):
        yield f"attention{nodes.suffix}", attention_text(training, nodes.cluster.device)
    hidden = "hidden behind the backward pass" if training.overlap_grad_reduce else "not hidden"
    yield "gradient reduction", hidden
    yield "software stack", training.stack.name
    for nodes in _nodes(plan):
        yield from _of_nodes(each, nodes)
    stack = each.reported.document["training"]["stack"]
    if stack["allocator_share"]:
        share = figures("training.stack.allocator_share", Form.SHARE)
        yield "reserve of the allocator beyond tensors", share


def _of_nodes(each: FiguredPlan, nodes: _Nodes) -> Iterator[Cells]:
    figures, device = each.figures, nodes.cluster.device
    training, of = each.reported.plan.training, nodes.suffix
    memory = figures(f"{nodes.key}.device.memory_gib", Form.GIB)
    yield f"memory of a GPU{of}, GiB", memory
    if training.precision in device.peak_flops_per_s:
        peak = figures(f"{nodes.key}.device.peak_tflops.{training.precision}", Form.NUMBER)
        yield f"peak TFLOP/s{of} at {training.precision}", peak
    for name, unit, key in _rates(nodes.cluster):
        yield f"{name}{of}{unit}", figures(f"{nodes.key}.{key}", Form.NUMBER)


def _rates(cluster: Cluster) -> Iterator[tuple[str, str, str]]:
    link, nic = cluster.intra_node.name, cluster.nic.name
    yield "memory bandwidth of a GPU", ", GB/s", "device.memory_gb_per_s"
    yield f"{link} in a node", ", GB/s", "node.link.gb_per_s"
    yield f"{link} latency", ", us", "node.link.latency_us"
    yield "NICs of a node", "", "node.nics"
    yield f"{nic} of a NIC", ", GB/s", "node.nic.gb_per_s"
    yield f"{nic} latency", ", us", "node.nic.latency_us"


def kinds_table(each: FiguredPlan) -> PageTable:
    """Returns every predicted number of the whole plan with its kind and its error band."""
    figures, predicted = each.figures, each.reported.plan.predicted
    band = predicted.error_band
    time = _band(band.time) if band else "unknown"
    memory = _band(band.memory) if band else "unknown"
    quantities = (
        ("step time", "step_time_s", Form.SECONDS),
        (speed_name(each.reported.plan), "tokens_per_s_per_gpu", Form.COUNT),
        ("MFU", "mfu", Form.SHARE),
    )
    rows: list[Cells] = [
        (
            name,
            figures(f"predicted.{key}.value", form),
            getattr(predicted, key).kind,
            time,
        )
        for name, key, form in quantities
    ]
    rows += [
        (
            f"peak GiB of pipeline rank {index}",
            figures(f"predicted.memory_gib.{index}.total", Form.GIB),
            stage.kind,
            memory,
        )
        for index, stage in enumerate(predicted.memory_gib)
    ]
    redundant = figures("predicted.redundancy_gib.total", Form.GIB)
    rows.append(("redundant GiB", redundant, predicted.redundancy_gib.kind, "not measured"))
    return PageTable(
        caption="Kind and error band of each number; the parts of the step have theirs above",
        heading=("number", "value", "kind", "error band"),
        rows=tuple(rows),
        texts=frozenset({"kind", "error band"}),
    )


def _band(band: Band) -> str:
    stack = "" if band.stack == "all" else f" of {band.stack}"
    return f"{band_text(band.share)}, from {band.rows:,} measured runs{stack}"


def sources(each: FiguredPlan) -> Iterator[tuple[str, str]]:
    """Yields where the numbers of the machine and of the software are from."""
    plan = each.reported.plan
    if isinstance(plan, Plan) and not plan.pools and (measured := coverage_of_profile(plan)):
        yield f"profile of {plan.cluster.device.name}", coverage_text(measured)
    named = [part for nodes in _nodes(plan) for part in _named_parts(nodes.cluster)]
    if isinstance(plan.cluster, UnequalCluster):
        named += plan.cluster.joins
    yield from dict.fromkeys((part.name, part.source) for part in named)
    yield plan.training.stack.name, plan.training.stack.source


def _named_parts(cluster: Cluster) -> Iterator[Device | Link | Tier | Join]:
    yield cluster.device
    yield cluster.intra_node
    yield cluster.nic
    yield from cluster.tiers
