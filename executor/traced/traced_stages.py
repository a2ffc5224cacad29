"""This rank's stages of a traced module, with their parameters, recompute and ZeRO sharding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from parplan.executor.chunks.chunk_manager import ChunkManager
from parplan.executor.memory.early_recompute import checkpointed
from parplan.executor.sharding.rank_place import RankPlace
from parplan.executor.sharding.zero_units import (
    Unit,
    begin_step,
    reduce_gradients,
    shard_root,
    shard_unit,
)
from parplan.executor.traced.calls_again import calls_again
from parplan.executor.traced.division import Division
from parplan.executor.traced.program_cut import ShardCut, StageCut, check_recompute
from parplan.executor.traced.shard_module import ShardModule
from parplan.executor.traced.stage_values import OpenedModule
from parplan.planner.plan.traced_plan import TracedPlan
from parplan.profiles.errors import ConfigError
from parplan.profiles.tracing.program import PARAMETER, Program

_BATCH = "batch."


def argument_names(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The batch under names that no argument of the pipeline's runtime has."""
    return {f"{_BATCH}{key}": value for key, value in batch.items()}


class TracedBody(nn.Module):
    """The shards of one stage in order.

    `forward` takes the values received from the previous stage and the batch by key; it returns the
    values that the next stage needs, or the loss.
    """

    def __init__(
        self, cut: StageCut, constants: ShardModule, shards: Mapping[str, nn.Module], loss: fx.Node
    ) -> None:
        super().__init__()
        self.cut = cut
        self.constants = constants
        for name, shard in shards.items():
            self.add_module(name, shard)
        self._runs = tuple(zip(cut.shards, shards.values(), strict=True))
        self._gives = cut.sends or (loss,)
        self._drops = tuple(_drops(cut, set(self._gives)))

    def forward(self, *received: Tensor, **batch: Tensor) -> tuple[Tensor, ...]:
        known: dict[fx.Node, Tensor] = dict(zip(self.cut.receives, received, strict=True))
        del received
        with torch.no_grad():
            _run(self.cut.constants, self.constants, known, batch)
        for (shard, module), drops in zip(self._runs, self._drops, strict=True):
            _run(shard, module, known, batch)
            for node in drops:
                known.pop(node, None)
        return tuple(known[node].contiguous() for node in self._gives)


