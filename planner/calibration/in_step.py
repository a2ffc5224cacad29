"""What a step adds to its operators' own times: measured blocks beside the sums of their operators
under a profile.

A block of n_f operators (n_b launches backward) whose operators take F and B seconds alone took,
forward and backward,

    f = s F + n_f h_f          b = s B + n_b h_b            where the host is the device (its time
    adds) f = max(s F, n_f h_f)      b = max(s B, n_b h_b)        where the host launches ahead of
    the device

s is `kernel_slowdown` (gaps, colder caches, clocks), h_f and h_b the host's seconds for one
operator. Least squares of relative errors, h at least 0, s drawn towards 1 by as little as a tenth
of one pass. Blocks of one size alone cannot tell s from h: h is then 0.

What layouts add (FSDP, tensor parallelism, a backward pass in two parts, a pipeline's runtime) was
measured as seconds of a layer; it is divided by the layer's launches, in the smallest layer, or for
what grows with a layer's bytes a line through the smallest and the largest.
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

BLOCK, LAYOUTS = (
    "block",
    "layouts",
)  # the works of cases that measure one, and what layouts add to it
_WHOLE = Sharding()
_LEAST_SLOWDOWN, _MOST_SLOWDOWN = (
    1.0,
    3.0,
)  # operators are measured as cold as in a step: less is noise, as for stacks (profiles/stack.py)
_ROUNDS = 20
DRAW = 0.1**0.5  # of the slowdown towards 1, beside the equation of one pass


@dataclass(frozen=True, slots=True)
class Equation:
    """One pass of one block: seconds measured, of its operators alone, and how often the host
    launches something.
    """

    measured_s: float
    alone_s: float
    launches: int
    backward: bool


def block_model(case: Case) -> tuple[ModelSpec, int, int]:
    """The model of one block that a case measures, its micro-batch size and its sequence length."""
    sizes = dict(case.sizes)
    heads, kv_heads, seq = sizes["heads"], sizes["kv_heads"], sizes["seq"]
    model = ModelSpec(
        name=BLOCK,
        num_layers=1,
        hidden_size=sizes["hidden"],
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=sizes["head_dim"],
        ffn_hidden_size=sizes["ffn"],
        vocab_size=128,
        max_seq_length=seq,
        norm=Norm.RMS_NORM if sizes["rms"] else Norm.LAYER_NORM,
        positions=Positions.ROTARY if sizes["rotary"] else Positions.LEARNED,
        gated_ffn=bool(sizes["gated"]),
        linear_bias=not sizes["rms"],
        qkv_bias=not sizes["rms"],
        dropout=0.1 if sizes["dropout"] else 0.0,
    )
    return model, sizes["batch"], seq


def equations(
    records: Iterable[Record],
    profile: Profile,
    cluster: Cluster,
    precision: Precision,
    stack: Stack,
) -> Iterator[Equation]:
    """Both passes of every block that was measured, beside its operators under `profile`."""
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
    """The block that a case is of, with one micro-batch of it."""
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
    """What the blocks among `records` say; None without any."""
    found = list(equations(records, profile, cluster, precision, stack))
    if not found:
        return None
    slowdown, forward_s, backward_s = (_added if host_adds else _bounded)(found)
    layouts = _layouts(records, precision, stack) if host_adds else {}
    errors = [
        abs(_predicted(one, slowdown, forward_s, backward_s, host_adds) / one.measured_s - 1)
        for one in found
    ]
    return InStep(
        stack=stack.name,
        kernel_slowdown=float(f"{slowdown:.4g}"),
        forward_s=float(f"{forward_s:.4g}"),
        backward_s=float(f"{backward_s:.4g}"),
        host_adds=host_adds,
        source=f"{len(found) // 2} blocks, forward and backward, within {max(errors):.0%} (median "
        f"{median(errors):.0%})",
        **layouts,
    )


def _layouts(records: Sequence[Record], precision: Precision, stack: Stack) -> dict[str, Any]:
    """The fields of InStep that say what layouts add, of the blocks that were measured in them."""
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
        return _line(
            [
                (size, sum(found.get(name, 0.0) for name in names))
                for size, found in zip(n_bytes, figures, strict=True)
            ]
        )

    return {
        "divided_forward_s": launched_s(
            "divided_forward_s", [len(layer.operators) for layer in layers]
        ),
        "divided_backward_s": launched_s("divided_backward_s", launches),
        "split_s": launched_s("split_backward_s", launches),
        "action_s": launched_s("staged_action_s", [1] * len(measured)),
        "gather": cost("sharded_forward_s"),
        "reduce": cost("sharded_backward_s", "sharded_reduce_s"),
        "update": cost("sharded_update_s"),
    }


def _line(points: Sequence[tuple[int, float]]) -> LayerCost:
    """Through the smallest and the largest layer, nowhere below 0."""
    (small, least_s), (large, most_s) = min(points), max(points)
    slope = max(0.0, (most_s - least_s) / (large - small)) if large > small else 0.0
    return LayerCost(layer_s=_rounded(max(0.0, least_s - slope * small)), byte_s=_rounded(slope))


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def _predicted(
    one: Equation, slowdown: float, forward_s: float, backward_s: float, host_adds: bool
) -> float:
    device_s, host_s = (
        slowdown * one.alone_s,
        one.launches * (backward_s if one.backward else forward_s),
    )
    return device_s + host_s if host_adds else max(device_s, host_s)


def _added(found: Sequence[Equation]) -> tuple[float, float, float]:
    """(s, h_f, h_b) by least squares; of the solutions with some h at 0 the best whose others are
    not negative.
    """
    sizes = {one.alone_s for one in found if not one.backward}
    matrix = np.array(
        [
            [
                one.alone_s,
                0.0 if one.backward else one.launches,
                one.launches if one.backward else 0.0,
            ]
            for one in found
        ]
    )
    relative = np.vstack([matrix / np.array([[one.measured_s] for one in found]), [DRAW, 0.0, 0.0]])
    wanted = np.array([1.0] * len(found) + [DRAW])
    best, least = np.array([1.0, 0.0, 0.0]), np.inf
    for kept in product((True,), *([(True, False)] * 2 if len(sizes) > 1 else [(False,)] * 2)):
        columns = [i for i, keep in enumerate(kept) if keep]
        x = np.zeros(3)
        x[columns] = np.linalg.lstsq(relative[:, columns], wanted, rcond=None)[0]
        error = float(np.sum((relative @ x - wanted) ** 2))
        if (x >= 0).all() and error < least:
            best, least = x, error
    if best[0] < _LEAST_SLOWDOWN:
        return (
            _LEAST_SLOWDOWN,
            _left_s(found, backward=False) * (best[1] > 0),
            _left_s(found, backward=True) * (best[2] > 0),
        )
    return _within(best[0]), float(best[1]), float(best[2])


def _left_s(found: Sequence[Equation], *, backward: bool) -> float:
    """Of the host for one launch, what passes take beyond their operators as they are."""
    return max(
        0.0,
        median(
            (one.measured_s - one.alone_s) / one.launches
            for one in found
            if one.backward is backward
        ),
    )


def _bounded(found: Sequence[Equation]) -> tuple[float, float, float]:
    """(s, h_f, h_b): s from the passes that the device takes, h from those that the host takes,
    until none changes side.
    """
    slowdown, host_s = 1.0, {False: 0.0, True: 0.0}
    for _ in range(_ROUNDS):
        of_device = [
            one for one in found if slowdown * one.alone_s >= one.launches * host_s[one.backward]
        ]
        before = slowdown, dict(host_s)
        slowdown = _within(
            median(one.measured_s / one.alone_s for one in _largest(of_device or list(found)))
        )
        for backward in host_s:
            waiting = [
                one
                for one in found
                if one.backward is backward and one.measured_s > 1.25 * slowdown * one.alone_s
            ]
            host_s[backward] = min((one.measured_s / one.launches for one in waiting), default=0.0)
        if before == (slowdown, host_s):
            break
    return slowdown, host_s[False], host_s[True]


def _largest(found: Sequence[Equation]) -> list[Equation]:
    """The larger half, in which the device decides if it does at all."""
    ordered = sorted(found, key=lambda one: one.alone_s)
    return ordered[len(ordered) // 2 :]


def _within(slowdown: float) -> float:
    return float(np.clip(slowdown, _LEAST_SLOWDOWN, _MOST_SLOWDOWN))
