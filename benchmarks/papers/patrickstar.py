"""PatrickStar's published scale and throughput beside predictions.

    # everything, three minutes of two cores
    python -m benchmarks.papers.patrickstar
    python -m benchmarks.papers.patrickstar --part scale --part chunks --json

The parts are PatrickStar's own rules, our search, DeepSpeed-like plans, eviction and chunk sizes.
Nothing is run: published figures (sources in benchmarks/papers/patrickstar_published.py) stand
beside analytic prices. docs/design/patrickstar.md explains the tables and the differences.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import click
from rich.console import Console

from benchmarks.papers import patrickstar_published as published
from benchmarks.papers.patrickstar_published import (
    MEMBERS,
    Largest,
    Rules,
    num_parameters,
    packed,
    searched_size,
    tensors_of,
)
from parplan.commands.options.target_options import TargetOptions
from parplan.commands.requests.machine import TrainingDefaults
from parplan.commands.requests.machine import training_of as requested_training
from parplan.costmodels.chunks.chunk_layout import groups_after
from parplan.costmodels.chunks.group_size import group_size_of
from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.host.offload import Offload, copy_time
from parplan.costmodels.host.state_location import Eviction, StateLocation
from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.schedules.schedule import Schedule
from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.plan.derived import host_gib
from parplan.planner.plan.plan import Plan
from parplan.planner.request import Constraints, PlanRequest, SearchOptions
from parplan.planner.search.estimate import ChunkRequest, UniformChoices, estimate_plan
from parplan.planner.search.find_plan import find_plan
from parplan.planner.search.largest_model import (
    LEVELS,
    find_largest,
    last_that_fits,
    members,
)
from parplan.profiles.errors import InfeasibleError
from parplan.profiles.machines.hardware import Cluster
from parplan.profiles.machines.machine_catalog import load_cluster, with_gpus
from parplan.profiles.models.model_catalog import load_family, load_model
from parplan.profiles.models.spec import ModelSpec, TrainingSpec
from parplan.profiles.units import GB, GIB, MIB, tflops
from parplan.report.searches.largest_table import flops_per_s, peak_gib
from parplan.report.text import gib_text, print_table, say, seconds_text

# Software of the same year with measured kernels: unfused attention, nothing hidden.
STACK = "megatron-deepspeed"
SMALLEST_BATCH = published.BATCHES[0]
FAMILY = "gpt"
FP32_BYTES = 4
NOTES = {
    "scale": (
        "the most blocks of the published model's width, B parameters; published: the "
        "largest that was run, not the limit"
    ),
    "tflops": "TFLOP/s of all GPUs, 8 FLOPs a parameter and token: published / predicted / "
    "predicted with every copy waited for; of 4, 8 and 16 sequences a GPU the fastest; "
    "last columns: mean error of both",
    "search": (
        "the largest member of the family that our search fits, with what it costs; "
        "TFLOP/s of the model, recompute left out"
    ),
    "deepspeed": (
        "the largest member with states on the host as FSDP2 keeps them, ZeRO 2 and 3; "
        "by DeepSpeed's own estimate; published"
    ),
    "eviction": (
        "GB to the device in a step, all blocks at home on the host, by share of their "
        "chunks that finds room"
    ),
    "chunks": (
        "share of chunks that is parameters, by size in Mi elements; search: "
        "PatrickStar's way; ours: the planner's size"
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of one part under their heading."""

    part: str
    heading: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def cluster_of(gpu: str, gpus: int, share: float = 1.0) -> Cluster:
    """Return a published node with `gpus` devices.

    `share` of the memory of devices and hosts is usable, and holds nothing else.
    """
    whole = with_gpus(load_cluster(gpu), gpus)
    device = whole.device
    if share < 1:  # context and communicators are outside the share
        device = replace(device, memory_bytes=round(share * device.memory_bytes), context_bytes=0)
    return replace(whole, device=device, host_memory_bytes=round(share * published.HOST_BYTES[gpu]))


