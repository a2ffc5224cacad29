"""The baselines by name: the strategies of each system on the same cluster, batch and memory limit.

They are priced like the planner's own. Megatron-LM's flags and their defaults were read in
NVIDIA/Megatron-LM at 000c4ac24f61, megatron/training/arguments.py: --tensor-model-parallel-size 1,
--pipeline-model-parallel-size 1, --num-layers-per-virtual-pipeline-stage None (no interleaving),
--sequence-parallel, --use-distributed-optimizer and --recompute-activations off,
--recompute-granularity None, --account-for-embedding-in-pipeline-split and
--account-for-loss-in-pipeline-split off; --micro-batch-size has no default. Its guide is
docs/user-guide/parallelism-guide.md of the same repository at 157006d6d9bf ("Start Simple": data
parallelism only, tensor parallelism if the model does not fit, pipeline parallelism for very large
models; "Always enable [sequence parallelism] when using TP"; the distributed optimizer "Recommended
for all multi-GPU training"; activation checkpointing "for extreme cases"), with the takeaways of
Narayanan et al. 2021 (arXiv 2104.04473, section 3: tensor parallelism up to the size of a node,
then pipeline parallelism; the best micro-batch depends on the model and is searched). The main
branch has --sequence-parallel and selective recompute since its merge 32132c6e84 (2022-05-20), and
--use-distributed-optimizer since d07d29df14 (2022-06-08): the baselines of 2021 have neither.

Of experts, --expert-tensor-parallel-size is by default the tensor-parallel degree, and training
with tensor parallelism needs --sequence-parallel (megatron/core/transformer/moe at d98e8a64dd).
The README there has the guide: "Prefer EP over TP for Expert Layers", "Ensure EP x TP fits within a
single node", context parallelism for long sequences.

DeepSpeed's pipeline engine refuses ZeRO 2 and 3 (deepspeed/runtime/pipe/engine.py) and partitions
the model by one of its own rules (planner/baselines/deepspeed_stages.py). With Megatron's layers it
recomputes whole layers or nothing and has no sequence parallelism
(--deepspeed-activation-checkpointing of bigscience-workshop/Megatron-DeepSpeed 58d92042,
pretrain_gpt.py with partition_method type:transformer). Its experts are divided over data-parallel
ranks (deepspeed/utils/groups.py at edaa72212) and not with ZeRO 3 (deepspeed/runtime/engine.py:
"Native DeepSpeed MoE is not supported with ZeRO Stage 3"). Without sequence parallelism the planner
has no price of experts whose tokens several ranks hold, so tp is then 1.

torchtitan at 6fc499f6 has sequence parallelism wherever it has tensor parallelism
(torchtitan/models/llama3/infra/parallelize.py), equal stages where the embedding and the loss count
as a layer each or not at all (pipeline_parallel_first_stage_less_layers), and experts that are
divided over all of cp and tp before dp (torchtitan/distributed/parallel_dims.py). Its replicated
data parallelism is left out. FSDP has PyTorch's context parallelism, as torchtitan has.

Merak's runtime is the one of planner/baselines/stage_aware.py on equal stages.

The forms of context parallelism and the division of experts are facts of a stack of each system
(configs/stacks/). For every baseline the stack of the request decides the overlap of communication
with compute, and the speed of kernels. The best plan of Megatron-LM is searched as `--for megatron`
searches it, with its switches (planner/launchers/compare_described.py); "megatron" here is what
stands in its place where the arguments of Megatron-LM do not say the model or the training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.price_cache import PriceCache
from parplan.costmodels.schedules.schedule import Schedule, legal
from parplan.costmodels.strategy import ParallelLayout, Strategy
from parplan.planner.baselines.deepspeed_stages import partitions
from parplan.planner.baselines.first_blocks import least_blocks
from parplan.planner.baselines.merak_runtime import merak_strategies
from parplan.planner.baselines.optimum import Leanest, Optimum, fastest, leanest
from parplan.planner.baselines.uniform_strategies import (
    counted_ends,
    equal_stages,
    megatron_layouts,
    megatron_meshes,
    of_model,
    plain_layouts,
    staged,
    strategies,
    system_meshes,
)
from parplan.planner.candidates.context_forms import without_beaten_forms
from parplan.planner.candidates.enumeration import CandidateSpace
from parplan.planner.deadline import NEVER, Deadline
from parplan.profiles.errors import unknown_name_error
from parplan.profiles.models.transformer import has_unlike_blocks
from parplan.profiles.stack import ContextForm

# the packaged stacks that say how a system divides sequences and experts
MEGATRON = "megatron-core"
MEGATRON_2021 = "megatron-lm-2021"
DEEPSPEED = "megatron-deepspeed"
TITAN = "torchtitan"
LEVELS = tuple(Recompute)
WHOLE_LAYERS = (Recompute.NONE, Recompute.FULL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """The fastest strategy of a system that fits, or else its leanest with the missing memory.

    what         the space in words
    candidates   number of its strategies
    in_order     the user tries them in an order and takes the first that fits; `optimum` counts
                 those alone
    arguments    those with which the system runs the optimum, where its search knows them

    Both `optimum` and `leanest` are None where the space is empty.
    """

    name: str
    what: str
    candidates: int
    in_order: bool = False
    optimum: Optimum | None = None
    leanest: Leanest | None = None
    arguments: tuple[tuple[str, tuple[str, ...]], ...] = ()


@dataclass(frozen=True, slots=True)
class _Space:
    """Groups of strategies in the order of trial: the first group in which one fits is taken.

    by_number    the first blocks of every stage may recompute, any number of them
    """

    groups: tuple[tuple[Strategy, ...], ...]
    by_number: bool = False

    @property
    def strategies(self) -> tuple[Strategy, ...]:
        return tuple(chain.from_iterable(self.groups))

    def answer(
        self, price_cache: PriceCache, limit_bytes: float, deadline: Deadline
    ) -> Optimum | None:
        for group in self.groups:
            optimum = fastest(group, price_cache, limit_bytes, deadline)
            if optimum and self.by_number:
                return _with_numbers(group, optimum, price_cache, limit_bytes, deadline)
            if optimum:
                return optimum
        return None

    def of(self, price_cache: PriceCache) -> _Space:
        """Returns the same strategies with the classes of the blocks of a model."""
        if not has_unlike_blocks(price_cache.model, price_cache.training):
            return self
        return _Space(
            tuple(tuple(of_model(each, price_cache) for each in group) for group in self.groups),
            self.by_number,
        )


def _with_numbers(
    group: Sequence[Strategy],
    optimum: Optimum,
    price_cache: PriceCache,
    limit_bytes: float,
    deadline: Deadline,
) -> Optimum:
    """Returns the best of a group where the first blocks of a stage may recompute alone.

    Such strategies fit only where recompute of all blocks does, which is in the group.
    """
    found = least_blocks(group, price_cache, limit_bytes, optimum.price.step_s)
    below_s = optimum.price.step_s
    better = fastest(found, price_cache, limit_bytes, deadline, below_s)
    if better is None:
        return optimum
    return replace(better, simulated=optimum.simulated + better.simulated)


_Make = Callable[[PriceCache, float], _Space]


def _layouts(meshes: Iterable[Mesh], price_cache: PriceCache) -> tuple[ParallelLayout, ...]:
    """Returns Megatron-LM's layouts of the meshes, less those that another form of cp beats."""
    layouts = chain.from_iterable(
        megatron_layouts(mesh, price_cache.model, price_cache.training) for mesh in meshes
    )
    return without_beaten_forms(CandidateSpace(tuple(layouts), ()), price_cache, NEVER).layouts


