"""What `plan profile` measures: every kernel that the planner would price for some models on a
machine, and figures of the machine.

Sizes, of each model:

- micro-batches: powers of two from 1, at most 64 and the global batch, as long as what all blocks
keep of one without recompute fits
  a device; of more than four, the two ends and two between them
- tensor parallel degrees: those that are legal inside a node; above 1 at the smallest and the
largest micro-batch alone
- each operator at the sizes of its kernels on one rank: whole, and as Megatron divides it, with and
without sequence parallelism
- Adam and the norm of the gradients: of a block and of the embedding, of the smaller one sharded
over eight such machines, and of the
  whole model, or as much of it as fills half a device with its states
- blocks, which show what a step adds to its operators: a tiny one, bound by its launches, with its
operators, and the model's own at
  its largest

Cases that are the same points of the same curves (4 sequences of 8 heads, 8 of 4) are one. The
order is that of what a measurement
says: figures of the machine first, then each case by its kernels' share of the model's step under
assumed prices (no profile decides it), halved for every halving of the range: smallest and largest,
the middle, the quarters. Any beginning of the list so makes a profile that is right about what
matters most.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from parplan.costmodels.layers.model_states import owned_parameters
from parplan.costmodels.operators.compute import kernel_time
from parplan.costmodels.operators.sharding import Sharding
from parplan.costmodels.price_cache import PriceCache
from parplan.planner.calibration.in_step import BLOCK, LAYOUTS
from parplan.planner.calibration.operator_cases import (
    kernels_by_case,
    operator_cases,
    update_cases,
)
from parplan.planner.candidates.enumeration import MAX_MICRO_BATCH_SIZE, illegal_tensor_parallel
from parplan.profiles.divisors import divisors
from parplan.profiles.machines.curves import memory_bound_s
from parplan.profiles.machines.hardware import Cluster
from parplan.profiles.machines.measurements import Case, CasePass
from parplan.profiles.machines.shipped_profiles import Machine, analytic_profile
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.operator_graph import LayerKind
from parplan.profiles.models.spec import ModelSpec, Norm, Positions, TrainingSpec
from parplan.profiles.models.transformer import build_graph
from parplan.profiles.units import MIB

CPU_MODELS = ("gpt-tiny",)
GPU_MODELS = ("gpt-1.5b", "llama3-8b")
MICRO_BATCHES = 4
TINY_HIDDEN, TINY_SEQ = 256, 128  # of a block that takes less than its launches on any GPU
OF_BLOCKS = (
    0.2  # what a block says, as a share of the step: it corrects all of its operators at once
)
COPIED_MIB = (256, 16, 1)
MOVED_MIB = (256, 16)
HOST_PARAMETERS = 2**24
MACHINES = 8  # over which states may be sharded, of those that are like the one measured
ADAM_BYTES = 18  # of a parameter in 16 bits with its gradient and states; in fp32 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledWorkload:
    """What is trained, and how: a model that a profile is to be good for."""

    model: ModelSpec
    training: TrainingSpec


def cases_of(workloads: Sequence[ProfiledWorkload], cluster: Cluster) -> tuple[Case, ...]:
    """Everything to measure on one device of `cluster` for `workloads`, most informative first,
    each case once.

    Raises ConfigError where the device lacks a workload's precision.
    """
    figures = tuple(
        dict.fromkeys(
            case
            for one in workloads
            for case in machine_cases(cluster, one.training.precision.value)
        )
    )
    worth: dict[Case, float] = defaultdict(float)
    for workload in workloads:
        for case, share in _worth(workload, cluster):
            worth[case] += share
    points = {
        case.passes: case
        for case in sorted(worth, key=lambda case: worth[case])
        if case.work not in (BLOCK, LAYOUTS)
    }
    return figures + tuple(
        case
        for case in sorted(worth, key=lambda case: -worth[case])
        if case.work in (BLOCK, LAYOUTS) or points[case.passes] == case
    )


def default_workloads(cluster: Cluster, training: TrainingSpec) -> tuple[ProfiledWorkload, ...]:
    """What is measured where the user names no model: gpt-tiny on a CPU; on a GPU gpt-1.5b and
    llama3-8b, whose widths most models up to 8B are between. Batch and sequence of `training` are
    replaced by each model's own.
    """
    entries = map(load_model, CPU_MODELS if on_host(cluster) else GPU_MODELS)
    return tuple(
        ProfiledWorkload(
            model=entry.spec,
            training=replace(
                training, global_batch_size=entry.global_batch_size, seq_length=entry.seq_length
            ),
        )
        for entry in entries
    )


def on_host(cluster: Cluster) -> bool:
    """Whether the devices are CPUs, which have no memory of their own."""
    return cluster.device.name == "cpu"


def machine_cases(cluster: Cluster, precision: str) -> tuple[Case, ...]:
    """Figures of the machine itself. A CPU's memory is its host's: nothing is moved there, and its
    Adam is the optimizer's.
    """
    copies = [("device_copy", (("bytes", size * MIB),)) for size in COPIED_MIB]
    moved = [("transfer", (("bytes", size * MIB),)) for size in MOVED_MIB]
    apart = [] if on_host(cluster) else [*moved, ("host_adam", (("parameters", HOST_PARAMETERS),))]
    works: list[tuple[str, tuple[tuple[str, int], ...]]] = [
        ("launch", ()),
        ("allocator", ()),
        *copies,
        *apart,
    ]
    return tuple(
        Case(work=work, sizes=sizes, precision=precision, passes=()) for work, sizes in works
    )


def layouts_of(workload: ProfiledWorkload, cluster: Cluster) -> tuple[tuple[int, Sharding], ...]:
    """The micro-batch sizes with the shardings that each is measured under."""
    micro_batches = micro_batch_sizes(workload, cluster)
    ends = sorted({micro_batches[0], micro_batches[-1]})
    found = [(size, Sharding()) for size in micro_batches]
    for tp in tensor_parallel_degrees(workload.model, cluster):
        for sequence_parallel in (
            (False, True) if workload.training.seq_length % tp == 0 else (False,)
        ):
            found += [(size, Sharding(tp, sequence_parallel)) for size in ends if tp > 1]
    return tuple(found)


def tensor_parallel_degrees(model: ModelSpec, cluster: Cluster) -> tuple[int, ...]:
    """Those that are legal inside a node, ascending."""
    return tuple(
        tp
        for tp in divisors(cluster.gpus_per_node)
        if not illegal_tensor_parallel(tp, model, cluster, across_nodes=False)
    )


def micro_batch_sizes(workload: ProfiledWorkload, cluster: Cluster) -> tuple[int, ...]:
    """Powers of two that fit a device, at most four."""
    machine = _assumed(cluster)
    price_cache = PriceCache(workload.model, workload.training, machine)
    sizes, size = [1], 2
    while size <= min(MAX_MICRO_BATCH_SIZE, workload.training.global_batch_size):
        saved = (
            price_cache.activations(LayerKind.BLOCK, size, Sharding()).saved
            * workload.model.num_layers
        )
        if saved > cluster.device.memory_bytes:
            break
        sizes.append(size)
        size *= 2
    kept = sorted({round(i * (len(sizes) - 1) / (MICRO_BATCHES - 1)) for i in range(MICRO_BATCHES)})
    return tuple(sizes[i] for i in kept)


def _assumed(cluster: Cluster) -> Machine:
    return Machine(cluster, analytic_profile(cluster.device.name))


def _worth(workload: ProfiledWorkload, cluster: Cluster) -> Iterator[tuple[Case, float]]:
    """The cases of one workload with what each says, as a share of the step. A case may come more
    than once: its worth adds up.
    """
    shares = step_shares(workload, cluster)
    groups: dict[tuple[str, str], set[Case]] = defaultdict(set)
    for size, sharding in layouts_of(workload, cluster):
        for layer in build_graph(workload.model, workload.training, size):
            for operator in layer.operators:
                for case in operator_cases(operator, sharding, workload.model, workload.training):
                    groups[operator.name, case.work].add(case)
    for case in _update_cases(workload, cluster):
        groups[case.work, case.work].add(case)
    for key, cases in groups.items():
        yield from _halved(cases, shares[key])
    for case in block_cases(workload, micro_batch_sizes(workload, cluster)[-1]):
        yield case, OF_BLOCKS


def step_shares(workload: ProfiledWorkload, cluster: Cluster) -> dict[tuple[str, str], float]:
    """By operator and work, the share of one rank's step at the largest micro-batch under assumed
    prices.
    """
    model, training, machine = workload.model, workload.training, _assumed(cluster)
    size = micro_batch_sizes(workload, cluster)[-1]
    num_micro_batches = max(1, training.global_batch_size // (size * cluster.num_gpus))
    graph, seconds = build_graph(model, training, size), defaultdict[tuple[str, str], float](float)
    for layer in graph:
        for operator in layer.operators:
            found, _ = kernels_by_case(operator, Sharding(), model, training)
            for case, kernels in found.items():
                once_s = sum(kernel_time(kernel, machine, training).value_s for kernel in kernels)
                seconds[operator.name, case.work] += num_micro_batches * layer.count * once_s
    for case in update_cases(
        graph.num_parameters, training
    ):  # both as fast as Adam: without a measurement the norm has no price
        (n_bytes,) = case.passes[0].sizes
        seconds[case.work, case.work] = memory_bound_s(
            n_bytes, machine.profile.compute.optimizer, cluster.device.memory_bytes_per_s
        )
    whole_s = sum(seconds.values())
    return {key: part_s / whole_s for key, part_s in seconds.items()}


def _halved(cases: set[Case], share: float) -> Iterator[tuple[Case, float]]:
    """The cases of one operator: its share of the step for the smallest and the largest, half of it
    for the middle, and so on.
    """
    ordered = sorted(cases, key=lambda case: (math.prod(case.passes[0].sizes), case.key))
    worth = {0: share, len(ordered) - 1: share}
    spans = [(0, len(ordered) - 1)]
    while spans := [(low, high) for low, high in spans if high - low > 1]:
        share /= 2
        middles = [(low, (low + high) // 2, high) for low, high in spans]
        worth |= {middle: share for _, middle, _ in middles}
        spans = [span for low, middle, high in middles for span in ((low, middle), (middle, high))]
    return ((ordered[index], found) for index, found in worth.items())


def _update_cases(workload: ProfiledWorkload, cluster: Cluster) -> Iterator[Case]:
    graph = build_graph(workload.model, workload.training, 1)
    whole = min(graph.num_parameters, cluster.device.memory_bytes // (2 * ADAM_BYTES))
    layers = [owned_parameters(layer, Sharding()) for layer in (graph.block, graph.embedding)]
    least = max(1, min(layers) // (MACHINES * cluster.num_gpus))
    for count in sorted({least, *(layer for layer in layers if layer < whole), whole}):
        yield from update_cases(count, workload.training)


def block_cases(workload: ProfiledWorkload, micro_batch_size: int) -> tuple[Case, ...]:
    """A tiny block of the model's kind with the operators in it, and the model's own; none of a
    mixture of experts.
    """
    model, precision = workload.model, workload.training.precision.value
    if model.num_experts:
        return ()
    tiny, training = (
        tiny_model(model),
        replace(workload.training, seq_length=min(workload.training.seq_length, TINY_SEQ)),
    )
    operators = build_graph(tiny, training, 1).block.operators
    parts = (
        case
        for operator in operators
        for case in operator_cases(operator, Sharding(), tiny, training)
    )
    small, passes = (
        _block_sizes(tiny, 1, training.seq_length),
        (CasePass(name="forward"), CasePass(name="backward")),
    )
    blocks = (small, _block_sizes(model, micro_batch_size, workload.training.seq_length))
    layouts = (
        small,
        _block_sizes(model, 1, training.seq_length),
    )  # what they add does not grow with the tokens
    return (
        *dict.fromkeys(parts),
        *(Case(work=BLOCK, sizes=sizes, precision=precision, passes=passes) for sizes in blocks),
        *(Case(work=LAYOUTS, sizes=sizes, precision=precision, passes=()) for sizes in layouts),
    )


def tiny_model(model: ModelSpec) -> ModelSpec:
    """A model of the same kind whose block is bound by its launches."""
    if model.hidden_size <= TINY_HIDDEN:
        return model
    heads = max(1, TINY_HIDDEN // model.head_dim)
    kv_heads = max(
        divisor
        for divisor in divisors(heads)
        if divisor <= max(1, heads * model.num_kv_heads // model.num_heads)
    )
    ffn = round(model.ffn_hidden_size * TINY_HIDDEN / model.hidden_size / 8) * 8
    return replace(
        model, hidden_size=TINY_HIDDEN, num_heads=heads, num_kv_heads=kv_heads, ffn_hidden_size=ffn
    )


def _block_sizes(model: ModelSpec, batch: int, seq: int) -> tuple[tuple[str, int], ...]:
    sizes = {
        "hidden": model.hidden_size,
        "heads": model.num_heads,
        "kv_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "ffn": model.ffn_hidden_size,
        "gated": int(model.gated_ffn),
        "rms": int(model.norm is Norm.RMS_NORM),
        "rotary": int(model.positions is Positions.ROTARY),
        "dropout": int(model.dropout > 0),
        "batch": batch,
        "seq": seq,
    }
    return tuple(sizes.items())
