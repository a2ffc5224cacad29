"""The winner and the baselines of gpt-tiny on 8 gloo ranks: bytes of states really held.

Every rank trains a few steps, and counts the parameters, gradients and optimizer states that it
holds (executor/watch/state_bytes.py). One copy is what one process holds that trains the same model
alone. Redundant bytes are those of all ranks less one copy.

The memory objective may take any time here: what a step takes on a CPU with gloo is not the
subject.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace

from benchmarks.papers.redundancy_ablation import ALL, SPLITS, pins_of
from benchmarks.papers.redundancy_measures import Case, Setting, baseline_picks, setting_of_request
from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.layers.model_states import StateBytes
from parplan.costmodels.schedules.schedule import Schedule
from parplan.costmodels.step import price_step
from parplan.costmodels.strategy import ParallelLayout
from parplan.executor.checking.parity import TrainingOutcome, loss_errors, run_plans
from parplan.executor.rules.all_rules import validate
from parplan.planner.objective import Objective
from parplan.planner.plan.assemble import assemble
from parplan.planner.plan.plan import Plan
from parplan.planner.plan.prediction import SearchRecord
from parplan.planner.plan.reprice import reprice
from parplan.planner.request import PlanRequest, SearchOptions
from parplan.planner.search.estimate import estimate_plan
from parplan.profiles.machines.machine_catalog import load_cluster, load_stack, with_gpus
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.spec import TrainingSpec
from parplan.profiles.units import MIB

RANKS = 8
ANY_TIME = SearchOptions(max_slowdown=99.0)
SAME_LOSS = 1e-5  # relative, of sums in another order


@dataclass(frozen=True, slots=True, kw_only=True)
class Executed:
    """A plan that ran: bytes of states over all ranks, predicted and held.

    predicted, held             those of all ranks, by class
    redundant_predicted, _held  states beyond one copy
    with_work                   predicted redundant bytes of states, activations and temporaries,
                                which is what the memory objective minimises
    ranks_as_predicted          ranks whose three classes each hold exactly what is predicted
    loss_error                  the largest relative difference of a loss from one process
    """

    name: str
    mesh: str
    predicted: dict[str, int]
    held: dict[str, int]
    redundant_predicted: int
    redundant_held: int
    with_work: int
    ranks_as_predicted: int
    loss_error: float

    @property
    def as_predicted(self) -> bool:
        """Return True if every rank held the predicted bytes and trained as one process does."""
        return (
            self.ranks_as_predicted == RANKS
            and self.redundant_held == self.redundant_predicted
            and self.loss_error <= SAME_LOSS
        )


def _request(gpus: int) -> PlanRequest:
    stack = load_stack("parplan")
    training = TrainingSpec(
        global_batch_size=16,
        seq_length=64,
        precision="fp32",
        stack=stack,
        attention=stack.attention,
    )
    # masks of dropout differ between divisions, so that losses would
    model = replace(load_model("gpt-tiny").spec, dropout=0.0)
    cluster = with_gpus(load_cluster("cpu"), gpus, gpus)
    return PlanRequest(model=model, cluster=cluster, training=training)


def _setting(tp: int) -> Setting:
    return setting_of_request(Case(model="gpt-tiny", gpus=RANKS, gpu="cpu", tp=tp), _request(RANKS))


def plans() -> dict[str, Plan]:
    """Return the plans by name: Megatron-LM's on dp 2 x tp 4, ours there and on dp 4 x tp 2.

    Ours are the least redundant with all choices and without operator splits.
    """
    named: dict[str, Plan] = {}
    wide = _setting(tp=4)
    for system, picked, strategy in baseline_picks(wide):
        price = price_step(strategy, wide.price_cache)
        record = SearchRecord.of_estimate(price.step_s, price.closed_form_s)
        named[f"{system}, {picked}"] = assemble(strategy, price, record, wide.price_cache)
    for setting in (wide, _setting(tp=2)):
        for off in ((), (SPLITS,)):
            plan = setting.find(Objective.MEMORY, ANY_TIME, tp_overlap=(0,), **pins_of(off))
            if plan:
                row = f"without {off[0]}" if off else ALL
                named[f"ours, {row}, tp {plan.mesh.tp}"] = plan
    return named


def one_process() -> Plan:
    """Return the same model and batch on one rank."""
    layout = ParallelLayout(
        mesh=Mesh(pp=1, dp=1, tp=1),
        schedule=Schedule.ONE_F_ONE_B,
        virtual_stages=1,
        micro_batch_size=2,
        num_micro_batches=8,
        sequence_parallel=False,
    )
    return estimate_plan(_request(1), layout)


def _over_ranks(states: Iterable[StateBytes]) -> StateBytes:
    return sum(states, start=StateBytes())


def _redundant_predicted(plan: Plan) -> tuple[int, int]:
    """Return the redundant bytes of states, and of all classes, by the price of the search."""
    redundant, ranks = reprice(plan).price.redundant, plan.mesh.ranks_per_stage
    states = sum(each.parameters + each.gradients + each.optimizer for each in redundant)
    return round(ranks * states), round(ranks * sum(each.total for each in redundant))


def _executed(name: str, plan: Plan, outcome: TrainingOutcome, alone: TrainingOutcome) -> Executed:
    predicted = _over_ranks(predicted for predicted, _ in outcome.states.values())
    held = _over_ranks(measured for _, measured in outcome.states.values())
    copy = _over_ranks(measured for _, measured in alone.states.values())
    redundant, with_work = _redundant_predicted(plan)
    return Executed(
        name=name,
        mesh=str(plan.mesh),
        predicted=asdict(predicted),
        held=asdict(held),
        redundant_predicted=redundant,
        redundant_held=held.total - copy.total,
        with_work=with_work,
        ranks_as_predicted=sum(first == second for first, second in outcome.states.values()),
        loss_error=max(loss_errors(outcome, alone)),
    )


def executed(named: dict[str, Plan]) -> list[Executed]:
    """Run the plans on 8 gloo ranks, and the model on one. Raises ConfigError."""
    for plan in named.values():
        validate(plan)
    (alone,) = run_plans([one_process()])
    outcomes = run_plans(list(named.values()))
    return [
        _executed(name, plan, outcome, alone)
        for (name, plan), outcome in zip(named.items(), outcomes, strict=True)
    ]


def mib_text(n_bytes: int) -> str:
    """Return bytes in MiB."""
    return f"{n_bytes / MIB:.3f}"
