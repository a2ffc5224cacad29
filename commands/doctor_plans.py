"""The small plans that `plan doctor` trains, priced by hand for the devices that there are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.host.offload import Offload
from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.schedules.schedule import Schedule
from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.objective import Objective
from parplan.planner.plan.plan import Plan
from parplan.planner.request import Constraints, PlanRequest, SearchOptions
from parplan.planner.search.estimate import ChunkRequest, UniformChoices, estimate_plan
from parplan.profiles.machines.machine_catalog import load_cluster, load_stack, with_gpus
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.spec import ModelSpec, Precision, TrainingSpec
from parplan.profiles.stack import ContextForm
from parplan.profiles.units import GB

DENSE, EXPERTS = "gpt-tiny", "mixtral-tiny"
SEQ_LENGTH = 32
BATCH = 16
AMPLE_BYTES = GB  # of a device, for states in chunks
ACTIVATIONS = ("fc1", "activation")  # operators whose outputs go to the host
CHUNKS = ChunkRequest(host_blocks=2, optimizer_blocks=1, device_bytes=AMPLE_BYTES)


def doctor_plans(num_ranks: int) -> dict[str, Plan]:
    """Returns the plans by the names of their paths, for as many ranks as a power of two has.

    Plans that need two ranks are left out where there is one.
    """
    makers: dict[str, Callable[[int], Plan]] = {
        "data parallel": lambda n: _plan(dp=n, zero=3 if n > 1 else 0, recompute=Recompute.FULL),
        "bf16": lambda n: _plan(dp=n, zero=2 if n > 1 else 0, precision=Precision.BF16),
        "experts": lambda n: _plan(EXPERTS, dp=n, ep=min(n, 2)),
        "activations on the host": lambda n: _plan(
            dp=n, offload=(Offload.ACTIVATIONS,), keep_on_host=ACTIVATIONS
        ),
        "states on the host": lambda n: _plan(
            dp=n, zero=3 if n > 1 else 0, offload=(Offload.STATES,)
        ),
        "lookup": lambda n: _plan(dp=n, offload=(Offload.LOOKUP,)),
        "chunks": lambda n: _plan(dp=n, chunks=CHUNKS),
        "checkpoint": lambda n: _plan(dp=n, zero=3 if n > 1 else 0),
    }
    if num_ranks > 1:
        makers |= {
            "tensor parallel": lambda n: _plan(tp=2, dp=n // 2, sp=True),
            "pipeline": lambda n: _plan(
                pp=2, dp=n // 2, schedule=Schedule.INTERLEAVED, virtual_stages=2
            ),
            "zero bubble": lambda n: _plan(
                pp=2, dp=n // 2, schedule=Schedule.ZBV, virtual_stages=2, zero=2 if n > 2 else 0
            ),
            "context": lambda n: _plan(cp=2, dp=n // 2, context_form=ContextForm.RING),
            "checkpoint of chunks": lambda n: _plan(tp=2, dp=n // 2, chunks=CHUNKS),
        }
    return {name: make(num_ranks) for name, make in makers.items()}


def _plan(
    model_name: str = DENSE,
    *,
    pp: int = 1,
    dp: int = 1,
    tp: int = 1,
    cp: int = 1,
    ep: int = 1,
    context_form: ContextForm | None = None,
    sp: bool = False,
    schedule: Schedule = Schedule.ONE_F_ONE_B,
    virtual_stages: int = 1,
    precision: Precision = Precision.FP32,
    **choices: Any,
) -> Plan:
    mesh = Mesh(pp=pp, dp=dp, tp=tp, cp=cp, ep=ep, context_form=context_form)
    size = max(1, BATCH // dp // 4)
    layout = ParallelLayout(
        mesh=mesh,
        schedule=schedule,
        virtual_stages=virtual_stages,
        micro_batch_size=size,
        num_micro_batches=BATCH // dp // size,
        sequence_parallel=sp,
    )
    training = TrainingSpec(
        global_batch_size=BATCH,
        seq_length=SEQ_LENGTH,
        precision=precision,
        stack=load_stack("parplan"),
    )
    request = PlanRequest(
        model=_model(model_name),
        cluster=with_gpus(load_cluster("cpu"), mesh.num_ranks, mesh.num_ranks),
        training=training,
        objective=Objective.THROUGHPUT,
        constraints=Constraints(),
        options=SearchOptions(),
    )
    return estimate_plan(request, layout, UniformChoices(**choices))


def _model(name: str) -> ModelSpec:
    """Returns a packaged model without dropout, so that a plan's numbers are those of one CPU.

    Its head has a table of its own, which `Offload.LOOKUP` needs to look tokens up on the host.
    """
    return replace(load_model(name).spec, dropout=0.0, tied_embeddings=False)