def training_of(cluster: Cluster, batch: int, *, stack: str | None = STACK) -> TrainingSpec:
    """Return fp16 training with fp16 gradients and a global batch of `batch` sequences."""
    target = TargetOptions(precision="fp16", gradient_precision="fp16", stack=stack)
    defaults = TrainingDefaults(global_batch_size=batch, seq_length=1024)
    return requested_training(target, defaults, None, cluster)[0]


def rules_pins(gpus: int, batch: int) -> Constraints:
    """Return the pins of PatrickStar's own rules.

    They are data parallelism alone, one micro-batch, full recompute, and states in chunks on device
    and host.
    """
    return Constraints(
        pp=(1,),
        tp=(1,),
        dp=(gpus,),
        micro_batch_size=(batch,),
        recompute=(Recompute.FULL,),
        megatron_sharding=True,
        offload=(Offload.OPTIMIZER, Offload.PARAMETERS),
    )


def planned(model: ModelSpec, gpu: str, gpus: int, batch: int, share: float) -> Plan | None:
    """Return the plan under PatrickStar's rules, or None if nothing fits.

    batch  sequences a GPU
    """
    cluster = cluster_of(gpu, gpus, share)
    try:
        return find_plan(
            PlanRequest(
                model=model,
                cluster=cluster,
                training=training_of(cluster, batch * gpus),
                constraints=rules_pins(gpus, batch),
                options=SearchOptions(memory_margin=0.0),
            ),
            explain=_nothing,
        )
    except InfeasibleError:
        return None


def _nothing(*_: object) -> InfeasibleError:
    return InfeasibleError("nothing fits")


def most_blocks(
    of_width: Callable[[int], ModelSpec], fits: Callable[[ModelSpec], bool], most: int = 512
) -> float:
    """Return the parameters of the model with the most blocks that fits, or 0."""
    best = last_that_fits(
        lambda index: fits(of_width(index + 1)),
        lambda high, low: high if high >= low else None,
        0,
        most,
    )
    return num_parameters(of_width(best + 1)) if best >= 0 else 0


# Scale


def scale(shares: Sequence[float] = (0.8, 0.9)) -> Table:
    """Return the largest published models beside the closed forms and the planner.

    The planner has PatrickStar's rules and usable shares.
    """
    heading = (
        "node",
        "GPUs",
        "published",
        *(f"{what} {share:g}" for what in ("closed form", "planner") for share in shares),
    )
    rows = []
    for each in published.largest_published():
        label = num_parameters(load_model(MEMBERS[each.label]).spec)
        figures = [
            *(closed_largest(each, share) for share in shares),
            *(planned_largest(each, share) for share in shares),
        ]
        rows.append(
            (
                each.gpu,
                str(each.gpus),
                f"{each.label} ({label / 1e9:.1f})",
                *(_against(value, label) for value in figures),
            )
        )
    return Table(part="scale", heading=heading, rows=tuple(rows))


def closed_largest(each: Largest, share: float, batch: int = 8) -> float:
    """Return the largest model by EQUATIONS O3 alone."""
    rules, cluster = Rules(gpu_share=share, cpu_share=share), cluster_of(each.gpu, each.gpus)

    def fits(model: ModelSpec) -> bool:
        size, utilisation = searched_size(model, each.gpus)
        return published.states_fit(model, cluster, rules, batch, utilisation, size)

    return most_blocks(_of_width(each), fits)


def planned_largest(each: Largest, share: float) -> float:
    """Return the largest model by the search, with the smallest batch of PatrickStar's scripts."""
    return most_blocks(
        _of_width(each),
        lambda model: planned(model, each.gpu, each.gpus, SMALLEST_BATCH, share) is not None,
    )


