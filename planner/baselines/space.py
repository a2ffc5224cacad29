"""The strategies of other systems: one choice for all layers on equal stages, as Megatron-LM's flags and data parallelism give.

Megatron-LM's rules, read in NVIDIA/Megatron-LM at 000c4ac24f61, megatron/training/arguments.py (validate_args): tp x pp
divides the GPUs; pp divides the layers; with virtual stages, pp x virtual stages divides them and pp > 1. Megatron-Core's
interleaved schedule takes micro-batches in multiples of pp (Narayanan et al. 2021, arXiv 2104.04473, section 2.2), and its
1F1B takes fewer micro-batches than stages, which our own search leaves to GPipe. Where tensor parallelism may go is our
rule: inside a node, dividing heads, ffn width and the vocabulary as the model is padded.

Recompute is none, selective or full as this planner prices them: selective with flash attention recomputes norms and
activation functions, which saves more than Megatron's default of the attention core would. Left out of Megatron's flags:
shorter first and last stages, pipeline layouts, recompute of some layers of a stage, its FSDP, context parallelism.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from costmodels.mesh import Mesh
from costmodels.recompute import Recompute
from costmodels.schedules import Schedule
from costmodels.strategy import Frame, LayerChoice, Strategy
from planner.space import divisors, illegal_tensor_parallel
from profiles.hardware import Cluster
from profiles.model import LayerKind
from profiles.spec import ModelSpec, TrainingSpec


def megatron_meshes(model: ModelSpec, cluster: Cluster, training: TrainingSpec) -> Iterator[Mesh]:
    """The legal degrees, by tp and then by pp, both ascending."""
    for tp in divisors(cluster.num_gpus):
        if illegal_tensor_parallel(tp, model, cluster, across_nodes=False):
            continue
        for pp in divisors(cluster.num_gpus // tp):
            dp = cluster.num_gpus // tp // pp
            if model.num_layers % pp == 0 and training.global_batch_size % dp == 0:
                yield Mesh(pp=pp, dp=dp, tp=tp)


def megatron_frames(mesh: Mesh, model: ModelSpec, training: TrainingSpec) -> Iterator[Frame]:
    """Every micro-batch, number of virtual stages, and sequence parallelism off and on, of one mesh."""
    per_replica = training.global_batch_size // mesh.dp
    for micro_batch_size in divisors(per_replica):
        num_micro_batches = per_replica // micro_batch_size
        interleaves = mesh.pp > 1 and num_micro_batches % mesh.pp == 0
        for virtual_stages in divisors(model.num_layers // mesh.pp) if interleaves else (1,):
            for sequence_parallel in (False, True) if mesh.tp > 1 and training.seq_length % mesh.tp == 0 else (False,):
                yield Frame(
                    mesh=mesh, schedule=Schedule.INTERLEAVED if virtual_stages > 1 else Schedule.ONE_F_ONE_B,
                    virtual_stages=virtual_stages, micro_batch_size=micro_batch_size, num_micro_batches=num_micro_batches,
                    sequence_parallel=sequence_parallel)


def data_parallel_frames(model: ModelSpec, cluster: Cluster, training: TrainingSpec) -> Iterator[Frame]:
    """Every micro-batch on all GPUs as one data-parallel group; none where they do not divide the batch."""
    if training.global_batch_size % cluster.num_gpus == 0:
        yield from megatron_frames(Mesh(pp=1, dp=cluster.num_gpus, tp=1), model, training)


def layer_choice(kind: LayerKind, zero: int, level: Recompute) -> LayerChoice:
    """One layer at a ZeRO stage and a recompute level; embedding and head recompute nothing."""
    return LayerChoice(kind, level if kind is LayerKind.BLOCK else Recompute.NONE, zero)


def equal_stages(frame: Frame, num_layers: int, zero: int, level: Recompute) -> Strategy:
    """All blocks alike, as many on every virtual stage; the embedding before the first and the head after the last."""
    last = frame.num_virtual_stages - 1
    blocks = (layer_choice(LayerKind.BLOCK, zero, level),) * (num_layers // frame.num_virtual_stages)
    first_end, last_end = (layer_choice(kind, zero, level) for kind in (LayerKind.EMBEDDING, LayerKind.HEAD))
    return Strategy(frame=frame, stages=tuple(
        (*[first_end] * (stage == 0), *blocks, *[last_end] * (stage == last)) for stage in range(last + 1)))


def strategies(
    frames: Iterable[Frame], num_layers: int, zeros: Iterable[int], levels: Iterable[Recompute],
) -> tuple[Strategy, ...]:
    """Every frame with every ZeRO stage (without data parallelism there is one: nothing is sharded) and recompute level."""
    zeros, levels = tuple(zeros), tuple(levels)
    return tuple(
        equal_stages(frame, num_layers, zero, level)
        for frame in frames for zero in (zeros if frame.mesh.dp > 1 else zeros[:1]) for level in levels)
