"""Names of the parts of a plan, as a person reads them."""

from __future__ import annotations

from collections import Counter

from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.host.state_location import OFFLOAD_OF, StateLocation
from parplan.costmodels.layers.recompute import (
    Recompute,
    host_bytes_by_operator,
    recompute_operators,
)
from parplan.costmodels.operators.kernels import fused_kernel_of
from parplan.costmodels.operators.sharding import Sharding
from parplan.costmodels.schedules.schedule import Schedule
from parplan.costmodels.strategy import count_text
from parplan.planner.objective import Objective
from parplan.planner.plan.derived import blocks_of
from parplan.planner.plan.pipeline_plan import PipelinePlan
from parplan.planner.plan.plan import LayerPlan, Plan
from parplan.planner.plan.prediction import SearchRecord
from parplan.planner.plan.traced_plan import AnyPlan
from parplan.profiles.machines.hardware import Device
from parplan.profiles.models.operator_graph import ModelGraph
from parplan.profiles.models.spec import Optimizer, TrainingSpec
from parplan.profiles.models.transformer import build_graph
from parplan.profiles.stack import AttentionKernel
from parplan.report.text import gib_text

_SCHEDULES = {
    Schedule.GPIPE: "GPipe",
    Schedule.ONE_F_ONE_B: "1F1B",
    Schedule.INTERLEAVED: "interleaved 1F1B",
    Schedule.ZBV: "zero-bubble V",
    Schedule.DUALPIPEV: "DualPipeV",
    Schedule.EARLY_RECOMPUTE: "1F1B with early recompute",
    Schedule.LAST_NO_RECOMPUTE: "1F1B with early recompute, none on the last stage",
    Schedule.SCP: "shifted critical path",
    Schedule.CUSTOM: "own schedule",
}
OPTIMIZER_NAMES = {
    Optimizer.ADAM: "Adam",
    Optimizer.ADAM_8BIT: "8-bit Adam",
    Optimizer.MUON: "Muon",
    Optimizer.ADAFACTOR: "Adafactor",
    Optimizer.SGD: "SGD",
    Optimizer.SGD_MOMENTUM: "SGD with momentum",
}
FASTEST = "fastest"  # the plan of a search without a limit


def pipeline_phrases(pipeline: PipelinePlan, mesh: Mesh) -> tuple[str, ...]:
    """Returns schedule, virtual stages, micro-batches and level of sub-pipelining as phrases."""
    count = count_text(pipeline.num_micro_batches, pipeline.micro_batches_of_replicas)
    micro_batches = f"micro-batch {pipeline.micro_batch_size} x {count}"
    halves = (f"sub-pipelined at level {pipeline.tp_overlap}",) if pipeline.tp_overlap else ()
    if mesh.pp == 1:
        return ("no pipeline", micro_batches, *halves)
    virtual = (f"{pipeline.virtual_stages} virtual stages",) if pipeline.virtual_stages > 1 else ()
    return (_SCHEDULES[pipeline.schedule], *virtual, micro_batches, *halves)


def schedule_name(schedule: Schedule) -> str:
    """Returns the name of a pipeline schedule as the field writes it."""
    return _SCHEDULES[schedule]


def plan_phrase(plan: AnyPlan) -> str:
    """Returns mesh and pipeline of a plan in one phrase."""
    return ", ".join((str(plan.mesh), *pipeline_phrases(plan.pipeline, plan.mesh)))


def attention_text(training: TrainingSpec, device: Device) -> str:
    """Names the attention kernel that runs: `flash (cudnn)`, `unfused`; a CPU's has no suffix."""
    if training.attention is not AttentionKernel.FLASH or device.is_host:
        return training.attention
    return f"{training.attention} ({fused_kernel_of(training.stack, device)})"


def graph_of(plan: Plan) -> ModelGraph:
    """Returns the operator graph of the plan's model, for one sequence."""
    return build_graph(plan.model, plan.training, 1)


def recompute_text(layer_plan: LayerPlan, graph: ModelGraph) -> str:
    """Returns the preset that a layer plan recomputes, or its operators when they are no preset.

    The presets of a class of blocks are none, selective (...) and full.
    """
    block = graph.layer_class(layer_plan.key(graph))
    selective = recompute_operators(block, Recompute.SELECTIVE)
    names = {
        recompute_operators(block, Recompute.FULL): "full",
        selective: f"selective ({', '.join(selective)})",
        (): "none",
    }
    return names.get(layer_plan.recompute) or ", ".join(layer_plan.recompute)


def blocks_by_plan(plan: Plan) -> dict[str, int]:
    """Counts the blocks that run on each layer plan, in the order of the plan file."""
    counts: Counter[str] = Counter()
    for stage in plan.stages:
        for run in stage.layers:
            counts[run.plan] += len(blocks_of(plan, run))
    return {name: counts[name] for name in plan.layer_plans if counts[name]}


def search_text(search: SearchRecord) -> str:
    """Names the search that returned a plan: `fastest within 40.0 GiB`, `leanest within 5 %`.

    The leanest plan has the least redundant memory.
    """
    front = search.front
    if front and front.max_slowdown is not None:
        return f"leanest within {100 * front.max_slowdown:g} %"
    if front and front.memory_limit_gib is not None:
        return f"fastest within {gib_text(front.memory_limit_gib)} GiB"
    if search.memory_first:
        return f"fastest within {100 * search.memory_first.slack:g} % of the leanest"
    return "leanest" if search.objective is Objective.MEMORY else FASTEST


def zero_text(layer_plan: LayerPlan, *, chunk_states: bool = True) -> str:
    """Returns the ZeRO stage with its exceptions: `3`, `2 (fc1, fc2: 3)`, `3 over 8 ranks`.

    Without `chunk_states` the states that chunks hold on the host are left out.
    """
    ranks = f" over {layer_plan.zero_ranks} ranks" if layer_plan.zero_ranks else ""
    in_chunks = () if chunk_states else OFFLOAD_OF[StateLocation.HOST]
    offload = [name for name in layer_plan.offload if name not in in_chunks]
    on_host = f", {' and '.join(offload)} on the host" if offload else ""
    stages = sorted(set(layer_plan.own_zero.values()))
    own = [
        f"{', '.join(name for name, its in layer_plan.own_zero.items() if its == stage)}: {stage}"
        for stage in stages
    ]
    own_text = f" ({'; '.join(own)})" if own else ""
    return f"{layer_plan.zero}{own_text}{ranks}{on_host}"


def host_activations_text(layer_plan: LayerPlan, graph: ModelGraph) -> str:
    """Names the operators whose activations the host holds: `qkv, fc1`, or `all`."""
    block = graph.layer_class(layer_plan.key(graph))
    host_bytes = host_bytes_by_operator(block, Sharding(), layer_plan.recompute)
    named = layer_plan.keep_on_host
    if named and all(name in named for name, n_bytes in host_bytes.items() if n_bytes):
        return "all"
    return ", ".join(named)