def _of_width(each: Largest) -> Callable[[int], ModelSpec]:
    width = load_model(MEMBERS[each.label]).spec.hidden_size
    return lambda blocks: load_family(FAMILY).of_width(width, blocks).spec


def _against(value: float, reference: float) -> str:
    return f"{value / 1e9:.1f} ({100 * (value / reference - 1):+.0f} %)"


# Throughput


def throughput(
    gpu: str, labels: Sequence[str], figures: Mapping[int, tuple[float, ...]], share: float
) -> Table:
    """Return PatrickStar's published TFLOP/s beside the planner's under its rules.

    The planner's copies are hidden under compute, and waited for.
    """
    rows = []
    for gpus, row in figures.items():
        by_batch = [_speeds(label, gpu, gpus, share) for label, _ in zip(labels, row, strict=False)]
        cells = [_speed_cell(value, speeds) for value, speeds in zip(row, by_batch, strict=True)]
        errors = [
            _mean_error(row, [speeds and speeds[waited] for speeds in by_batch])
            for waited in (0, 1)
        ]
        rows.append((gpu, str(gpus), *cells, *("" for _ in labels[len(cells) :]), *errors))
    return Table(
        part="tflops", heading=("node", "GPUs", *labels, "hidden", "waited"), rows=tuple(rows)
    )


def _speeds(label: str, gpu: str, gpus: int, share: float) -> tuple[float, float] | None:
    """Return TFLOP/s of the fastest batch, with copies hidden and waited for.

    None if nothing fits or the shape is not known.
    """
    if label not in MEMBERS:
        return None
    model = load_model(MEMBERS[label]).spec
    plans = [
        plan for batch in published.BATCHES if (plan := planned(model, gpu, gpus, batch, share))
    ]
    if not plans:
        return None
    work = [8 * num_parameters(model) * plan.training.tokens_per_step for plan in plans]
    hidden = max(
        tflops(flops / plan.predicted.step_time_s.value)
        for flops, plan in zip(work, plans, strict=True)
    )
    return hidden, max(
        tflops(flops / waited_s(plan)) for flops, plan in zip(work, plans, strict=True)
    )


def waited_s(plan: Plan) -> float:
    """Seconds of the step with more copies, each waited for, as PatrickStar's scripts run it.

    ASYNC_MOVE is 0 in examples/run_transformers.sh. The host has no clean copies (EQUATIONS O4:
    another 2 bytes a parameter at HOST). Parameters updated on the host come in fp32 and are cast
    on the device (patrickstar/ops/chunk_io_buff.py: 2 more at OPTIMIZER).
    """
    if plan.chunks is None:
        return plan.predicted.step_time_s.value
    rank, width = plan.chunks.ranks[0], plan.training.precision.num_bytes
    block_bytes = {
        home: sum(
            group.num_chunks * group.chunk_elements
            for group in plan.chunks.groups
            if group.home is home
        )
        // plan.mesh.dp
        for home in (StateLocation.HOST, StateLocation.OPTIMIZER)
    }
    in_bytes, out_bytes = (
        rank.in_bytes + (FP32_BYTES - width) * block_bytes[StateLocation.OPTIMIZER],
        rank.out_bytes + width * block_bytes[StateLocation.HOST],
    )
    copies_s = (
        copy_time(in_bytes, plan.cluster).value_s
        + copy_time(out_bytes, plan.cluster, to_host=True).value_s
    )
    return plan.predicted.step_time_s.value - plan.predicted.breakdown.host_comm_s.value + copies_s


def _speed_cell(value: float, speeds: tuple[float, float] | None) -> str:
    return (
        f"{value:.0f} / ?" if speeds is None else f"{value:.0f} / {speeds[0]:.0f} / {speeds[1]:.0f}"
    )


def _mean_error(row: Sequence[float], predicted: Sequence[float | None]) -> str:
    """Return the mean of predicted over published, less one."""
    errors = [
        expected / value - 1 for value, expected in zip(row, predicted, strict=True) if expected
    ]
    return f"{100 * sum(errors) / len(errors):+.0f} %"


