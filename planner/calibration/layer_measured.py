"""Measured times of a model's layers beside a plan become a measured run, like a run.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from parplan.costmodels.price_cache import PriceCache
from parplan.costmodels.stage_costs import step_costs
from parplan.costmodels.strategy import Strategy
from parplan.planner.calibration.measured_run import MeasuredRun, in_proportion, plain_prices
from parplan.planner.plan.plan import Plan
from parplan.planner.plan.plan_strategy import strategy_of
from parplan.planner.runs.timelines import Key, parts_s
from parplan.profiles.documents.bounded import fingerprint_of
from parplan.profiles.documents.files import changed_on
from parplan.profiles.documents.reader import read_json
from parplan.profiles.errors import ConfigError
from parplan.profiles.imports.layer_files import MeasuredLayers, is_layer_file, read_layer_file
from parplan.profiles.machines.driver_names import torch_name
from parplan.profiles.machines.user_profile import FINGERPRINT_DIGITS

FORWARD = ("F", 0)
BACKWARD = ("B", 0)
OPTIMIZER = ("optimizer", 0)


def is_layer_profile(path: Path) -> bool:
    """Returns whether a file is of Metis or has Galvatron's computation times."""
    if path.suffix != ".json" or not path.is_file():
        return False
    return is_layer_file(read_json(path))


def measured_by_layers(path: Path, plan: Plan) -> MeasuredRun:
    """Returns the measurements of a file of layers that ran as `plan` says.

    Raises ConfigError where the file is of another run than the plan.
    """
    times = read_layer_file(read_json(path), str(path), plan.pipeline.micro_batch_size)
    _require_same(times, plan, str(path))
    fingerprint = fingerprint_of(path, FINGERPRINT_DIGITS)
    date = changed_on(path)
    return MeasuredRun(
        name=str(path),
        fingerprint=fingerprint,
        source=f"{times.tool} file {fingerprint} of {date}",
        date=date,
        device=torch_name(plan.cluster.device.name),
        plan=plan,
        step_s=times.step_s,
        parts=_parts(times, plan),
        priced_parts=priced_passes_s,
    )


def priced_passes_s(strategy: Strategy, price_cache: PriceCache) -> dict[Key, float]:
    """Returns the priced seconds of one micro-batch's passes, and of the optimizer."""
    prices = parts_s(strategy, step_costs(strategy, price_cache))
    return {key: prices[key] for key in (FORWARD, BACKWARD, OPTIMIZER)}


def _parts(times: MeasuredLayers, plan: Plan) -> dict[Key, float]:
    """Returns the measured parts; time of both passes is divided as their prices are."""
    parts: dict[Key, float] = {}
    if times.forward_s is not None:
        parts[FORWARD] = _of_depth(times.forward_s, plan.model.num_layers)
    if times.passes_s is not None:
        price_cache = plain_prices(plan)
        prices = priced_passes_s(strategy_of(plan, price_cache), price_cache)
        parts |= in_proportion(times.passes_s, {key: prices[key] for key in (FORWARD, BACKWARD)})
    if times.optimizer_s is not None:
        parts[OPTIMIZER] = times.optimizer_s
    return parts


def _of_depth(forward_s: Mapping[int, float], num_layers: int) -> float:
    """Returns the seconds at `num_layers` on the line through the least and the most layers.

    t(l) = t(l0) + (l - l0) (t(l1) - t(l0)) / (l1 - l0)
    """
    least, most = min(forward_s), max(forward_s)
    slope_s = (forward_s[most] - forward_s[least]) / (most - least)
    return forward_s[least] + (num_layers - least) * slope_s


def _require_same(times: MeasuredLayers, plan: Plan, where: str) -> None:
    """Raises ConfigError where the file is of other sizes than the plan."""
    mesh, pipeline = plan.mesh, plan.pipeline
    blocks = plan.model.num_layers if times.num_blocks is None else times.num_blocks
    for what, found, planned in (
        ("pp", 1, mesh.pp),
        ("tp", times.tp, mesh.tp),
        ("micro-batch", times.micro_batch_size, pipeline.micro_batch_size),
        ("number of micro-batches", 1, pipeline.num_micro_batches),
        ("number of blocks", blocks, plan.model.num_layers),
        ("sequence length", times.seq_length or plan.training.seq_length, plan.training.seq_length),
    ):
        if found != planned:
            raise ConfigError(
                f"{where}: its {what} is {found}, the plan's is {planned}",
                hint="write the plan of these sizes: plan estimate .. -o PLAN",
            )
    chip = plan.cluster.device.name.split("-")[0]
    if times.device and chip not in times.device.lower():
        raise ConfigError(
            f"{where}: it is of the device {times.device}, the plan of {plan.cluster.device.name}",
            hint="give the plan of that device",
        )
