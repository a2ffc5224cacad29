"""The fits of grouped products, those of the experts of a rank.

    t = slowdown single + groups launch

where `single` is the device's fitted curve of single products with the tiles of all groups in the
same waves. The rows are of a training framework under steady load, forward and input gradients.
Weight gradients are priced with the slowdown alone: their rows on B200 have two modes, 20 % around
that price on average, and show no time per group. The tables have whole expert layers of an
inference engine for H100 and H200; its kernel is another one, so they are no input here
(benchmarks/prices/grouped_products.py compares with them).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from parplan.profiles.build.recipes import chip_of
from parplan.profiles.machines.curve_fitting import (
    Array,
    CurveFamily,
    MeasurementTables,
    Row,
    Score,
    int_columns,
)
from parplan.profiles.machines.curves import Chip, GroupedCurve, Product, grouped_s, matmul_s
from parplan.profiles.machines.machine_catalog import load_cluster
from parplan.profiles.machines.speeds import Compute, Profile
from parplan.profiles.provenance import Kind

GROUPED = {"a100-80gb-pcie": "A100-PCIe-80GB", "b200-180gb": "B200-SXM-180GB"}
_START = (1.2, 2e-6)


def grouped_family(profile: Profile, tables: MeasurementTables) -> CurveFamily[GroupedCurve]:
    """Returns the rows of a device of `GROUPED`, and the form of their curve."""
    gpu = GROUPED[profile.name]

    def curve(x: Array) -> GroupedCurve:
        return GroupedCurve(
            launch_s=float(x[1]),
            kind=Kind.INTERPOLATED,
            source=f"MooreThreads/SimuMax: {gpu} grouped products",
            slowdown=float(x[0]),
        )

    return CurveFamily(
        device=profile.name,
        name="grouped products",
        rows=tables.rows(
            "grouped_matmul", {"gpu": gpu, "what": "grouped_gemm", "pass": ("y", "dx")}
        ),
        curve=curve,
        price=_price(profile.compute, chip_of(load_cluster(profile.name))),
        sizes=lambda row: int_columns(row, "m_per_group", "n", "k"),
        start=_START,
    )


def _price(compute: Compute, chip: Chip) -> Callable[[Row, GroupedCurve], float]:
    def price(row: Row, curve: GroupedCurve) -> float:
        groups, m, n, k = int_columns(row, "groups", "m_per_group", "n", "k")
        product, single = Product(m=m, n=n, k=k, batch=groups), compute.forward
        if row["pass"] == "dx":
            product, single = Product(m=m, n=k, k=n, batch=groups), compute.input_gradient
        return float(grouped_s(matmul_s(product, single, chip), groups, curve))

    return price


def with_grouped_products(
    profiles: Mapping[str, Profile], tables: MeasurementTables, scores: list[Score]
) -> dict[str, Profile]:
    """Returns the profiles, those of `GROUPED` with their curve of grouped products."""
    fitted = dict(profiles)
    for device in GROUPED:
        curve = grouped_family(profiles[device], tables).fitted(scores)
        compute = replace(profiles[device].compute, grouped=curve)
        fitted[device] = replace(profiles[device], compute=compute)
    return fitted
