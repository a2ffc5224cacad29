"""One rank's part of the model: its pipeline stages.

The layers of each stage are placed, recomputed and sharded as planned.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from parplan.costmodels.host.offload import Offload
from parplan.costmodels.host.state_location import Access
from parplan.costmodels.layers.block_parts import parts_of
from parplan.executor.chunks.chunk_manager import ChunkManager
from parplan.executor.external.external_body import ExternalBody
from parplan.executor.external.external_stage import build_external
from parplan.executor.memory.host_copies import HostCopies, HostOffload
from parplan.executor.memory.host_table import HostTable
from parplan.executor.memory.layer_recompute import recomputed
from parplan.executor.memory.saved_tensors import Recipes
from parplan.executor.models.mixture_of_experts import experts_of, mark_biases
from parplan.executor.models.operators import operator_module
from parplan.executor.models.transformer_layers import (
    Block,
    Embedding,
    Layer,
    Patches,
    build_layer,
    divide_sequences,
)
from parplan.executor.pipeline.borders import Enter, border, entries
from parplan.executor.pipeline.passage import parts_by_name, run_layers
from parplan.executor.placed_layers import (
    PlacedLayer,
    effective_zero,
    local_stages,
    stage_layers,
)
from parplan.executor.rules.divisions import TOKENS, WHOLE
from parplan.executor.sharding.grid_layers import place_on_grid
from parplan.executor.sharding.overlap import (
    PER_LINEAR,
    PER_STAGE,
    LastChoice,
    block_in_halves,
)
from parplan.executor.sharding.place import (
    Axes,
    parameters_over_data,
    parse_placement,
    place_layer,
    place_parameters,
)
from parplan.executor.sharding.rank_place import RankPlace
from parplan.executor.sharding.zero_units import (
    Unit,
    begin_step,
    compute_dtype,
    reduce_gradients,
    shard_root,
    shard_unit,
)
from parplan.executor.tensors import as_dtensor, local
from parplan.planner.plan.plan import Plan
from parplan.profiles.models.operator_graph import LayerKind, ModelPart
from parplan.profiles.models.transformer import build_graph


class Body(nn.Module):
    """The layers of one stage by name, in order.

    parts      the part of the model that each is of
    attended   blocks attend to the output of a tower
    """

    def __init__(
        self, layers: dict[str, nn.Module], parts: Mapping[str, ModelPart], *, attended: bool
    ) -> None:
        super().__init__()
        self.parts, self.attended = parts, attended
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, *before: Tensor, **inputs: Tensor) -> tuple[Tensor, ...]:
        """Returns the stack of tensors behind the layers, from that before them."""
        layers, stack = self.named_children(), list(before)
        return tuple(run_layers(layers, self.parts, stack, inputs, attended=self.attended))

    def tied_weight(self) -> nn.Parameter | None:
        """Returns this stage's copy of the token embedding, if it holds one."""
        if hasattr(self, "embedding"):
            return self.embedding.tokens.weight
        return self.head.table.weight if hasattr(self, "head") else None