class TracedStage(nn.Module):
    """A stage for torch.distributed.pipelining.

    Its `body` is the FSDP module, as in parplan.executor.pipeline.stages.
    """

    def __init__(
        self, body: TracedBody, units: tuple[Unit, ...], shards: Sequence[ShardModule], index: int
    ) -> None:
        super().__init__()
        self.body = body
        self.units = units
        self.index = index
        self._shards = tuple(shards)  # a tuple, so that torch does not register them again

    def forward(self, *received: Tensor, **batch: Tensor) -> Any:
        """Runs the stage; the keys of `batch` are those of `argument_names`."""
        out = self.body(
            *received, **{key.removeprefix(_BATCH): value for key, value in batch.items()}
        )
        return out if self.body.cut.sends else out[0]

    @property
    def ends_model(self) -> bool:
        return not self.body.cut.sends

    def begin_step(self) -> None:
        begin_step(self.body, self.units)

    def reduce_gradients(self) -> None:
        reduce_gradients(self.body, self.units, None)

    def named(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields the parameters by their names in the user's module, each once."""
        yield from dict(pair for shard in self._shards for pair in shard.named()).items()

    def counted(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the buffers that its calls write into."""
        return (pair for shard in self._shards for pair in shard.counted())


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSetting:
    """The place and the helpers that all stages of a rank share.

    division   of the tensor-parallel ranks, None where there is one
    chunks     hold the states of shards, None in a plan without chunks
    """

    ranks: RankPlace
    division: Division | None = None
    chunks: ChunkManager | None = None


def build_stage(
    plan: TracedPlan,
    index: int,
    cut: StageCut,
    program: Program,
    opened: OpenedModule,
    setting: StageSetting,
) -> TracedStage:
    """Builds stage `index` of the plan with the values of its parameters. Raises ConfigError."""
    ranks, division = setting.ranks, setting.division
    chunks = setting.chunks
    planned, zero = plan.stages[index], zero_of(plan, index)
    values: dict[str, Tensor] = dict(program.constants)
    values.update(
        {name: buffer.to(ranks.device) for name, buffer in opened.workload.module.named_buffers()}
    )
    shards: dict[int, ShardModule] = {}
    modules: dict[int, nn.Module] = {}
    units = []
    for group in _groups(cut):
        parameters = {
            name: _on(opened.value(name), ranks.device)
            for place in group
            for name in _parameters(cut.shards[place])
        }
        if planned.first + group[0] in planned.home_of:
            _require_trained(parameters)
        if division is not None:
            parameters = {name: division.placed(name, value) for name, value in parameters.items()}
        for place in group:
            part, number = cut.shards[place], planned.first + place
            again = calls_again(program, plan.shards[number], planned.places_again(number))
            shards[place] = ShardModule(part, values | parameters, ranks.device, division, again)
            modules[place] = shards[place]
            if number in planned.home_of:
                _require_chunks(chunks).take(number, shards[place].holder)
            if number in planned.recompute:
                check_recompute(part, plan.shards[number])
                modules[place] = checkpointed(shards[place], shards[place].once)
            if number in planned.home_of:
                _require_chunks(chunks).watch(number, modules[place])
        if parameters and planned.first + group[0] not in planned.home_of:
            units.append(
                Unit(
                    layers=tuple(modules[place] for place in group),
                    zero=zero,
                    mesh=ranks.dp_mesh,
                    offloaded=plan.states_on_host,
                    casts_inputs=False,
                    fine_tuned=not all(each.requires_grad for each in parameters.values()),
                )
            )
            del parameters
            shard_unit(units[-1], plan.training)
    named = {f"shard{planned.first + place}": modules[place] for place in sorted(modules)}
    body = TracedBody(cut, ShardModule(cut.constants, values, ranks.device), named, _loss(program))
    shard_root(body, units, ranks.dp_mesh, chunks.parameters if chunks is not None else ())
    return TracedStage(body, tuple(units), [shards[place] for place in sorted(shards)], index)


def _require_trained(parameters: Mapping[str, nn.Parameter]) -> None:
    """Raises ConfigError for parameters that training leaves as they are, which chunks update."""
    still = next((name for name, each in parameters.items() if not each.requires_grad), None)
    if still is not None:
        raise ConfigError(
            f"module: {still} is not trained, but lies in chunks, which update all parameters",
            hint="use --offload states, or train it",
        )


def _require_chunks(chunks: ChunkManager | None) -> ChunkManager:
    assert chunks is not None, "a plan with homes of shards has chunks"
    return chunks


def zero_of(plan: TracedPlan, index: int) -> int:
    """Returns the ZeRO stage that runs.

    One rank has nothing to shard, but states on the host can be gathered.
    """
    gathers = plan.mesh.dp > 1 or plan.states_on_host
    return plan.stages[index].zero if gathers else 0


def _on(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    """Returns a parameter on the device, a scalar in a tensor of one element, as FSDP asks."""
    value = parameter.detach().to(device)
    return nn.Parameter(value if value.ndim else value[None], parameter.requires_grad)


def _parameters(cut: ShardCut) -> tuple[str, ...]:
    return tuple(node.target for node in cut.attributes if node.meta["origin"] == PARAMETER)


def _groups(cut: StageCut) -> list[list[int]]:
    """Returns the positions of the shards, grouped by common parameters.

    FSDP gathers and reduces a group as one unit.
    """
    groups: list[tuple[set[str], list[int]]] = []
    for place, shard in enumerate(cut.shards):
        names, members = set(_parameters(shard)), [place]
        for group in [group for group in groups if group[0] & names]:
            groups.remove(group)
            names, members = group[0] | names, [*group[1], *members]
        groups.append((names, members))
    return [sorted(members) for _, members in groups]


def _run(
    cut: ShardCut, module: nn.Module, known: dict[fx.Node, Tensor], batch: Mapping[str, Tensor]
) -> None:
    values = [batch[node.target] if node.op == "placeholder" else known[node] for node in cut.reads]
    known.update(zip(cut.gives, module(*values), strict=True))


def _drops(cut: StageCut, kept: set[fx.Node]) -> Iterator[tuple[fx.Node, ...]]:
    """Yields, for each shard, the values that no later shard reads."""
    last: dict[fx.Node, int] = {}
    for place, shard in enumerate(cut.shards):
        last.update(dict.fromkeys((*shard.reads, *shard.gives), place))
    for place in range(len(cut.shards)):
        yield tuple(node for node, end in last.items() if end == place and node not in kept)


def _loss(program: Program) -> fx.Node:
    output = next(node for node in program.graph.nodes if node.op == "output")
    return output.args[0]  # type: ignore[return-value]
