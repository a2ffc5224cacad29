"""Host seconds that a layer costs more in a layout that divides it.

Plain blocks are compared with the same blocks under FSDP, as DTensors over tensor-parallel ranks,
with a backward pass in two parts, and as stages of a pipeline. Each runs in one process, in a group
of that process alone: the difference is the layout's host work (hooks, copies into and out of
buffers, dispatch of DTensors) without traffic. Both take turns, and the medians of each part of a
step are compared.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.distributed.tensor import DTensor, Replicate

from parplan.costmodels.operators.plan_placements import placements
from parplan.costmodels.operators.sharding import Sharding
from parplan.executor.measuring.block_operations import block_specs
from parplan.executor.measuring.operands import GRADIENT_STD
from parplan.executor.measuring.products import Sizes
from parplan.executor.measuring.update_operations import world_of_one
from parplan.executor.models.transformer_layers import build_layer
from parplan.executor.run_options import Options
from parplan.executor.sharding.place import Axes, place_layer
from parplan.executor.sharding.zero_units import (
    Unit,
    begin_step,
    reduce_gradients,
    shard_root,
    shard_unit,
)
from parplan.executor.tensors import local
from parplan.executor.training.optimizer import build_optimizer, clip_gradients, squared_norm
from parplan.planner.plan.plan import OperatorPlacement
from parplan.profiles.machines.measurements import CaseFigures
from parplan.profiles.models.operator_graph import LayerKind
from parplan.profiles.models.spec import ModelSpec, TrainingSpec
from parplan.profiles.models.transformer import build_graph
from parplan.profiles.profiler.gpus import gpu, is_gpu

LAYERS = 4
MICRO_BATCHES = 4
MOST_ROUNDS = 9
LEAST_ROUNDS = 3
ENOUGH_S = 3.0  # seconds of one comparison
WARM_UP = 2
PARTS = ("forward", "backward", "reduce", "update")


def layouts(sizes: Sizes, device: torch.device) -> CaseFigures:
    """Measure the additional seconds of a layer by layout and part of the step, at least 0."""
    with world_of_one(device):
        model, training = block_specs(sizes)
        x = torch.randn(sizes["batch"], sizes["seq"], sizes["hidden"], device=device)
        mesh = init_device_mesh(device.type, (1,), mesh_dim_names=("tp",))
        figures: dict[str, float] = {}
        makers = {"sharded": _sharded, "split": _split}
        if sizes["kv_heads"] % 2 == 0:
            makers["divided"] = _divided
        for name, make in makers.items():
            plain = _plain(model, training, device, mesh)
            layout = make(model, training, device, mesh)
            for part, seconds in _more_s(plain, layout, x).items():
                if seconds:
                    figures[f"{name}_{part}_s"] = seconds
        figures["staged_action_s"] = _action_s(model, training, device, mesh.get_group())
        return CaseFigures(figures=figures)


def _action_s(
    model: ModelSpec, training: TrainingSpec, device: torch.device, group: dist.ProcessGroup
) -> float:
    """Seconds of torch's pipeline runtime for one action: a forward or backward pass of a stage.

    Two stages of this process are compared with a loop over the same micro-batches.
    """
    body = nn.Sequential(*_blocks(model, training, device))
    blocks = _blocks(model, training, device)
    parts = [nn.Sequential(*blocks[: LAYERS // 2]), nn.Sequential(*blocks[LAYERS // 2 :])]
    stages = [
        PipelineStage(part, index, len(parts), device, group=group)
        for index, part in enumerate(parts)
    ]
    schedule = ScheduleInterleaved1F1B(stages, MICRO_BATCHES, loss_fn=_loss)
    x = torch.randn(
        MICRO_BATCHES * training.global_batch_size,
        training.seq_length,
        model.hidden_size,
        device=device,
    )

    def loop() -> None:
        for micro_batch in x.chunk(MICRO_BATCHES):
            _loss(body(micro_batch.detach().requires_grad_()), micro_batch).backward()

    def timed(run: Callable[[], object]) -> list[float]:
        begin_s = _now_s(device)
        run()
        seconds = _now_s(device) - begin_s
        for module in (body, *parts):
            module.zero_grad()
        return [seconds]

    (looped_s,), (staged_s,) = _in_turns(
        lambda: timed(loop), lambda: timed(lambda: schedule.step(x, target=x))
    )
    return max(0.0, staged_s - looped_s) / (2 * len(parts) * MICRO_BATCHES)


def _loss(out: Tensor, target: Tensor) -> Tensor:
    return (out * target).sum()


@dataclass(slots=True)
class LayoutTrial:
    """Blocks with the work around their passes in a step."""

    layers: Sequence[nn.Module]
    body: nn.Module
    enter: Callable[[Tensor], Tensor] = lambda x: x
    begin: Callable[[], None] = lambda: None
    reduce: Callable[[], None] = lambda: None
    splits: bool = False
    optimizer: torch.optim.Optimizer = field(init=False)

    def __post_init__(self) -> None:
        self.optimizer = build_optimizer(list(self.body.parameters()), Options())

    def step(self, x: Tensor) -> Iterator[None]:
        """Run the parts of a step and yield after each."""
        self.begin()
        entered = self.enter(x.detach().requires_grad_())
        out = self.body(entered)
        yield
        gradient = torch.full_like(out, GRADIENT_STD)
        if self.splits:
            _, groups = stage_backward_input([out], [gradient], [entered], self.body.parameters())
            stage_backward_weight(self.body.parameters(), groups)
        else:
            out.backward(gradient)
        yield
        self.reduce()
        yield
        self._update(x.device)
        yield

    @torch.no_grad()
    def _update(self, device: torch.device) -> None:
        gradients = [local(p.grad) for p in self.body.parameters() if p.grad is not None]
        clip_gradients(
            self.optimizer,
            Options().clip_gradients,
            squared_norm({1: gradients}, device).sqrt().float(),
        )
        self.optimizer.step()
        self.optimizer.zero_grad()


def _blocks(model: ModelSpec, training: TrainingSpec, device: torch.device) -> list[nn.Module]:
    return [
        build_layer(model, training, LayerKind.BLOCK, 1 + index, 0, device)
        for index in range(LAYERS)
    ]


def _plain(
    model: ModelSpec, training: TrainingSpec, device: torch.device, mesh: DeviceMesh
) -> LayoutTrial:
    layers = _blocks(model, training, device)
    return LayoutTrial(layers, nn.Sequential(*layers))


def _split(
    model: ModelSpec, training: TrainingSpec, device: torch.device, mesh: DeviceMesh
) -> LayoutTrial:
    trial = _plain(model, training, device, mesh)
    trial.splits = True
    return trial


def _sharded(
    model: ModelSpec, training: TrainingSpec, device: torch.device, mesh: DeviceMesh
) -> LayoutTrial:
    """Return blocks under ZeRO 1, which gathers and reduces once a step."""
    layers = _blocks(model, training, device)
    body = nn.Sequential(*layers)
    units = [Unit(layers=(layer,), zero=1, mesh=mesh) for layer in layers]
    for unit in units:
        shard_unit(unit, training)
    shard_root(body, units, mesh)
    return LayoutTrial(
        layers,
        body,
        begin=lambda: begin_step(body, units),
        reduce=lambda: reduce_gradients(body, units, None),
    )


def _divided(
    model: ModelSpec, training: TrainingSpec, device: torch.device, mesh: DeviceMesh
) -> LayoutTrial:
    """Return blocks with the placements of Megatron's tensor parallelism."""
    block = build_graph(model, training, training.global_batch_size).block
    placed = {operator.name: placements(operator, Sharding(2)) for operator in block.operators}
    operators = {
        name: OperatorPlacement(parameters=p.parameters, input=p.input, output=p.output)
        for name, p in placed.items()
    }
    layers = _blocks(model, training, device)
    for layer in layers:
        place_layer(layer, operators, Axes(tp=mesh), "block")

    def enter(x: Tensor) -> Tensor:
        return DTensor.from_local(x, mesh, (Replicate(),), run_check=False)

    return LayoutTrial(layers, nn.Sequential(*layers), enter=enter)


