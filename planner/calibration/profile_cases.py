"""Cases of `plan profile`: kernels that prices of some models need, and figures of the machine.

Sizes for each model:

- micro-batches: powers of two from 1, at most 64 and the global batch, while the saved activations
  of all blocks fit a device; of more than four, the two ends and two between them
- tensor parallel degrees that are legal inside a node; degrees above 1 at the smallest and the
  largest micro-batch alone
- each operator at the sizes of its kernels on one rank: whole, and as Megatron divides it, with and
  without sequence parallelism
- Adam and the norm of the gradients: for a block, the embedding, the smaller of them sharded over
  eight such machines, and the whole model or as much of it as fills half a device with its states
- blocks, which show the time that a step adds to its operators: a launch-bound tiny one with its
  operators, and the model's block at the largest micro-batch

Cases at equal points of equal curves (4 sequences of 8 heads, 8 of 4) are measured once. The most
informative case comes first: figures of the machine, then each case by its kernels' share of the
model's step under assumed prices (no profile decides it). The share is halved for every halving of
the range: smallest and largest, the middle, the quarters. So any beginning of the list makes a
profile that is right about the largest shares.
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
from parplan.planner.candidates.meshes import illegal_tensor_parallel
from parplan.planner.request import MAX_MICRO_BATCH_SIZE
from parplan.profiles.divisors import divisors
from parplan.profiles.machines.curves import memory_bound_s
from parplan.profiles.machines.hardware import Cluster
from parplan.profiles.machines.measurements import Case, CasePass
from parplan.profiles.machines.shipped_profiles import Machine, analytic_profile
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.operator_graph import LayerKind
from parplan.profiles.models.spec import ModelSpec, Norm, Positions, TrainingSpec
from parplan.profiles.models.transformer import build_graph, has_unlike_blocks
from parplan.profiles.units import MIB

CPU_MODELS = ("gpt-tiny",)
GPU_MODELS = ("gpt-1.5b", "llama3-8b")
MICRO_BATCHES = 4
TINY_HIDDEN, TINY_SEQ = 256, 128  # a block that takes less than its launches on any GPU
OF_BLOCKS = 0.2  # worth of a block, as a share of the step: it corrects all of its operators
COPIED_MIB = (256, 16, 1)
MOVED_MIB = (256, 16)
HOST_PARAMETERS = 2**24
MACHINES = 8  # machines like the measured one, over which states may be sharded
ADAM_BYTES = 18  # bytes of a 16-bit parameter with its gradient and states; in fp32 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledWorkload:
    """A model and its training, for which a profile is measured."""

    model: ModelSpec
    training: TrainingSpec


def cases_of(workloads: Sequence[ProfiledWorkload], cluster: Cluster) -> tuple[Case, ...]:
    """Returns the cases to measure on one device of `cluster`, the most informative first.

    Raises ConfigError when the device lacks a workload's precision.
    """
    figures = tuple(
        dict.fromkeys(
            case
            for workload in workloads
            for case in machine_cases(cluster, workload.training.precision.value)
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
    """Returns the workloads that are measured when the user names no model.

    They are gpt-tiny on a CPU, and on a GPU gpt-1.5b and llama3-8b: the widths of most models up
    to 8B lie between theirs. Each model replaces batch and sequence of `training`.
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
    """True if the devices are CPUs, which share the memory of the host."""
    return cluster.device.name == "cpu"


def machine_cases(cluster: Cluster, precision: str) -> tuple[Case, ...]:
    """Returns the cases for figures of the machine; a CPU has no transfers and no host Adam."""
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
    """Returns the micro-batch sizes with the shardings that each is measured under."""
    micro_batches = micro_batch_sizes(workload, cluster)
    ends = sorted({micro_batches[0], micro_batches[-1]})
    layouts = [(size, Sharding()) for size in micro_batches]
    for tp in tensor_parallel_degrees(workload.model, cluster):
        divisible = workload.training.seq_length % tp == 0
        for sequence_parallel in (False, True) if divisible else (False,):
            layouts += [(size, Sharding(tp, sequence_parallel)) for size in ends if tp > 1]
    return tuple(layouts)


def tensor_parallel_degrees(model: ModelSpec, cluster: Cluster) -> tuple[int, ...]:
    """Returns the degrees that are legal inside a node, ascending."""
    return tuple(
        tp
        for tp in divisors(cluster.gpus_per_node)
        if not illegal_tensor_parallel(tp, model, cluster, across_nodes=False)
    )


def micro_batch_sizes(workload: ProfiledWorkload, cluster: Cluster) -> tuple[int, ...]:
    """Returns at most four powers of two whose activations fit a device."""
    price_cache = PriceCache(workload.model, workload.training, _assumed(cluster))
    sizes = [1]
    size = 2
    while size <= min(MAX_MICRO_BATCH_SIZE, workload.training.global_batch_size):
        blocks = price_cache.graph(1).blocks
        saved = sum(price_cache.activations(key, size, Sharding()).saved for key in blocks)
        if saved > cluster.device.memory_bytes:
            break
        sizes.append(size)
        size *= 2
    last = len(sizes) - 1
    spread = sorted({round(i * last / (MICRO_BATCHES - 1)) for i in range(MICRO_BATCHES)})
    return tuple(sizes[i] for i in spread)


