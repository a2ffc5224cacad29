"""The strategies of other systems: one choice for all layers on equal stages.

They are those of Megatron-LM's flags and of data parallelism. Megatron-LM's rules were read in
NVIDIA/Megatron-LM at 000c4ac24f61, megatron/training/arguments.py (validate_args). tp x pp divides
the GPUs. pp x virtual stages divides the layers, to which --account-for-embedding-in-pipeline-split
and --account-for-loss-in-pipeline-split add one each; then the first and the last stage have a
block less. Virtual stages need pp > 1. Megatron-Core's interleaved schedule takes micro-batches in
multiples of pp (Narayanan et al. 2021, arXiv 2104.04473, section 2.2). Its 1F1B accepts fewer
micro-batches than stages, for which the planner's search has GPipe. The range of tensor parallelism
is a rule of this planner: inside a node, dividing heads, ffn width and the padded vocabulary.
Sequences and experts are divided as the planner divides them, in the forms that the system's stack
has (configs/stacks/): context parallelism and micro-batches are tried where the planner's search
tries them. The layers of a tower are on the first stage, before its blocks, and are not among those
that stages divide: the first stage of a LLaVAModel has its vision model
(megatron/core/models/multimodal/llava_model.py, `add_encoder`).

Recompute is none, selective or full as this planner prices them: selective recompute with flash
attention recomputes norms and activation functions, which saves more than Megatron's default, the
attention core. Some of Megatron's options are left out: first and last stages of other lengths,
pipeline layouts, its FSDP. The first blocks of a stage may recompute alone (first_blocks.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

from parplan.costmodels.communication.mesh import Mesh, MeshOrder
from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.price_cache import PriceCache
from parplan.costmodels.schedules.schedule import Schedule
from parplan.costmodels.strategy import LayerChoice, ParallelLayout, Strategy
from parplan.planner.candidates.enumeration import illegal_tokens
from parplan.planner.candidates.meshes import meshes
from parplan.planner.request import MAX_MICRO_BATCH_SIZE, Constraints, PlanRequest
from parplan.planner.stage_columns.block_counts import with_classes
from parplan.profiles.divisors import divisors
from parplan.profiles.machines.machine_catalog import load_stack
from parplan.profiles.models.operator_graph import LayerKind
from parplan.profiles.models.spec import ModelSpec, TrainingSpec

NEITHER = (0, 0)
# 1 where the embedding, and where the loss, counts as a layer of the pipeline
COUNTED = (NEITHER, (1, 0), (0, 1), (1, 1))


def counted_ends(num_layers: int, num_stages: int) -> tuple[tuple[int, int], ...]:
    """Returns the members of `COUNTED` with which `num_stages` stages are equal."""
    if num_stages == 1:
        return (NEITHER,)
    return tuple(ends for ends in COUNTED if (num_layers + sum(ends)) % num_stages == 0)


def system_meshes(stack: str, price_cache: PriceCache, **pins: tuple[int, ...]) -> Iterator[Mesh]:
    """Yields the legal degrees of a system, by tp, then pp, cp and ep, all ascending.

    stack    the packaged stack whose facts say how the system divides sequences and experts
    pins     allowed degrees, of all axes or of some
    """
    training = price_cache.training
    request = PlanRequest(
        model=price_cache.model,
        cluster=price_cache.machine.cluster,
        training=replace(training, stack=load_stack(stack)),
        constraints=Constraints(mesh_order=(MeshOrder.PP_DP_TP,), **pins),  # type: ignore[arg-type]
    )
    for mesh in meshes(request):
        if isinstance(mesh, Mesh) and training.global_batch_size % mesh.dp == 0:
            yield mesh


def megatron_meshes(stack: str, price_cache: PriceCache, **pins: tuple[int, ...]) -> Iterator[Mesh]:
    """Yields the degrees of a system whose stages are equal, like `system_meshes`."""
    num_layers = price_cache.model.num_layers
    for mesh in system_meshes(stack, price_cache, **pins):
        if counted_ends(num_layers, mesh.pp):
            yield mesh


def megatron_layouts(
    mesh: Mesh, model: ModelSpec, training: TrainingSpec
) -> Iterator[ParallelLayout]:
    """Yields the layouts of one mesh, with sequence parallelism off and on where it is legal."""
    for plain in _plain(mesh, training):
        for virtual_stages in _virtual_stages(mesh, model, plain.num_micro_batches):
            for sequence_parallel in (False, True):
                layout = replace(
                    plain,
                    schedule=Schedule.INTERLEAVED if virtual_stages > 1 else Schedule.ONE_F_ONE_B,
                    virtual_stages=virtual_stages,
                    sequence_parallel=sequence_parallel,
                )
                if not illegal_tokens(layout, model, training):
                    yield layout


def plain_layouts(mesh: Mesh, model: ModelSpec, training: TrainingSpec) -> Iterator[ParallelLayout]:
    """Yields 1F1B with every micro-batch, without sequence parallelism, where that is legal."""
    for layout in _plain(mesh, training):
        if not illegal_tokens(layout, model, training):
            yield layout


def _plain(mesh: Mesh, training: TrainingSpec) -> Iterator[ParallelLayout]:
    per_replica = training.global_batch_size // mesh.dp
    sizes = (size for size in divisors(per_replica) if size <= MAX_MICRO_BATCH_SIZE)
    for micro_batch_size in sizes:
        yield ParallelLayout(
            mesh=mesh,
            schedule=Schedule.ONE_F_ONE_B,
            virtual_stages=1,
            micro_batch_size=micro_batch_size,
            num_micro_batches=per_replica // micro_batch_size,
            sequence_parallel=False,
        )


def _virtual_stages(mesh: Mesh, model: ModelSpec, num_micro_batches: int) -> Iterator[int]:
    interleaves = mesh.pp > 1 and num_micro_batches % mesh.pp == 0
    most = -(-(model.num_layers + max(map(sum, COUNTED))) // mesh.pp) if interleaves else 1
    yield from (v for v in range(1, most + 1) if counted_ends(model.num_layers, mesh.pp * v))


@lru_cache(maxsize=64)
def layer_choice(kind: LayerKind, zero: int, level: Recompute) -> LayerChoice:
    """Returns a layer at a ZeRO stage and a recompute level, which is for blocks alone."""
    return LayerChoice(kind, level if kind.role is LayerKind.BLOCK else Recompute.NONE, zero)


def equal_stages(
    layout: ParallelLayout,
    num_layers: int,
    zero: int,
    level: Recompute,
    ends: tuple[int, int] = NEITHER,
) -> Strategy:
    """Returns a strategy whose blocks are all alike, on equal stages.

    The embedding comes before the first stage and the head after the last. Each takes the place of
    a block where `ends` counts it.
    """
    return staged(
        layout, [(level,) * count for count in equal_blocks(layout, num_layers, ends)], zero
    )


def equal_blocks(
    layout: ParallelLayout, num_layers: int, ends: tuple[int, int] = NEITHER
) -> tuple[int, ...]:
    """Returns the blocks of every virtual stage; an end that counts takes the place of one."""
    blocks = [(num_layers + sum(ends)) // layout.num_virtual_stages] * layout.num_virtual_stages
    blocks[0] -= ends[0]
    blocks[-1] -= ends[1]
    return tuple(blocks)


def staged(layout: ParallelLayout, levels: Sequence[Sequence[Recompute]], zero: int) -> Strategy:
    """Returns the strategy with recompute `levels[k]` of the blocks of virtual stage k."""
    alike = {
        stage: tuple(layer_choice(LayerKind.BLOCK, zero, level) for level in stage)
        for stage in map(tuple, levels)
    }
    stages = [alike[tuple(stage)] for stage in levels]
    stages[0] = (layer_choice(LayerKind.EMBEDDING, zero, Recompute.NONE), *stages[0])
    stages[-1] = (*stages[-1], layer_choice(LayerKind.HEAD, zero, Recompute.NONE))
    return Strategy(layout=layout, stages=tuple(stages))


def of_model(strategy: Strategy, price_cache: PriceCache) -> Strategy:
    """Returns a strategy of a language model's blocks with its tower, and with their classes.

    The layers of the tower, where the strategy lacks them, run as the first block of the first
    stage does.
    """
    num_blocks = sum(map(len, strategy.stages)) - len((LayerKind.EMBEDDING, LayerKind.HEAD))
    tower_layers = price_cache.model.num_blocks - num_blocks
    if tower_layers:
        embedding, *rest = strategy.stages[0]
        first = (embedding, *rest[:1] * tower_layers, *rest)
        strategy = replace(strategy, stages=(first, *strategy.stages[1:]))
    return with_classes(strategy, price_cache)


def strategies(
    layouts: Iterable[ParallelLayout],
    num_layers: int,
    zeros: Iterable[int],
    levels: Iterable[Recompute],
) -> tuple[Strategy, ...]:
    """Returns every layout with every ZeRO stage (one without replicas), recompute and ends."""
    zeros = tuple(zeros)
    levels = tuple(levels)
    return tuple(
        equal_stages(layout, num_layers, zero, level, ends)
        for layout in layouts
        for ends in counted_ends(num_layers, layout.num_virtual_stages)
        for zero in (zeros if layout.mesh.replicas > 1 else zeros[:1])
        for level in levels
    )