# Our search


def searched(nodes: Sequence[tuple[str, int]], batch: int = 64) -> Table:
    """Return the largest member that the search fits on whole nodes, without and with the host."""
    heading = (
        "node",
        "GPUs",
        "on the host",
        "largest",
        "step",
        "TFLOP/s",
        "GPU GiB",
        "host GiB",
        "plan",
    )
    rows = []
    for gpu, gpus in nodes:
        cluster = cluster_of(gpu, gpus)
        entries = load_family(FAMILY).members
        request = PlanRequest(
            model=entries[0].spec,
            cluster=cluster,
            training=training_of(cluster, batch, stack="megatron-core"),
        )
        for answer in find_largest(members(entries), request, (LEVELS[0], LEVELS[-1])):
            rows.append(
                (gpu, str(gpus), "all" if answer.offload else "nothing", *_plan_cells(answer.plan))
            )
    return Table(part="search", heading=heading, rows=tuple(rows))


def _plan_cells(plan: Plan | None) -> tuple[str, ...]:
    if plan is None:
        return ("none", "", "", "", "", "")
    return (
        plan.model.name,
        seconds_text(plan.predicted.step_time_s.value),
        f"{tflops(flops_per_s(plan)):,.0f}",
        gib_text(peak_gib(plan)),
        gib_text(host_gib(plan)),
        (
            f"{plan.mesh}, micro-batch {plan.pipeline.micro_batch_size} x "
            f"{plan.pipeline.num_micro_batches}"
        ),
    )


# DeepSpeed


def deepspeed() -> Table:
    """Return the largest members with states on the host in whole layers, as FSDP2 holds them.

    The table has ZeRO 2 and 3.
    """
    heading = (
        "node",
        "GPUs",
        "ZeRO 2",
        "step",
        "ZeRO 3",
        "step",
        "its estimate, 2",
        "3",
        "published DeepSpeed",
    )
    nodes = [("v100-32gb", gpus) for gpus in published.PATRICKSTAR_V100] + [
        ("a100-40gb", gpus) for gpus in published.PATRICKSTAR_A100
    ]
    rows = []
    for gpu, gpus in nodes:
        plans = [_states_on_host(gpu, gpus, zero) for zero in (2, 3)]
        cells = [cell for plan in plans for cell in _largest_cells(plan)]
        rows.append(
            (
                gpu,
                str(gpus),
                *cells,
                *(_estimated(gpu, gpus, zero) for zero in (2, 3)),
                _deepspeed_text(gpu, gpus),
            )
        )
    return Table(part="deepspeed", heading=heading, rows=tuple(rows))


def _estimated(gpu: str, gpus: int, zero: int) -> str:
    """Return the largest member that fits by DeepSpeed's own estimate of model states."""
    fitting = [
        entry.spec.name
        for entry in load_family(FAMILY).members
        if published.deepspeed_fits(entry.spec, cluster_of(gpu, gpus), zero)
    ]
    return fitting[-1] if fitting else "none"


def _largest_cells(plan: Plan | None) -> tuple[str, str]:
    return (
        ("none", "")
        if plan is None
        else (plan.model.name, seconds_text(plan.predicted.step_time_s.value))
    )


def _deepspeed_text(gpu: str, gpus: int) -> str:
    if gpu == "v100-32gb":
        return published.DEEPSPEED_V100_LARGEST[gpus] + (
            f", {published.DEEPSPEED_V100_LARGEST_TP} with model parallelism"
            if gpus == max(published.DEEPSPEED_V100_LARGEST)
            else ""
        )
    return published.A100[len(published.DEEPSPEED_A100[gpus]) - 1]