def _assumed(cluster: Cluster) -> Machine:
    return Machine(cluster, analytic_profile(cluster.device.name))


def _worth(workload: ProfiledWorkload, cluster: Cluster) -> Iterator[tuple[Case, float]]:
    """Yields the cases of one workload with their worth, as shares of the step.

    The worth of a case that comes more than once adds up.
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
    """Shares of a rank's step by operator and work, at the largest micro-batch, assumed prices."""
    model = workload.model
    training = workload.training
    machine = _assumed(cluster)
    size = micro_batch_sizes(workload, cluster)[-1]
    num_micro_batches = max(1, training.global_batch_size // (size * cluster.num_gpus))
    graph = build_graph(model, training, size)
    seconds: dict[tuple[str, str], float] = defaultdict(float)
    for run in graph.layers:
        for operator in run.layer.operators:
            by_case, _ = kernels_by_case(operator, Sharding(), model, training)
            for case, kernels in by_case.items():
                once_s = sum(kernel_time(kernel, machine, training).value_s for kernel in kernels)
                seconds[operator.name, case.work] += num_micro_batches * run.count * once_s
    # the norm counts as fast as Adam, since it has no price without a measurement
    for case in update_cases(graph.num_parameters, training):
        (n_bytes,) = case.passes[0].sizes
        seconds[case.work, case.work] = memory_bound_s(
            n_bytes, machine.profile.compute.optimizer, cluster.device.memory_bytes_per_s
        )
    whole_s = sum(seconds.values())
    return {key: part_s / whole_s for key, part_s in seconds.items()}


def _halved(cases: set[Case], share: float) -> Iterator[tuple[Case, float]]:
    """Returns the cases of one operator with their worth.

    The smallest and the largest are worth its share of the step, the middle half of it, and so on.
    """
    ordered = sorted(cases, key=lambda case: (math.prod(case.passes[0].sizes), case.key))
    worth = {0: share, len(ordered) - 1: share}
    spans = [(0, len(ordered) - 1)]
    while spans := [(low, high) for low, high in spans if high - low > 1]:
        share /= 2
        middles = [(low, (low + high) // 2, high) for low, high in spans]
        worth |= {middle: share for _, middle, _ in middles}
        spans = [span for low, middle, high in middles for span in ((low, middle), (middle, high))]
    return ((ordered[index], value) for index, value in worth.items())


def _update_cases(workload: ProfiledWorkload, cluster: Cluster) -> Iterator[Case]:
    graph = build_graph(workload.model, workload.training, 1)
    whole = min(graph.num_parameters, cluster.device.memory_bytes // (2 * ADAM_BYTES))
    held = (layer for layer in graph if layer.kind is not LayerKind.HEAD)
    layers = [owned_parameters(layer, Sharding()) for layer in held]
    least = max(1, min(layers) // (MACHINES * cluster.num_gpus))
    for count in sorted({least, *(layer for layer in layers if layer < whole), whole}):
        yield from update_cases(count, workload.training)


def block_cases(workload: ProfiledWorkload, micro_batch_size: int) -> tuple[Case, ...]:
    """Returns the cases of a tiny block with its operators, and of the model's block.

    A mixture of experts has none, nor have blocks of several classes.
    """
    model = workload.model
    precision = workload.training.precision.value
    if model.num_experts or has_unlike_blocks(model, workload.training):
        return ()
    seq_length = workload.training.seq_length
    tiny = tiny_model(model)
    tiny_training = replace(workload.training, seq_length=min(seq_length, TINY_SEQ))
    operators = build_graph(tiny, tiny_training, 1).block.operators
    parts = (
        case
        for operator in operators
        for case in operator_cases(operator, Sharding(), tiny, tiny_training)
    )
    passes = (CasePass(name="forward"), CasePass(name="backward"))
    small = _block_sizes(tiny, 1, tiny_training.seq_length)
    blocks = (small, _block_sizes(model, micro_batch_size, seq_length))
    # one sequence is enough: the costs of layouts do not grow with the tokens
    layouts = (small, _block_sizes(model, 1, tiny_training.seq_length))
    return (
        *dict.fromkeys(parts),
        *(Case(work=BLOCK, sizes=sizes, precision=precision, passes=passes) for sizes in blocks),
        *(Case(work=LAYOUTS, sizes=sizes, precision=precision, passes=()) for sizes in layouts),
    )


def tiny_model(model: ModelSpec) -> ModelSpec:
    """Returns a model of the same kind whose block is bound by its launches."""
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
