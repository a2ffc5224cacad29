"""Prices of grouped products, those of experts, against measurements they did not see.

    python benchmarks/prices/grouped_products.py --measurements DIR

Three tables. The curve of each device with rows is fitted to half of its shapes, and priced on the
other half: before, as one product with the tiles of all groups, and after. The carried curve is
priced on whole expert layers of an inference engine (vLLM) on H100 and H200, whose kernel is
another one. Megatron's expert layer of Mixtral on eight H100, with its exchanges, is priced by the
operators of the planner.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import click
import numpy as np

from parplan.costmodels.communication.collectives import Collective, collective_time
from parplan.costmodels.communication.mesh import Placement
from parplan.costmodels.operators.compute import operator_time
from parplan.costmodels.operators.host_launch import launch_cost_of
from parplan.costmodels.operators.sharding import Sharding
from parplan.profiles.build.grouped_curves import GROUPED, grouped_family
from parplan.profiles.build.recipes import chip_of
from parplan.profiles.machines.curve_fitting import MeasurementTables, Row, int_columns, times_s
from parplan.profiles.machines.curves import (
    GroupedCurve,
    Product,
    grouped_s,
    matmul_s,
    memory_bound_s,
)
from parplan.profiles.machines.machine_catalog import load_cluster, load_stack, with_gpus
from parplan.profiles.machines.shipped_profiles import Machine, machine_for
from parplan.profiles.machines.speeds import ASSUMED_GROUPED
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.operator_graph import LayerKind, Operator, OperatorKind
from parplan.profiles.models.spec import TrainingSpec
from parplan.profiles.models.transformer import build_graph

SINGLE = replace(ASSUMED_GROUPED, slowdown=1.0, launch_s=0.0)
INFERRED = {"h100-80gb": "H100-SXM5-80GB", "h200-141gb": "H200-SXM-141GB"}
LEAST_TOKENS = 64  # of one expert: fewer are decoding
LAYER = ("mixtral-8x7b", "h100-80gb", 8, 4096)  # model, device, ranks, tokens of a rank
SHAPE = ("groups", "m_per_group", "n", "k")
Price = Callable[[Row, GroupedCurve], float]


def machine_of(device: str) -> Machine:
    """Returns the shipped machine of eight GPUs."""
    return machine_for(with_gpus(load_cluster(device), 8))


def halves(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """Returns the rows of every second shape, and the others; no shape is in both."""
    first = set(sorted({int_columns(row, *SHAPE) for row in rows})[::2])
    seen = [row for row in rows if int_columns(row, *SHAPE) in first]
    return seen, [row for row in rows if int_columns(row, *SHAPE) not in first]


def errors(rows: Sequence[Row], price: Price, curve: GroupedCurve) -> tuple[float, float]:
    """Returns the median and the mean absolute relative error of prices."""
    priced = np.array([price(row, curve) for row in rows])
    off = np.abs(priced / times_s(rows) - 1).tolist()
    return statistics.median(off), statistics.fmean(off)


def inferred_rows(tables: MeasurementTables, gpu: str) -> list[Row]:
    """Returns the balanced expert layers with enough tokens for each expert."""
    where = {"gpu": gpu, "what": "fused_moe_ffn", "distribution": "balanced"}
    return [row for row in tables.rows("grouped_matmul", where) if _tokens(row) >= LEAST_TOKENS]


def _tokens(row: Row) -> int:
    groups, tokens, topk = int_columns(row, "groups", "tokens", "topk")
    return -(-tokens * topk // groups)


def layer_price(device: str) -> Price:
    """Returns the price of an expert layer of an inference engine: products, activation, sums."""
    compute, chip = machine_of(device).profile.compute, chip_of(load_cluster(device))

    def price(row: Row, curve: GroupedCurve) -> float:
        groups, tokens, topk, hidden = int_columns(row, "groups", "tokens", "topk", "hidden")
        ffn = int(row["ffn"]) // int(row["tp"])
        products_s = sum(
            grouped_s(
                matmul_s(
                    Product(m=_tokens(row), n=n, k=k, batch=groups),
                    compute.forward,
                    chip,
                    sustained=False,
                ),
                groups,
                curve,
            )
            for n, k in ((2 * ffn, hidden), (hidden, ffn))
        )
        n_bytes = 2 * tokens * (3 * topk * ffn + (topk + 1) * hidden)
        return float(
            products_s + memory_bound_s(n_bytes, compute.elementwise.forward, chip.bytes_per_s)
        )

    return price


def expert_operators(model: str, tokens: int) -> tuple[tuple[Operator, ...], TrainingSpec]:
    """Returns the operators of a block from its router to the combination of the experts."""
    training = TrainingSpec(
        global_batch_size=8, seq_length=tokens, stack=load_stack("megatron-core")
    )
    graph = build_graph(load_model(model).spec, training, 1)
    block = next(
        layer.layer for layer in graph.layers if layer.layer.kind.role is LayerKind.BLOCK
    ).operators
    kinds = [operator.kind for operator in block]
    dispatch, combine = kinds.index(OperatorKind.DISPATCH), kinds.index(OperatorKind.COMBINE)
    return block[dispatch - 2 : combine + 1], training


def predicted_layer_s(curve: GroupedCurve | None) -> tuple[float, float]:
    """Seconds of the forward and the backward pass of `LAYER`, with its two exchanges.

    The layer was timed alone: kernels are not slower than alone, as in a step, and the device is
    not at its power limit.
    """
    model, device, ranks, tokens = LAYER
    machine = machine_of(device)
    compute = machine.profile.compute
    rested = {
        name: replace(getattr(compute, name), throttle=0.0)
        for name in ("forward", "input_gradient", "weight_gradient")
    }
    compute = replace(compute, grouped=curve, **rested)
    machine = replace(machine, profile=replace(machine.profile, compute=compute))
    operators, training = expert_operators(model, tokens)
    sharding = Sharding(ep=ranks)
    times = [operator_time(operator, sharding, machine, training) for operator in operators]
    where = Placement(nodes=1, ranks_per_node=ranks, groups_per_node=1)
    dispatch = next(each for each in operators if each.kind is OperatorKind.DISPATCH)
    n_bytes = sharding.tensor_bytes(dispatch, dispatch.outputs[0])
    exchange_s = collective_time(Collective.ALL_TO_ALL, n_bytes, where, machine).value_s
    slower = launch_cost_of(machine, training.stack).kernel_slowdown
    return (
        sum(float(time.forward.value_s) for time in times) / slower + 2 * exchange_s,
        sum(float(time.backward.value_s) for time in times) / slower + 2 * exchange_s,
    )


@click.command()
@click.option("--measurements", type=click.Path(path_type=Path, exists=True), required=True)
def main(measurements: Path) -> None:
    """Prints the three tables; errors are median and mean."""
    tables = MeasurementTables((measurements,))

    def line(name: str, rows: Sequence[Row], price: Price, curve: GroupedCurve) -> None:
        before, after = errors(rows, price, SINGLE), errors(rows, price, curve)
        click.echo(
            f"{name:44}{len(rows):5}   before {before[0]:6.1%} {before[1]:6.1%}"
            f"   after {after[0]:6.1%} {after[1]:6.1%}"
        )

    for device in GROUPED:
        family = grouped_family(machine_of(device).profile, tables)
        seen, unseen = halves(family.rows)
        line(f"{device}, held-out half of the shapes", unseen, family.price, family.fit(seen))
    for device, gpu in INFERRED.items():
        rows = inferred_rows(tables, gpu)
        line(f"{device}, layers of an inference engine", rows, layer_price(device), ASSUMED_GROUPED)
    where = {"model": "mixtral_8e_top2", "part": "moe_layer_a2a", "dtype": "bf16"}
    before, after = predicted_layer_s(SINGLE), predicted_layer_s(None)
    for row in tables.rows("layers", where):
        way = int(row["direction"] == "backward")
        measured_s = float(row["time_us"]) / 1e6
        off = [price[way] / measured_s - 1 for price in (before, after)]
        click.echo(
            f"Megatron's layer of Mixtral, {row['direction']:16}{measured_s * 1e3:8.2f} ms "
            f"before {off[0]:+6.1%}   after {off[1]:+6.1%}"
        )


if __name__ == "__main__":
    main()