def _megatron(chunks: Callable[[ParallelLayout], bool] = lambda _: True) -> _Make:
    """Returns a maker of every layout that `chunks` accepts by its virtual stages."""

    def make(price_cache: PriceCache, _: float) -> _Space:
        layouts = filter(chunks, _layouts(megatron_meshes(MEGATRON, price_cache), price_cache))
        every = strategies(layouts, price_cache.model.num_layers, (0, 1), LEVELS)
        return _Space((every,), by_number=True)

    return make


def _megatron_2021(chunks: Callable[[ParallelLayout], bool]) -> _Make:
    """Returns a maker of the layouts that `chunks` accepts, with what v2.5 had (2021-08-10).

    Every stage has as many blocks as every other, the ends not counted.
    """

    def make(price_cache: PriceCache, _: float) -> _Space:
        num_layers = price_cache.model.num_layers
        meshes = megatron_meshes(MEGATRON_2021, price_cache, ep=(1,))
        layouts = (
            layout
            for layout in filter(chunks, _layouts(meshes, price_cache))
            if not layout.sequence_parallel and num_layers % layout.num_virtual_stages == 0
        )
        return _Space(
            (
                tuple(
                    equal_stages(layout, num_layers, 0, level)
                    for layout in layouts
                    for level in WHOLE_LAYERS
                ),
            )
        )

    return make