def _more_s(plain: LayoutTrial, layout: LayoutTrial, x: Tensor) -> dict[str, float]:
    """Seconds of a layer in `layout` beyond those in `plain`, by part of the step."""
    plain_s, layout_s = _in_turns(lambda: _laps_s(plain, x), lambda: _laps_s(layout, x))
    return {
        part: max(0.0, with_layout - without) / LAYERS
        for part, without, with_layout in zip(PARTS, plain_s, layout_s, strict=True)
    }


def _in_turns(*runs: Callable[[], list[float]]) -> list[list[float]]:
    """Return for each run the medians of the seconds that it returns.

    In every round all runs take turns; a warm-up precedes.
    """
    laps: list[list[list[float]]] = [[] for _ in runs]
    started_s = time.perf_counter()
    for number in range(WARM_UP + MOST_ROUNDS):
        for run, run_laps in zip(runs, laps, strict=True):
            run_laps.append(run())
        if number + 1 >= WARM_UP + LEAST_ROUNDS and time.perf_counter() - started_s > ENOUGH_S:
            break
    timed = [run_laps[WARM_UP:] for run_laps in laps]
    return [[median(column) for column in zip(*run_laps, strict=True)] for run_laps in timed]


def _laps_s(layout: LayoutTrial, x: Tensor) -> list[float]:
    marks = [_now_s(x.device)]
    for _ in layout.step(x):
        marks.append(_now_s(x.device))
    return [end - start for start, end in itertools.pairwise(marks)]


def _now_s(device: torch.device) -> float:
    if is_gpu(device):
        gpu(device).synchronize(device)
    return time.perf_counter()