class Stage(nn.Module):
    """A stage with local tensors at its borders.

    They are this rank's shard of [micro-batch, sequence, hidden], or ids, or logits. The stage is
    not an FSDP module itself, its `body` is: torch.distributed.pipelining then leaves gathering and
    reducing alone.
    """

    def __init__(
        self,
        body: Body | ExternalBody,
        units: tuple[Unit, ...],
        enter: tuple[Enter, ...],
        begins_model: bool,
        ends_model: bool,
        host: HostCopies | None = None,
    ) -> None:
        super().__init__()
        self.body = body
        self.units = units
        self.enter = enter
        self.begins_model = begins_model
        self.ends_model = ends_model
        self.host = host

    def forward(self, *received: Tensor, **inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        if self.host is not None:
            self.host.begin_pass()
        entered = (enter(x) for enter, x in zip(self.enter, received, strict=True))
        out = self.body(*entered, **inputs)
        stack = out if isinstance(out, tuple) else (out,)
        if self.ends_model:
            return stack[-1]
        return tuple(map(local, stack)) if len(stack) > 1 else local(stack[0])

    def begin_step(self) -> None:
        begin_step(self.body, self.units)

    def reduce_gradients(self, tp_mesh: DeviceMesh | None) -> None:
        reduce_gradients(self.body, self.units, tp_mesh)

    def tied_weight(self) -> nn.Parameter | None:
        """Returns this stage's copy of the token embedding, if it holds one."""
        return self.body.tied_weight()


def build_stages(
    plan: Plan, ranks: RankPlace, seed: int, chunks: ChunkManager | None = None
) -> tuple[Stage, ...]:
    """Builds the stages that this rank runs; without a pipeline all stages are one.

    `chunks` owns the blocks of the stages. Raises ConfigError.
    """
    stages, host = stage_layers(plan), HostCopies(ranks.device)
    if plan.mesh.pp == 1:
        layers = tuple(layer for stage in stages for layer in stage)
        return (_build_stage(plan, ranks, seed, layers, host, chunks),)
    return tuple(
        _build_stage(plan, ranks, seed, stages[k], host, chunks)
        for k in local_stages(plan, ranks.coordinate("pp"))
    )


def _build_stage(
    plan: Plan,
    ranks: RankPlace,
    seed: int,
    placed: tuple[PlacedLayer, ...],
    host: HostCopies,
    chunks: ChunkManager | None,
) -> Stage:
    ends = placed[0].kind is LayerKind.EMBEDDING, placed[-1].kind is LayerKind.HEAD
    if plan.module is not None:
        external = build_external(plan, ranks, seed, _unit_layers(plan, placed))
        return Stage(*external, (lambda x: x,), *ends)
    layers: dict[str, nn.Module] = {}
    units: list[Unit] = []
    tables: list[HostTable] = []
    last_choice = LastChoice()
    for group in _unit_layers(plan, placed):
        recipes = {layer.name: _recipes(plan, layer, ranks, host) for layer in group}
        built = {
            layer.name: _build_placed_layer(plan, ranks, seed, layer, recipes[layer.name])
            for layer in group
        }
        _overlap(plan, ranks, built, recipes, placed, last_choice)
        if len(built) > 1:
            built["head"].table.weight = built["embedding"].tokens.weight
        tables += _host_tables(plan, ranks, built, group[0])
        is_chunked = chunks is not None and group[0].kind is LayerKind.BLOCK
        if is_chunked:
            chunks.take(group[0].block, built[group[0].name])
        whole = {
            layer.name: recomputed(
                built[layer.name], layer.plan.recompute, layer.name, recipes[layer.name]
            )
            for layer in group
        }
        if is_chunked:
            parts = _part_modules(plan, built[group[0].name])
            chunks.watch(group[0].block, whole[group[0].name], parts)
        else:
            table = _tied_table(plan, ranks, group[0], tuple(built.values()))
            apart = (*tables, *(module for unit in table for module in unit.layers))
            units += (*_units(plan, ranks, group[0], tuple(whole.values()), apart), *table)
        layers |= whole
    in_order = {layer.name: layers[layer.name] for layer in placed}
    tower = plan.model.tower
    parts = parts_by_name(plan.model, plan.training)
    body = Body(in_order, parts, attended=tower is not None and tower.attended)
    in_chunks = chunks.parameters if chunks is not None else []
    apart = (*in_chunks, *(table.weight for table in tables))
    shard_root(body, units, ranks.dp_mesh, apart)
    mark_biases(body)
    return Stage(body, tuple(units), entries(plan, ranks, placed[0]), *ends, host)


def _part_modules(plan: Plan, block: nn.Module) -> tuple[tuple[nn.Module, ...], ...]:
    """Returns the modules of the parts of a block in chunks, empty where a block is one access."""
    if plan.chunks is None or plan.chunks.access is Access.BLOCK:
        return ()
    parts = parts_of(build_graph(plan.model, plan.training, 1).block, plan.chunks.access)
    modules = (tuple(operator_module(block, each.name) for each in part) for part in parts)
    return tuple(tuple(each for each in part if each is not None) for part in modules)


def _host_tables(
    plan: Plan, ranks: RankPlace, built: dict[str, nn.Module], placed: PlacedLayer
) -> tuple[HostTable, ...]:
    """Moves the token table to the host where the plan says so, and returns it.

    No unit has the table then. A tied table is a unit of its own instead (`_tied_table`).
    """
    if Offload.LOOKUP not in placed.plan.offload or plan.model.tied_embeddings:
        return ()
    embedding = built[placed.name]
    embedding.tokens = HostTable(
        embedding.tokens.weight, ranks.dp_mesh, compute_dtype(plan.training.precision)
    )
    return (embedding.tokens,)


def _tied_table(
    plan: Plan, ranks: RankPlace, placed: PlacedLayer, built: tuple[nn.Module, ...]
) -> tuple[Unit, ...]:
    """Returns the unit of a tied table whose states are on the host, if the plan says so.

    built    the embedding, the head or both, as they are on this stage
    """
    if Offload.LOOKUP not in placed.plan.offload or not plan.model.tied_embeddings:
        return ()
    tables = tuple(
        layer.tokens if isinstance(layer, Embedding) else layer.lm_head for layer in built
    )
    return (ranks.unit(plan, placed, tables, casts_inputs=False, offloaded=True),)


def _units(
    plan: Plan,
    ranks: RankPlace,
    placed: PlacedLayer,
    layers: tuple[nn.Module, ...],
    tables: tuple[nn.Module, ...],
) -> tuple[Unit, ...]:
    """Returns the sharded unit of `layers` without `tables`, and units inside it.

    Experts get a unit where other ranks hold them than the rest, and so do the operators of a block
    at each lower ZeRO stage.
    """
    experts = _expert_units(plan, ranks, placed, layers)
    (highest, _), *lower = _stage_modules(plan, placed, layers)
    inner = tuple(
        ranks.unit(plan, placed, modules, zero=zero, casts_inputs=False) for zero, modules in lower
    )
    apart = (*tables, *(module for each in (*experts, *inner) for module in each.layers))
    whole = ranks.unit(plan, placed, layers, apart, highest)
    divided = _units_over_data(ranks, layers)
    for each in divided:
        shard_unit(each, plan.training)
    return whole, *experts, *inner, *divided


def _stage_modules(
    plan: Plan, placed: PlacedLayer, layers: tuple[nn.Module, ...]
) -> list[tuple[int, tuple[nn.Module, ...]]]:
    """Returns the ZeRO stages of a layer, the highest first, and the operators at each.

    A layer at one stage is taken as a whole. Only the highest stage frees parameters between the
    passes, so that the unit that it does so for is the layer, whose hooks surround any recompute.
    """
    if not placed.plan.own_zero:
        return [(effective_zero(placed, plan.mesh), layers)]
    (block,) = (module for module in layers[0].modules() if isinstance(module, Layer))
    by_stage: dict[int, list[nn.Module]] = {}
    for name, module in block.named_children():
        if any(True for _ in module.parameters()):
            by_stage.setdefault(effective_zero(placed, plan.mesh, name), []).append(module)
    return [(zero, tuple(modules)) for zero, modules in sorted(by_stage.items(), reverse=True)]


def _units_over_data(ranks: RankPlace, layers: tuple[nn.Module, ...]) -> tuple[Unit, ...]:
    """Returns units of the weights that data-parallel ranks divide, of which each has one holder.

    They are sharded after the unit of their layer, which has their biases.
    """
    if ranks.data_mesh is None:
        return ()
    return tuple(
        Unit(layers=(module,), zero=0, mesh=ranks.data_mesh["copies"], over_data=True)
        for layer in layers
        for module in layer.modules()
        if parameters_over_data(module)
    )


def _expert_units(
    plan: Plan, ranks: RankPlace, placed: PlacedLayer, layers: tuple[nn.Module, ...]
) -> tuple[Unit, ...]:
    """Returns sharded units of the experts that have other copies than other parameters."""
    if ranks.expert_mesh is None:
        return ()
    return tuple(
        ranks.expert_unit(plan, placed, experts)
        for layer in layers
        for experts in experts_of(layer)
    )


def _unit_layers(plan: Plan, placed: tuple[PlacedLayer, ...]) -> list[tuple[PlacedLayer, ...]]:
    """Returns each layer alone, except embedding and head that share one Parameter."""
    ends = tuple(layer for layer in placed if layer.kind is not LayerKind.BLOCK)
    if not plan.model.shares_table or len(ends) < 2:
        return [(layer,) for layer in placed]
    return [ends, *((layer,) for layer in placed if layer.kind is LayerKind.BLOCK)]


def _build_placed_layer(
    plan: Plan, ranks: RankPlace, seed: int, placed: PlacedLayer, recipes: Recipes | None
) -> nn.Module:
    layer = build_layer(
        plan.model, plan.training, placed.kind, placed.index, seed, ranks.device, ranks.expert_ranks
    )
    if ranks.context is not None:
        divide_sequences(layer, ranks.context)
    if isinstance(layer, Patches):
        layer.register_forward_pre_hook(partial(_arrived, plan, ranks))
    if ranks.grid is not None:
        place_on_grid(layer, placed.plan.operators, ranks.grid, placed.name)
        return layer
    level = plan.pipeline.tp_overlap if placed.kind is LayerKind.BLOCK else 0
    both = ranks.both_mesh if placed.plan.divides_over_data else None
    if ranks.tp_mesh is None and both is None:
        return layer
    if level > PER_LINEAR and ranks.tp_mesh is not None:
        place_parameters(layer, placed.plan.operators, ranks.tp_mesh, placed.name)
    else:
        place_layer(
            layer,
            placed.plan.operators,
            Axes(tp=ranks.tp_mesh, both=both),
            placed.name,
            recipes,
            in_halves=level == PER_LINEAR,
        )
    if placed.kind is LayerKind.HEAD and placed.plan.operators["loss"].input not in (
        WHOLE,
        *TOKENS,
    ):
        layer.loss.group = ranks.tp_mesh.get_group()
    if placed.kind is LayerKind.EMBEDDING:
        boundary = parse_placement(border(plan, placed), placed.name)
        layer.register_forward_hook(lambda _, ids, x: x.redistribute(ranks.tp_mesh, boundary))
    return layer


def _arrived(
    plan: Plan, ranks: RankPlace, _: nn.Module, args: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """Returns pixels on the device in the precision of products, a copy that is this pass's own."""
    dtype = compute_dtype(plan.training.precision)
    pixels = (each.to(ranks.device, dtype, copy=True) for each in args)
    if ranks.tp_mesh is None:
        return tuple(pixels)
    return tuple(as_dtensor(each, ranks.tp_mesh) for each in pixels)


def _overlap(
    plan: Plan,
    ranks: RankPlace,
    built: dict[str, nn.Module],
    recipes: dict[str, Recipes | None],
    stage: tuple[PlacedLayer, ...],
    last_choice: LastChoice,
) -> None:
    """Runs the blocks among `built` as two halves, where the plan says so."""
    level = plan.pipeline.tp_overlap
    if level <= PER_LINEAR or ranks.tp_mesh is None:
        return
    following = {before.name: after.kind for before, after in itertools.pairwise(stage)}
    for name, layer in built.items():
        if isinstance(layer, Block):
            hands_on = level == PER_STAGE and following.get(name) is LayerKind.BLOCK
            block_in_halves(
                layer, ranks.tp_mesh, recipes[name] or Recipes(), last_choice, hands_on=hands_on
            )


def _recipes(plan: Plan, placed: PlacedLayer, ranks: RankPlace, host: HostCopies) -> Recipes | None:
    """Returns the recipes of a layer with gathered inputs or saved tensors on the host."""
    if not placed.plan.keep_on_host:
        divided = ranks.tp_mesh is not None or placed.plan.divides_over_data
        return Recipes() if divided else None
    graph = build_graph(plan.model, plan.training, plan.pipeline.micro_batch_size)
    layer = graph.layer_class(graph.key(placed.index))
    layer_plan = placed.plan
    offload = HostOffload(layer_plan.keep_on_host, layer, layer_plan.recompute, host)
    return Recipes(on_host=offload)


def parameters_on_host(stages: Sequence[nn.Module]) -> Iterator[nn.Parameter]:
    """Yields the parameters whose states the host holds: of offloaded units, and token tables."""
    for stage in stages:
        for layer in (layer for unit in stage.units if unit.offloaded for layer in unit.layers):
            yield from layer.parameters()
        for module in stage.modules():
            if isinstance(module, HostTable):
                yield module.weight