def _one_chunk(layout: ParallelLayout) -> bool:
    return layout.virtual_stages == 1


def _more_chunks(layout: ParallelLayout) -> bool:
    return layout.virtual_stages > 1


def _defaults(price_cache: PriceCache, _: float) -> _Space:
    """Returns micro-batch 1 with ascending model parallelism, tensor parallelism first.

    --expert-tensor-parallel-size is that of the other operators unless it is set. Experts under
    tensor parallelism are refused without --sequence-parallel, which is then set.
    """
    model = price_cache.model
    whole = (
        mesh
        for mesh in megatron_meshes(MEGATRON, price_cache, cp=(1,), ep=(1,))
        if model.num_layers % mesh.pp == 0 and (mesh.etp == mesh.tp or not model.num_experts)
    )
    ordered = sorted(whole, key=lambda mesh: (mesh.tp * mesh.pp, mesh.pp))
    plain = (
        layout
        for layout in _layouts(ordered, price_cache)
        if layout.micro_batch_size == 1
        and layout.virtual_stages == 1
        and layout.sequence_parallel == (model.num_experts > 0 and layout.mesh.tp > 1)
    )
    ordered_strategies = strategies(plain, model.num_layers, (0,), (Recompute.NONE,))
    return _Space(tuple((strategy,) for strategy in ordered_strategies))


def _guide(price_cache: PriceCache, _: float) -> _Space:
    """Returns the degrees in the guide's order, all without recompute before any with it.

    Each has its fastest micro-batch, interleaving and form of context parallelism. Experts are
    whole and divided over as many ranks of a node as can be.
    """
    per_node = price_cache.machine.cluster.gpus_per_node
    groups: dict[tuple[int, int, int], dict[ContextForm | None, Mesh]] = {}
    for mesh in megatron_meshes(MEGATRON, price_cache, etp=(1,)):
        if mesh.ep <= per_node:  # the last has the largest ep
            groups.setdefault((mesh.pp, mesh.cp, mesh.tp), {})[mesh.context_form] = mesh
    most = max((tp for _, _, tp in groups), default=1)
    ordered = [groups[key] for key in sorted(groups) if key[:2] == (1, 1) or key[2] == most]
    return _Space(
        tuple(
            strategies(
                (
                    layout
                    for layout in _layouts(meshes.values(), price_cache)
                    if layout.sequence_parallel or layout.mesh.tp == 1
                ),
                price_cache.model.num_layers,
                (1,),
                (level,),
            )
            for level in LEVELS
            for meshes in ordered
        )
    )


def _deepspeed(price_cache: PriceCache, _: float) -> _Space:
    """Returns 1F1B on DeepSpeed's partitions, with at most ZeRO 1 in a pipeline.

    Whole layers are recomputed, or nothing. Divided experts exclude Ulysses and ZeRO 3.
    """

    def zeros(mesh: Mesh) -> tuple[int, ...]:
        if mesh.replicas == 1:
            return (0,)
        if mesh.pp > 1:
            return (0, 1)
        return (0, 1, 2) if mesh.ep > 1 else (0, 1, 2, 3)

    return _Space(
        (
            tuple(
                staged(layout, [(level,) * count for count in blocks], zero)
                for mesh in system_meshes(DEEPSPEED, price_cache)
                if mesh.dp % mesh.ep == 0 and (mesh.cp == 1 or mesh.ep == 1)
                for blocks in partitions(mesh.pp, price_cache)
                for layout in plain_layouts(mesh, price_cache.model, price_cache.training)
                for zero in zeros(mesh)
                for level in WHOLE_LAYERS
            ),
        )
    )


