"""Time that a step adds to its operators, fitted to measured blocks and their priced operators.

A block of n_f operators (n_b launches backward) whose operators alone take F and B seconds takes,
forward and backward,

    f = s F + n_f h_f          b = s B + n_b h_b          if the host is the device (its time adds)
    f = max(s F, n_f h_f)      b = max(s B, n_b h_b)      if the host launches ahead of the device

s is `kernel_slowdown` (gaps, colder caches, clocks), h_f and h_b the host's seconds for one
operator. The fit is least squares of relative errors with h at least 0; s is drawn towards 1 with a
tenth of the weight of one pass. Blocks of one size alone cannot tell s from h: h is then 0.

The costs of layouts (FSDP, tensor parallelism, a backward pass in two parts, a pipeline's runtime)
are measured as seconds of a layer. Costs of launches are those of the smallest layer, divided by
its launches. Costs that grow with a layer's bytes are a line through the smallest and the largest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from statistics import median
from typing import Any

import numpy as np

from parplan.costmodels.layers.layer_price import price_operators
from parplan.costmodels.operators.sharding import Sharding
from parplan.profiles.machines.hardware import Cluster
from parplan.profiles.machines.measurements import Case, CaseOutcome, Record
from parplan.profiles.machines.shipped_profiles import Machine
from parplan.profiles.machines.speeds import InStep, LayerCost, Profile
from parplan.profiles.models.operator_graph import LayerClass
from parplan.profiles.models.spec import ModelSpec, Norm, Positions, Precision, TrainingSpec
from parplan.profiles.models.transformer import build_graph
from parplan.profiles.stack import Stack
from parplan.profiles.units import US_PER_S

BLOCK = "block"  # work of cases that measure a block
LAYOUTS = "layouts"  # work of cases that measure the costs of layouts on a block
_WHOLE = Sharding()
# operators are measured as cold as in a step: a slowdown below 1 is noise (profiles/stack.py)
_LEAST_SLOWDOWN = 1.0
_MOST_SLOWDOWN = 3.0
_ROUNDS = 20
DRAW = 0.1**0.5  # square root of the weight that draws the slowdown towards 1; a pass has 1


@dataclass(frozen=True, slots=True)
class Equation:
    """One pass of one block.

    measured_s  seconds of the block
    alone_s     seconds of its operators measured alone
    launches    launches of the host
    """

    measured_s: float
    alone_s: float
    launches: int
    backward: bool


def block_model(case: Case) -> tuple[ModelSpec, int, int]:
    """Returns the model of one block that a case measures, its micro-batch size and its length."""
    sizes = dict(case.sizes)
    model = ModelSpec(
        name=BLOCK,
        num_layers=1,
        hidden_size=sizes["hidden"],
        num_heads=sizes["heads"],
        num_kv_heads=sizes["kv_heads"],
        head_dim=sizes["head_dim"],
        ffn_hidden_size=sizes["ffn"],
        vocab_size=128,
        max_seq_length=sizes["seq"],
        norm=Norm.RMS_NORM if sizes["rms"] else Norm.LAYER_NORM,
        positions=Positions.ROTARY if sizes["rotary"] else Positions.LEARNED,
        gated_ffn=bool(sizes["gated"]),
        linear_bias=not sizes["rms"],
        qkv_bias=not sizes["rms"],
        dropout=0.1 if sizes["dropout"] else 0.0,
    )
    return model, sizes["batch"], sizes["seq"]


def equations(
    records: Iterable[Record],
    profile: Profile,
    cluster: Cluster,
    precision: Precision,
    stack: Stack,
) -> Iterator[Equation]:
    """Yields both passes of every measured block, with its operators priced by `profile`."""
    neutral = replace(stack, kernel_slowdown=1.0, host_operator_s=0.0)
    machine = Machine(replace(cluster, calibration=None), replace(profile, in_step=None))
    for record in records:
        if (
            record.case.work != BLOCK
            or record.outcome is not CaseOutcome.MEASURED
            or record.measured is None
        ):
            continue
        layer, training = _block_layer(record.case, precision, neutral)
        alone = price_operators(layer, _WHOLE, machine, training).compute.values()
        for name, seconds, launches in (
            ("forward", sum(time.forward.value_s for time in alone), len(layer.operators)),
            ("backward", sum(time.backward.value_s for time in alone), layer.gradient_launches),
        ):
            measured_s = record.measured.times[name].median_us / US_PER_S
            yield Equation(measured_s, seconds, launches, name == "backward")


def _block_layer(case: Case, precision: Precision, stack: Stack) -> tuple[LayerClass, TrainingSpec]:
    """Returns the block of a case, with a training of one micro-batch."""
    model, batch, seq = block_model(case)
    training = TrainingSpec(
        global_batch_size=batch,
        seq_length=seq,
        precision=precision,
        attention=stack.attention,
        stack=stack,
    )
    return build_graph(model, training, batch).block, training


def in_step_of(
    records: Sequence[Record],
    profile: Profile,
    cluster: Cluster,
    precision: Precision,
    stack: Stack,
    *,
    host_adds: bool,
) -> InStep | None:
    """Fits the time that a step adds to the blocks among `records`; None without blocks."""
    passes = list(equations(records, profile, cluster, precision, stack))
    if not passes:
        return None
    slowdown, forward_s, backward_s = (_added if host_adds else _bounded)(passes)
    layouts = _layouts(records, precision, stack) if host_adds else {}
    errors = [
        abs(_predicted(each, slowdown, forward_s, backward_s, host_adds) / each.measured_s - 1)
        for each in passes
    ]
    return InStep(
        stack=stack.name,
        kernel_slowdown=float(f"{slowdown:.4g}"),
        forward_s=float(f"{forward_s:.4g}"),
        backward_s=float(f"{backward_s:.4g}"),
        host_adds=host_adds,
        source=f"{len(passes) // 2} blocks, forward and backward, within {max(errors):.0%} (median "
        f"{median(errors):.0%})",
        **layouts,
    )


def _layouts(records: Sequence[Record], precision: Precision, stack: Stack) -> dict[str, Any]:
    """Returns the fields of InStep with the costs of layouts, from blocks measured in them."""
    measured = [
        record for record in records if record.case.work == LAYOUTS and record.measured is not None
    ]
    if not measured:
        return {}
    figures = [record.measured.figures for record in measured if record.measured]
    layers = [_block_layer(record.case, precision, stack)[0] for record in measured]
    n_bytes = [precision.num_bytes * layer.num_parameters for layer in layers]
    launches = [layer.gradient_launches for layer in layers]

    smallest = [index for index, size in enumerate(n_bytes) if size == min(n_bytes)]

    def launched_s(name: str, counts: Sequence[int]) -> float:
        return _rounded(median(figures[index].get(name, 0.0) / counts[index] for index in smallest))

    def cost(*names: str) -> LayerCost:
        seconds = [sum(figure.get(name, 0.0) for name in names) for figure in figures]
        return _line(list(zip(n_bytes, seconds, strict=True)))

    num_operators = [len(layer.operators) for layer in layers]
    return {
        "divided_forward_s": launched_s("divided_forward_s", num_operators),
        "divided_backward_s": launched_s("divided_backward_s", launches),
        "split_s": launched_s("split_backward_s", launches),
        "action_s": launched_s("staged_action_s", [1] * len(measured)),
        "gather": cost("sharded_forward_s"),
        "reduce": cost("sharded_backward_s", "sharded_reduce_s"),
        "update": cost("sharded_update_s"),
    }


def _line(points: Sequence[tuple[int, float]]) -> LayerCost:
    """Returns the line through the smallest and the largest layer, nowhere below 0."""
    (small, least_s), (large, most_s) = min(points), max(points)
    slope = max(0.0, (most_s - least_s) / (large - small)) if large > small else 0.0
    return LayerCost(layer_s=_rounded(max(0.0, least_s - slope * small)), byte_s=_rounded(slope))


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def _predicted(
    equation: Equation, slowdown: float, forward_s: float, backward_s: float, host_adds: bool
) -> float:
    device_s = slowdown * equation.alone_s
    host_s = equation.launches * (backward_s if equation.backward else forward_s)
    return device_s + host_s if host_adds else max(device_s, host_s)


def _coefficients(equation: Equation) -> list[float]:
    if equation.backward:
        return [equation.alone_s, 0.0, equation.launches]
    return [equation.alone_s, equation.launches, 0.0]


def _added(passes: Sequence[Equation]) -> tuple[float, float, float]:
    """Fits (s, h_f, h_b) by least squares, with the best set of h at 0 that leaves none below."""
    sizes = {each.alone_s for each in passes if not each.backward}
    matrix = np.array([_coefficients(each) for each in passes])
    measured = np.array([[each.measured_s] for each in passes])
    relative = np.vstack([matrix / measured, [DRAW, 0.0, 0.0]])
    target = np.array([1.0] * len(passes) + [DRAW])
    best = np.array([1.0, 0.0, 0.0])
    least = np.inf
    free = (True, False) if len(sizes) > 1 else (False,)
    for used in product((True,), free, free):
        columns = [i for i, is_used in enumerate(used) if is_used]
        x = np.zeros(3)
        x[columns] = np.linalg.lstsq(relative[:, columns], target, rcond=None)[0]
        error = float(np.sum((relative @ x - target) ** 2))
        if (x >= 0).all() and error < least:
            best = x
            least = error
    if best[0] < _LEAST_SLOWDOWN:
        forward_s = _left_s(passes, backward=False) if best[1] > 0 else 0.0
        backward_s = _left_s(passes, backward=True) if best[2] > 0 else 0.0
        return _LEAST_SLOWDOWN, forward_s, backward_s
    return _within(best[0]), float(best[1]), float(best[2])


def _left_s(passes: Sequence[Equation], *, backward: bool) -> float:
    """Seconds of the host for one launch, if the device adds no slowdown."""
    beyond = median(
        (each.measured_s - each.alone_s) / each.launches
        for each in passes
        if each.backward is backward
    )
    return max(0.0, beyond)


def _bounded(passes: Sequence[Equation]) -> tuple[float, float, float]:
    """Fits (s, h_f, h_b): s to device-bound passes, h to host-bound passes, until none changes."""
    slowdown = 1.0
    host_s = {False: 0.0, True: 0.0}
    for _ in range(_ROUNDS):
        of_device = [
            each
            for each in passes
            if slowdown * each.alone_s >= each.launches * host_s[each.backward]
        ]
        before = slowdown, dict(host_s)
        largest = _largest(of_device or passes)
        slowdown = _within(median(each.measured_s / each.alone_s for each in largest))
        for backward in host_s:
            waiting = [
                each
                for each in passes
                if each.backward is backward and each.measured_s > 1.25 * slowdown * each.alone_s
            ]
            times = (each.measured_s / each.launches for each in waiting)
            host_s[backward] = min(times, default=0.0)
        if before == (slowdown, host_s):
            break
    return slowdown, host_s[False], host_s[True]


def _largest(passes: Sequence[Equation]) -> list[Equation]:
    """Returns the larger half of the passes, which are device-bound if any are."""
    ordered = sorted(passes, key=lambda each: each.alone_s)
    return ordered[len(ordered) // 2 :]


def _within(slowdown: float) -> float:
    return float(np.clip(slowdown, _LEAST_SLOWDOWN, _MOST_SLOWDOWN))