def _states_on_host(gpu: str, gpus: int, zero: int) -> Plan | None:
    """Return the plan of the largest member that fits."""
    sizes = members(load_family(FAMILY).members)
    plans: dict[int, Plan] = {}

    def fits(index: int) -> bool:
        plan = _offloaded(sizes.of(index).spec, gpu, gpus, zero)
        if plan is not None:
            plans[index] = plan
        return plan is not None

    best = last_that_fits(fits, lambda high, low: high if high >= low else None, 0, sizes.count)
    return plans.get(best)


def _offloaded(model: ModelSpec, gpu: str, gpus: int, zero: int) -> Plan | None:
    cluster = cluster_of(gpu, gpus)
    layout = _frame(Mesh(pp=1, dp=gpus, tp=1), SMALLEST_BATCH, 1)
    try:
        plan = estimate_plan(
            PlanRequest(
                model=model,
                cluster=cluster,
                training=training_of(cluster, SMALLEST_BATCH * gpus, stack="parplan"),
            ),
            layout,
            UniformChoices(zero=zero, recompute=Recompute.FULL, offload=(Offload.STATES,)),
        )
    except InfeasibleError:
        return None
    return plan if peak_gib(plan) <= cluster.device.memory_bytes / GIB else None


def _frame(
    mesh: Mesh,
    micro_batch_size: int,
    num_micro_batches: int,
    schedule: Schedule = Schedule.ONE_F_ONE_B,
) -> ParallelLayout:
    return ParallelLayout(
        mesh=mesh,
        schedule=schedule,
        virtual_stages=1,
        micro_batch_size=micro_batch_size,
        num_micro_batches=num_micro_batches,
        sequence_parallel=False,
    )


# Eviction


def eviction(
    model_name: str = "gpt-2b", rooms: Sequence[float] = (0, 0.1, 0.25, 0.5, 0.75)
) -> Table:
    """Return bytes copied to the first pipeline rank in a step, by policy and budget."""
    cases = [
        (1, Schedule.ONE_F_ONE_B, 1),
        (1, Schedule.ONE_F_ONE_B, 4),
        (2, Schedule.ONE_F_ONE_B, 8),
        (2, Schedule.GPIPE, 8),
    ]
    heading = ("schedule", "micro-batches", "policy", *(f"{100 * room:.0f} %" for room in rooms))
    rows = []
    for pp, schedule, num_micro_batches in cases:
        budgets = _budgets(model_name, pp, schedule, num_micro_batches, rooms)
        name = f"{schedule}, pp {pp}" if pp > 1 else "no pipeline"
        for policy in Eviction:
            moved = [
                _moved(model_name, pp, schedule, num_micro_batches, policy, budget)[0]
                for budget in budgets
            ]
            rows.append(
                (
                    name,
                    str(num_micro_batches),
                    str(policy),
                    *(f"{value / GB:.2f}" for value in moved),
                )
            )
    return Table(part="eviction", heading=heading, rows=tuple(rows))


def _moved(
    model_name: str,
    pp: int,
    schedule: Schedule,
    num_micro_batches: int,
    policy: Eviction,
    budget: int | None,
) -> tuple[int, int, int]:
    """Return bytes to the device in a step, the smallest budget, and bytes of all parameters.

    The parameters are those of the rank's blocks.
    """
    model, cluster = load_model(model_name).spec, cluster_of("v100-32gb", pp)
    request = ChunkRequest(
        host_blocks=model.num_layers, optimizer_blocks=0, eviction=policy, device_bytes=budget
    )
    plan = estimate_plan(
        PlanRequest(
            model=model,
            cluster=cluster,
            training=training_of(cluster, num_micro_batches, stack="parplan"),
        ),
        _frame(Mesh(pp=pp, dp=1, tp=1), 1, num_micro_batches, schedule),
        UniformChoices(recompute=Recompute.FULL, chunks=request),
    )
    assert plan.chunks is not None
    rank, groups = plan.chunks.ranks[0], [group for group in plan.chunks.groups if group.stage == 0]
    smallest = max(each.smallest_bytes for each in plan.chunks.ranks)
    return (
        rank.in_bytes,
        smallest,
        sum(2 * group.num_chunks * group.chunk_elements for group in groups),
    )