def _torchtitan(price_cache: PriceCache, _: float) -> _Space:
    """Returns torch's schedules on equal stages, sharded as FSDP2 shards, and tp with its sequence.

    Parameters are gathered for every pass, or once a step where they are not resharded.
    """
    meshes = (
        mesh for mesh in megatron_meshes(TITAN, price_cache) if _titan_experts(mesh, price_cache)
    )
    plain = tuple(
        layout
        for layout in _layouts(meshes, price_cache)
        if layout.sequence_parallel or layout.mesh.tp == 1
    )
    v_shaped = (
        replace(layout, schedule=Schedule.ZBV, virtual_stages=2)
        for layout in plain
        if layout.virtual_stages == 1
        and not legal(Schedule.ZBV, layout.mesh.pp, layout.num_micro_batches, 2)
    )
    return _Space((tuple(_titan_strategies((*plain, *v_shaped), price_cache.model.num_layers)),))


def _titan_experts(mesh: Mesh, price_cache: PriceCache) -> bool:
    """Returns whether ep is 1, with experts like other operators, or has all of cp and tp in it."""
    if mesh.ep == 1:
        return mesh.etp == mesh.tp or not price_cache.model.num_experts
    return mesh.ep * mesh.etp % (mesh.cp * mesh.tp) == 0


def _titan_strategies(layouts: Iterable[ParallelLayout], num_layers: int) -> Iterator[Strategy]:
    for layout in layouts:
        split = layout.splits_backward
        for ends in counted_ends(num_layers, layout.num_virtual_stages):
            if ends[0] == ends[1]:
                for zero in (2,) if split else (2, 3):
                    for level in (Recompute.NONE,) if split else LEVELS:
                        yield equal_stages(layout, num_layers, zero, level, ends)


def _merak(price_cache: PriceCache, limit_bytes: float) -> _Space:
    return _Space((merak_strategies(price_cache, limit_bytes),))


def _data_parallel(
    zero: int, levels: Sequence[Recompute] = LEVELS, **pins: tuple[int, ...]
) -> _Make:
    """Returns a maker of data parallelism at a ZeRO stage; `pins` say where cp stays 1."""

    def make(price_cache: PriceCache, _: float) -> _Space:
        meshes = system_meshes(TITAN, price_cache, pp=(1,), tp=(1,), ep=(1,), **pins)
        layouts = _layouts(meshes, price_cache)
        return _Space((strategies(layouts, price_cache.model.num_layers, (zero,), levels),))

    return make


