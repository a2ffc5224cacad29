"""Plans that are laid out by hand, as exports and their way back need them."""

from __future__ import annotations

from functools import cache
from typing import Any

from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.schedules.schedule import Schedule
from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.plan.plan import Plan
from parplan.profiles.machines.machine_catalog import load_cluster, load_stack, with_gpus
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.spec import TrainingSpec
from tests.helpers.planning import estimate_plan


@cache
def laid_out(
    model: str = "gpt-2.5b",
    *,
    micro_batch_size: int = 1,
    num_micro_batches: int = 8,
    seq_length: int = 1024,
    virtual_stages: int = 1,
    schedule: Schedule | None = None,
    stack: str = "megatron-core",
    gpu: str = "h100-80gb",
    blocks: tuple[int, ...] | None = None,
    zero: int = 1,
    zero_ranks: int | None = None,
    recompute: Recompute = Recompute.NONE,
    sequence_parallel: bool | None = None,
    **mesh: Any,
) -> Plan:
    """Returns the plan of a layout that all blocks share, on as many GPUs as its mesh has."""
    axes = Mesh(**{"pp": 1, "dp": 1, "tp": 1} | mesh)
    training = TrainingSpec(
        global_batch_size=micro_batch_size * num_micro_batches * axes.dp,
        seq_length=seq_length,
        stack=load_stack(stack),
    )
    usual = Schedule.INTERLEAVED if virtual_stages > 1 else Schedule.ONE_F_ONE_B
    layout = ParallelLayout(
        mesh=axes,
        schedule=schedule or usual,
        virtual_stages=virtual_stages,
        micro_batch_size=micro_batch_size,
        num_micro_batches=num_micro_batches,
        sequence_parallel=axes.tp > 1 if sequence_parallel is None else sequence_parallel,
    )
    return estimate_plan(
        load_model(model).spec,
        with_gpus(load_cluster(gpu), axes.num_ranks),
        training,
        layout,
        blocks=blocks,
        zero=zero,
        zero_ranks=zero_ranks,
        recompute=recompute,
    )
