"""The flags with which other systems run a baseline's strategy.

Those of Megatron-LM are of the table that plans are exported by. The others were read in
pytorch/torchtitan at 6fc499f6 (torchtitan/config/job_config.py) and
deepspeedai/Megatron-DeepSpeed at 4efb479d (megatron/arguments.py, examples_deepspeed). A degree of
1 is each system's default and is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.schedules.schedule import Schedule
from parplan.costmodels.strategy import Strategy
from parplan.planner.export.fields.arguments import written
from parplan.planner.export.fields.settings import Settings, layout_facts, model_facts
from parplan.planner.export.megatron.megatron_arguments import BATCH, PARALLEL, RECOMPUTE, SHARDING
from parplan.planner.plan.plan import Plan
from parplan.profiles.models.operator_graph import LayerKind
from parplan.profiles.stack import ContextForm

# torch.distributed.tensor.experimental: keys and values go round, or are gathered
_ROTATE_METHODS = {ContextForm.RING: "alltoall", ContextForm.ALL_GATHER: "allgather"}
_TORCH_SCHEDULES = {
    Schedule.ONE_F_ONE_B: "1F1B",
    Schedule.INTERLEAVED: "Interleaved1F1B",
    Schedule.ZBV: "ZBVZeroBubble",
    Schedule.DUALPIPEV: "DualPipeV",
}
Flag = tuple[str, bool | int | str]  # a switch, a degree, or any other value


def flags_text(name: str, strategy: Strategy, plan: Plan) -> str:
    """Returns the flags of a baseline's strategy in one line, empty where none are known.

    plan    the same strategy with its model, cluster and batch
    """
    if name not in _FLAGS:
        return ""
    return " ".join(filter(None, map(_text, _FLAGS[name](strategy, plan))))


def _text(flag: Flag) -> str:
    """Returns a flag as it is written: empty for a switch that is off and a degree of 1."""
    name, value = flag
    if isinstance(value, bool):
        return name if value else ""
    return "" if value == 1 else f"{name} {value}"


def _megatron(strategy: Strategy, plan: Plan) -> Iterator[Flag]:
    run = Settings(
        blocks=_blocks(strategy, plan),
        zero=_zero(strategy),
        recompute=_recompute(strategy),
        recompute_blocks=_recomputed_blocks(strategy),
        global_batch_size=plan.training.global_batch_size,
        **layout_facts(strategy.layout, plan.model, plan.cluster),
        **model_facts(plan.model),
    )
    for name, words in written((*PARALLEL, *SHARDING, *RECOMPUTE, *BATCH), run):
        yield name, " ".join(words) or True


def _torchtitan(strategy: Strategy, plan: Plan) -> Iterator[Flag]:
    layout, mesh = strategy.layout, strategy.layout.mesh
    for name, degree in (
        ("data_parallel_shard", mesh.dp),
        ("context_parallel", mesh.cp),
        ("tensor_parallel", mesh.tp),
        ("pipeline_parallel", mesh.pp),
        ("expert_parallel", mesh.ep),
        ("expert_tensor_parallel", mesh.etp if mesh.ep > 1 else 1),
    ):
        yield f"--parallelism.{name}_degree", degree
    if mesh.context_form is not None:
        rotate = _ROTATE_METHODS[mesh.context_form]
        yield "--parallelism.context_parallel_rotate_method", rotate
    if mesh.pp > 1:
        yield "--parallelism.pipeline_parallel_schedule", _TORCH_SCHEDULES[layout.schedule]
        size = f"{layout.micro_batch_size}"
        yield "--parallelism.pipeline_parallel_microbatch_size", size
    reshards = "always" if _zero(strategy) == 3 else "never"
    yield "--parallelism.fsdp_reshard_after_forward", reshards
    yield "--activation_checkpoint.mode", _recompute(strategy).value
    batch = layout.micro_batch_size * (layout.num_micro_batches if mesh.pp > 1 else 1)
    yield "--training.local_batch_size", f"{batch}"
    yield "--training.global_batch_size", f"{plan.training.global_batch_size}"


def _deepspeed(strategy: Strategy, plan: Plan) -> Iterator[Flag]:
    mesh = strategy.layout.mesh
    yield "--tensor-model-parallel-size", mesh.tp
    yield "--pipeline-model-parallel-size", mesh.pp
    yield "--no-pipeline-parallel", mesh.pp == 1
    yield "--ds-sequence-parallel-size", mesh.cp
    yield "--moe-expert-parallel-size", mesh.ep
    yield "--zero-stage", f"{_zero(strategy)}"
    yield "--deepspeed-activation-checkpointing", _recompute(strategy) is Recompute.FULL
    yield from _batch(strategy, plan)


def _batch(strategy: Strategy, plan: Plan) -> Iterator[Flag]:
    yield "--micro-batch-size", f"{strategy.layout.micro_batch_size}"
    yield "--global-batch-size", f"{plan.training.global_batch_size}"


def _zero(strategy: Strategy) -> int:
    """Returns the ZeRO stage, which all layers of a baseline have."""
    return strategy.stages[0][0].zero


def _recompute(strategy: Strategy) -> Recompute:
    """Returns the recompute level of the first block, and of all that recompute."""
    blocks = (
        choice
        for stage in strategy.stages
        for choice in stage
        if choice.kind.role is LayerKind.BLOCK
    )
    level = next(blocks).recompute
    assert isinstance(level, Recompute), "these systems recompute by levels"
    return level


def _recomputed_blocks(strategy: Strategy) -> int | None:
    """Returns the first blocks of a stage that recompute; None where all or none do."""
    stages = [
        [choice.recompute for choice in stage if choice.kind.role is LayerKind.BLOCK]
        for stage in strategy.stages
    ]
    again = [stage.count(Recompute.FULL) for stage in stages]
    every = all(count in (0, len(stage)) for count, stage in zip(again, stages, strict=True))
    return None if every else max(again)


def _blocks(strategy: Strategy, plan: Plan) -> tuple[int, ...]:
    """Returns the blocks of every stage, without the layers of a tower on the first."""
    blocks = [
        sum(choice.kind.role is LayerKind.BLOCK for choice in stage) for stage in strategy.stages
    ]
    blocks[0] -= plan.model.num_blocks - plan.model.num_layers
    return tuple(blocks)


_FLAGS: dict[str, Callable[[Strategy, Plan], Iterator[Flag]]] = {
    "megatron": _megatron,
    "megatron-defaults": _megatron,
    "megatron-guide": _megatron,
    "megatron-1f1b": _megatron,
    "megatron-interleaved": _megatron,
    "deepspeed-3d": _deepspeed,
    "torchtitan": _torchtitan,
}