def _budgets(
    model_name: str, pp: int, schedule: Schedule, num_micro_batches: int, rooms: Iterable[float]
) -> list[int]:
    """Return budgets from the smallest to one with room for all parameters beside it."""
    _, smallest, parameters = _moved(
        model_name, pp, schedule, num_micro_batches, Eviction.OPT, None
    )
    return [smallest + int(room * parameters) for room in rooms]


# Chunk sizes


def chunk_sizes(sizes: Sequence[int] = (64, 128, 256, 288, 384), ranks: int = 8) -> Table:
    """Return utilisation of all blocks' chunks by size."""
    heading = ("model", "largest tensor", *(f"{size}" for size in sizes), "search", "", "ours", "")
    rows = []
    for name in MEMBERS.values():
        model = load_model(name).spec
        block = tuple(tensor.elements for tensor in tensors_of(model))
        at_sizes = [
            f"{100 * packed(model, size * MIB, ranks):.0f} %" if size * MIB >= max(block) else "-"
            for size in sizes
        ]
        chosen, share = searched_size(model, ranks)
        group = group_size_of(block, model.num_layers, ranks, load_cluster("a100-40gb"))
        used = (
            model.num_layers
            * sum(block)
            / (groups_after(block, model.num_layers, group, ranks)[-1] * group)
        )
        rows.append(
            (
                name,
                f"{max(block) / MIB:.1f}",
                *at_sizes,
                f"{chosen / MIB:.0f}",
                f"{100 * share:.1f} %",
                f"{group / ranks / MIB:.1f}",
                f"{100 * used:.1f} %",
            )
        )
    return Table(part="chunks", heading=heading, rows=tuple(rows))


PARTS: dict[str, Callable[[], Iterator[Table]]] = {
    "scale": lambda: iter([scale()]),
    "tflops": lambda: iter(
        [
            throughput("a100-40gb", published.A100, published.PATRICKSTAR_A100, 0.9),
            throughput("v100-32gb", published.V100, published.PATRICKSTAR_V100, 0.9),
        ]
    ),
    "search": lambda: iter([searched((("v100-32gb", 8), ("a100-40gb", 8), ("a100-40gb", 32)))]),
    "deepspeed": lambda: iter([deepspeed()]),
    "eviction": lambda: iter([eviction()]),
    "chunks": lambda: iter([chunk_sizes()]),
}


@click.command()
@click.option(
    "--part",
    "parts",
    type=click.Choice(tuple(PARTS)),
    multiple=True,
    help="Only this one; may be repeated.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON and nothing else.")
def main(parts: Sequence[str], as_json: bool) -> None:
    """Print PatrickStar's published figures beside predictions."""
    out, documents = Console(highlight=False, markup=False, emoji=False, width=160), []
    for part in parts or tuple(PARTS):
        started_s = time.monotonic()
        for table in PARTS[part]():
            documents.append(_document(table))
            if not as_json:
                _print(table, out)
        if not as_json:
            say(out, f"  {time.monotonic() - started_s:.1f} s\n", "dim")
    if as_json:
        click.echo(json.dumps({"kind": "analytic", "tables": documents}, indent=2))


def _print(table: Table, out: Console) -> None:
    say(out, f"{table.part}: {NOTES[table.part]}", "bold")
    print_table(
        out,
        table.heading,
        table.rows,
        left=("node", "schedule", "policy", "model", "plan", "on the host", "largest"),
    )


def _document(table: Table) -> dict[str, Any]:
    return {
        "part": table.part,
        "what": NOTES[table.part],
        "heading": table.heading,
        "rows": table.rows,
    }


if __name__ == "__main__":
    main()
