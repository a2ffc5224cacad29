"""Modules other than GPT or Llama, traced, planned, cut and trained on gloo ranks.

    python benchmarks/executor/traced.py [NAME ...]

For each module it prints the plan, the errors of the losses of three steps and of first-step
gradients (relative to the largest entry) against the module in one process on the same
micro-batches, and the largest peak of a rank's host memory with Python and libraries.
"""

from __future__ import annotations

import logging
import resource
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from parplan.costmodels.schedules.schedule import Schedule
from parplan.executor.checking.parity import gradient_errors, joined, loss_errors, run_ranks
from parplan.executor.traced.traced_parity import run_traced_reference, train_traced
from parplan.planner.plan.traced_plan import TracedPlan
from parplan.planner.request import Constraints, PlanRequest
from parplan.planner.search.find_plan import find_best
from parplan.planner.traced.plan_traced import TracedFactory
from parplan.planner.traced.shards import Cutting
from parplan.profiles.machines.machine_catalog import load_cluster, with_gpus
from parplan.profiles.models.module_source import ModuleSource
from parplan.profiles.models.spec import Precision, TrainingSpec
from parplan.profiles.stack import NEUTRAL
from parplan.profiles.tracing.trace import trace
from parplan.profiles.units import KIB, format_bytes
from tests.helpers.traced_modules import HUGGING_FACE

SEQ_LENGTH = 16
PINS: dict[str, Mapping[str, Any]] = {
    "t5": {"pp": (2,), "dp": (2,), "zero": (1,)},
    "bert": {"pp": (4,), "dp": (1,)},
    "vit": {"pp": (2,), "dp": (2,), "zero": (3,)},
    "albert": {"pp": (2,), "dp": (2,), "zero": (1,)},
    "unet": {"pp": (2,), "dp": (2,), "zero": (3,)},
    "translator": {"pp": (4,), "dp": (1,)},
}
COLUMNS = "{:<12}{:<34}{:>6}{:>10}{:>10}{:>12}"


def planned(name: str) -> TracedPlan:
    """Return the searched plan for 4 ranks on the mesh of PINS, 1F1B over 4 micro-batches."""
    source = (
        ModuleSource(huggingface=HUGGING_FACE[name])
        if name in HUGGING_FACE
        else ModuleSource(factory=f"tests.helpers.traced_modules:{name}")
    )
    pins = PINS[name]
    training = TrainingSpec(
        global_batch_size=8 * pins["dp"][0],
        seq_length=SEQ_LENGTH,
        precision=Precision.FP32,
        stack=NEUTRAL,
    )
    model = trace(source, seq_length=SEQ_LENGTH, precision=Precision.FP32)
    request = PlanRequest(
        model=model,
        cluster=with_gpus(load_cluster("a100-80gb"), 4),
        training=training,
        constraints=Constraints(**pins, micro_batch_size=(2,), schedule=(Schedule.ONE_F_ONE_B,)),
    )
    cutting = Cutting(cross_skips=name == "unet")
    return find_best(TracedFactory(request, cutting=cutting)).plan


def _train(plan: TracedPlan) -> Any:
    return train_traced(plan), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB


def _recomputing(plan: TracedPlan) -> TracedPlan:
    return replace(
        plan, stages=tuple(replace(stage, recompute=(stage.first,)) for stage in plan.stages)
    )


def main() -> None:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    print(COLUMNS.format("model", "plan", "world", "loss", "gradient", "host memory"))
    for name in sys.argv[1:] or PINS:
        searched = planned(name)
        for plan in (searched, _recomputing(searched)):
            (ranks,) = run_ranks([plan], _train)
            expected = run_traced_reference(plan, by_micro_batch=True)
            outcome = joined([result for result, _ in ranks])
            stages = plan.stages
            text = f"pp {plan.mesh.pp} x dp {plan.mesh.dp}, ZeRO {stages[0].zero}" + (
                ", recompute" if stages[0].recompute else ""
            )
            print(
                COLUMNS.format(
                    name,
                    text,
                    plan.mesh.num_ranks,
                    f"{max(loss_errors(outcome, expected)):.1e}",
                    f"{max(gradient_errors(outcome, expected).values()):.1e}",
                    format_bytes(max(peak for _, peak in ranks)),
                ),
                flush=True,
            )


if __name__ == "__main__":
    main()