_SYSTEMS: dict[str, tuple[str, _Make]] = {
    "megatron": (
        "Megatron-LM at its fastest: tp in the node, pp of equal stages, interleaving, "
        "sequence parallelism, distributed optimizer, one recompute for all layers or for the "
        "first of every stage, any micro-batch, any ep and etp of experts, any cp of long "
        "sequences",
        _megatron(),
    ),
    "megatron-defaults": (
        "the flags left as they are (no sequence parallelism, distributed optimizer, recompute or "
        "interleaving, ep or cp), micro-batch 1, the least model parallelism that fits, tp first",
        _defaults,
    ),
    "megatron-guide": (
        "Megatron-Core's guide: data parallelism, then tp up to the node, then cp of long "
        "sequences, then pp until it fits, with sequence parallelism and distributed optimizer, "
        "whole experts over the ranks of a node; recompute last; the fastest micro-batch and "
        "interleaving",
        _guide,
    ),
    "megatron-1f1b": (
        "Megatron-LM without interleaving: the same, with one model chunk a rank",
        _megatron(_one_chunk),
    ),
    "megatron-interleaved": (
        "Megatron-LM with interleaving: the same, with two model chunks a rank or more",
        _megatron(_more_chunks),
    ),
    "megatron-1f1b-2021": (
        "Megatron-LM v2.5 without interleaving: tp in the node, pp of equal stages, all layers "
        "recomputed or none, any micro-batch",
        _megatron_2021(_one_chunk),
    ),
    "megatron-interleaved-2021": (
        "Megatron-LM v2.5 with interleaving: the same, with two model chunks a rank or more",
        _megatron_2021(_more_chunks),
    ),
    "deepspeed-3d": (
        "DeepSpeed's 3D parallelism with Megatron's layers: tp in the node, 1F1B on stages cut "
        "uniform, by parameters or by type, ZeRO 1 with a pipeline, whole layers recomputed or "
        "nothing, no sequence parallelism, any micro-batch, ep over dp, or Ulysses beside dp",
        _deepspeed,
    ),
    "torchtitan": (
        "torchtitan: FSDP2 with tp in the node and sequence parallelism, pp of equal stages by "
        "1F1B, interleaved or zero-bubble V, ep over dp, cp and tp, cp of long sequences, "
        "one recompute for all layers, any micro-batch",
        _torchtitan,
    ),
    "merak": (
        "Merak's runtime on equal stages: shifted critical path or 1F1B, recompute of whole "
        "layers by its one knob, the least that fits, sub-pipelined tp in the node, "
        "distributed optimizer, any micro-batch",
        _merak,
    ),
    "zero-1": (
        "data parallelism with ZeRO 1, the fastest micro-batch and recompute",
        _data_parallel(1, cp=(1,)),
    ),
    "zero-2": (
        "data parallelism with ZeRO 2, the fastest micro-batch and recompute",
        _data_parallel(2, cp=(1,)),
    ),
    "zero-3": (
        "data parallelism with ZeRO 3, the fastest micro-batch and recompute",
        _data_parallel(3, cp=(1,)),
    ),
    "fsdp": (
        "ZeRO 3 as FSDP2 is mostly run: whole blocks recomputed, or nothing; "
        "the fastest micro-batch, cp of long sequences",
        _data_parallel(3, WHOLE_LAYERS),
    ),
}
ALL = "all"
GROUPS = {
    "megatron": ("megatron", "megatron-defaults", "megatron-guide"),
    "3d": ("megatron-1f1b", "megatron-interleaved", "deepspeed-3d", "merak"),
    # the others are parts of "megatron"
    ALL: tuple(
        name for name in _SYSTEMS if not name.startswith(("megatron-1f1b", "megatron-interleaved"))
    ),
}


def baseline_names(requested: Iterable[str]) -> tuple[str, ...]:
    """Returns the baselines that `requested` names, each once.

    `megatron` includes its two companions, `3d` is four systems, `all` is every system. Raises
    ConfigError.
    """
    names: dict[str, None] = {}
    for name in requested:
        if name not in _SYSTEMS and name not in GROUPS:
            raise unknown_name_error(
                "baseline", name, (*_SYSTEMS, *(group for group in GROUPS if group not in _SYSTEMS))
            )
        names.update(dict.fromkeys(GROUPS.get(name, (name,))))
    return tuple(names)


def baseline_strategies(
    name: str, price_cache: PriceCache, limit_bytes: float
) -> tuple[Strategy, ...]:
    """Returns every strategy of the system called `name`; stage-aware ones fill `limit_bytes`."""
    return _SYSTEMS[name][1](price_cache, limit_bytes).of(price_cache).strategies


def price_baseline(
    name: str, price_cache: PriceCache, limit_bytes: float, deadline: Deadline = NEVER
) -> Baseline:
    """Prices the system called `name` within `limit_bytes` a device. Raises OutOfTimeError."""
    what, make = _SYSTEMS[name]
    deadline.check()
    space = make(price_cache, limit_bytes).of(price_cache)
    everything = space.strategies
    optimum = space.answer(price_cache, limit_bytes, deadline)
    lean = leanest(everything, price_cache, deadline) if everything and optimum is None else None
    return Baseline(
        name=name,
        what=what,
        candidates=len(everything),
        in_order=len(space.groups) > 1,
        optimum=optimum,
        leanest=lean,
    )
