"""Measurements -> profiles/data/*.yaml.

`python -m parplan.profiles.build --measurements DIR ... [--out profiles/data]`

Fits the forms of `profiles/machines/curves.py` to tables of published timings (their README lists
sources, flags and traps) and prints, per device and family, the rows used and the median and mean
absolute percentage error, in-sample and in 5-fold cross-validation. The files hold fitted constants
and spline knots, never rows. The same tables give the same bytes.

Choices, with their reasons:
- Matmul: a log2 grid of median corrections in m, n, k on top of the form with tiles, waves and
  split k was tried. Where every size is at least 1024 the cross-validated median error is 4.2 %
  without and 3.2 % with it on A100, 3.3 and 2.9 on H100, 3.8 and 3.1 on B200; over all sizes it
  gains 1.2 to 2 points. A grid alone is worse than the form where sizes are small. Training has
  large products, so there is no grid. The form holds for the narrow products of tensor parallelism:
  for n of 384 to 1024, m >= 2048 and k >= 1024 that error is 4.3 % on A100, 3.4 on H100; tiles of
  192 or 256 x 64 gain nothing.
- H100, H200 and B200 slow down by 13-21 % in products above about 1e12 FLOPs, A100 does not: the
  cause is the power limit, which a training step reaches for good. Rows are compared with the form
  as measured; training is priced at the limit. The inputs of the GH200 rows are easy on power and
  do not show it: the limit of H100 is carried there. Rows under steady load exist of B200; that of
  GB200 and GB300, and their kernels bound by memory, are in `profiles/build/blackwell.py`.
- Gradients on Hopper borrow from A100-PCIe: shape by shape dx runs at 1.00 of the forward product
  there and dw into fp32 at 0.95; B200 says 0.99 and 0.93.
- Backward rows flagged tiny_gradients (gradients that underflow to zero run too fast) are not used
  for linear layers: the gradients' efficiency relative to the forward product is that of the rows
  without the flag. They are used for the products of un-fused attention on A100 and GH200, which
  have no others and show no such speed-up.
- Fused attention, forward: rows of inference engines (with_kv_cache_write) also write k and v and
  may run another kernel. Both are constants of the fit that do not ship: 2 to 3 passes over k and
  v, and 11 % on A100, 0 to 5 on Hopper. Without them the median error at trained head sizes is
  6.7 % on A100, 7.9 on H100 and, from 22 rows, 23.6 on B200; with them 4.1, 5.6 and 8.5, and 64 and
  128 wide heads differ on A100 as they do in the rows without the flag.
- Fused attention, backward: none of the tables has it on Hopper. The curves are fitted to the bars
  that the FlashAttention-3 paper prints for H100, version 3 for H100 and H200 (whose forward rows
  are that kernel), version 2 for GH200 (likewise).
- Speeds of other attention kernels relative to that of the curves (`flash_kernels`) are medians
  over head_dim 64 and 128 and 2k to 16k tokens: on Hopper of that paper's bars, on A100
  FlashAttention 1 as Triton had it in July 2023 (head_dim 64 only), which Hopper borrows relative
  to FlashAttention 2. No public figure of FlashAttention 1 on H100 was found that tells its passes
  apart.
- A variant (the same chip with another memory, link or power) carries curves, marked ANALYTIC.
  A100-PCIe has rows of products and attention, too few for more than the efficiency. A part with
  less power takes longer where power is the limit.
- `--datasheets` also writes the devices without measured operators. Without such a file a device
  gets the same assumptions of `analytic_profile`, except the efficiency and the power limit of its
  products.
- CC BY-SA rows, `other_run_differs`, slow networks and GPUs named by inference are not used.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from parplan.profiles.build.attention_curves import blackwell_flash2, flash1_speed, hopper_kernels
from parplan.profiles.build.blackwell import (
    STEADY,
    STREAMS_OF_HOPPER,
    PowerLimit,
    limited,
    mapped,
    with_streams,
)
from parplan.profiles.build.compute_curves import compute_curves, retimed_curves
from parplan.profiles.build.grouped_curves import with_grouped_products
from parplan.profiles.build.link_curves import inter, intra, reduced_intra
from parplan.profiles.build.machine_recipes import (
    AICONFIGURATOR,
    DATASHEETS,
    NNSCALER,
    RECIPES,
    VARIANTS,
    Datasheet,
    Variant,
)
from parplan.profiles.build.recipes import FitContext, chip_of
from parplan.profiles.documents.schema import document
from parplan.profiles.machines.curve_fitting import AnyCurve, MeasurementTables, Score, rounded
from parplan.profiles.machines.curves import FlashCurve, MatmulCurve
from parplan.profiles.machines.machine_catalog import load_cluster
from parplan.profiles.machines.shipped_profiles import analytic_profile
from parplan.profiles.machines.speeds import Compute, FlashSpeed, Intra, Profile
from parplan.profiles.provenance import Kind
from parplan.profiles.stack import FlashKernel

HOPPER_KERNELS = {  # device -> the kernel of its flash curves
    "h100-80gb": FlashKernel.FLASH3,
    "h200-141gb": FlashKernel.FLASH3,
    "gh200-96gb": FlashKernel.FLASH2,
}
BLACKWELL_CURVES = ("b200-180gb", "gb200-186gb", "gb300-279gb")  # devices with flash curves
# power limit of products carried: rows too easy on power
LIMITS = {"gh200-96gb": "h100-80gb"}


def slowed(curve: Any, power: float) -> Any:
    """Returns a curve at a share `power` of the power limit.

    The time of steady products and of fused attention grows as power ** -1/2. The exponent is
    between the cube root of a chip whose voltage falls with its clock and the whole power of a chip
    at its least voltage.
    """
    factor = power**-0.5
    if isinstance(curve, MatmulCurve) and curve.throttle:
        return replace(curve, throttle=rounded((1 + curve.throttle) * factor - 1))
    if isinstance(curve, FlashCurve):
        return replace(curve, efficiency=min(1.0, rounded(curve.efficiency / factor)))
    return curve


def _variant(context: FitContext, variant: Variant, lender: Profile) -> Profile:
    """Returns the profile of the same chip with another memory, link or power.

    Curves without rows of the variant are carried over and marked ANALYTIC.
    """
    power = f" at {variant.power:.2f} of its power" if variant.power != 1 else ""
    note = f"{variant.lender}, the same chip{power}"

    def carried(name: str, curve: AnyCurve) -> AnyCurve:
        moved: AnyCurve = curve if variant.power == 1 else slowed(curve, variant.power)
        return replace(moved, kind=Kind.ANALYTIC, source=f"{note}: {curve.source}")

    compute = mapped(lender.compute, carried)
    if variant.efficiency is not None:
        compute = _at_efficiency(compute, variant.efficiency, note)
    if variant.gpu:
        compute = retimed_curves(context, compute, lender.compute)
    inside = (
        _measured_intra(context, (variant.links,), (AICONFIGURATOR,))
        if variant.links
        else _carried_intra(context, lender, note)
    )
    return Profile(name=variant.device, compute=compute, intra=inside, inter=lender.inter)


def _at_efficiency(compute: Compute, efficiency: float, note: str) -> Compute:
    """Returns the curves with products that reach a share of the peak, whatever their length."""
    source = f"{note}: its launch and memory; efficiency assumed, without a limit by power"

    def reached(name: str, curve: Any) -> Any:
        if not isinstance(curve, MatmulCurve):
            return curve
        return replace(curve, efficiency=efficiency, throttle=0.0, source=source)

    return mapped(compute, reached)


def _measured_intra(context: FitContext, gpus: tuple[str, ...], sources: tuple[str, ...]) -> Intra:
    link_bytes_per_s = context.cluster.intra_node.bytes_per_s
    device = context.recipe.device
    return intra(context.tables, device, gpus, sources, link_bytes_per_s, context.scores)


def _carried_intra(context: FitContext, lender: Profile, note: str) -> Intra:
    """Returns the speeds between the GPUs of a node, carried from a lender.

    They are the lender's curves on the same link, its shares on a slower link of the same sort, and
    assumptions on PCIe.
    """
    link = context.cluster.intra_node
    if link.bytes_per_s == lender.intra.link_bytes_per_s:
        return lender.intra
    if link.name.startswith("pcie"):
        return replace(
            analytic_profile(context.recipe.device).intra, link_bytes_per_s=link.bytes_per_s
        )
    return replace(
        lender.intra,
        link_bytes_per_s=link.bytes_per_s,
        kind=Kind.ANALYTIC,
        curves=(),
        source=f"shares of {note}: {lender.intra.source}",
    )


def _limit_of(lender: Profile) -> PowerLimit:
    limit = lender.compute.forward
    return PowerLimit(
        throttle=limit.throttle,
        throttle_flops=limit.throttle_flops,
        source=f"power limit of {lender.name}",
    )


def _with_kernels(profile: Profile, kernels: Mapping[FlashKernel, FlashSpeed]) -> Profile:
    return replace(profile, compute=replace(profile.compute, flash_kernels=kernels))


def from_datasheet(sheet: Datasheet, tables: MeasurementTables, scores: list[Score]) -> Profile:
    """Returns a profile of assumptions, that of a device without measured operators.

    The efficiency and the power limit of products are those of the datasheet.
    """
    throttle = rounded(1 / sheet.sustained - 1)

    def assumed(name: str, curve: AnyCurve) -> AnyCurve:
        if not isinstance(curve, MatmulCurve):
            return curve
        return replace(curve, efficiency=sheet.efficiency, throttle=throttle, source=sheet.source)

    profile = analytic_profile(sheet.device)
    compute = mapped(profile.compute, assumed)
    if sheet.flash is not None:
        compute = _with_flash(compute, sheet.flash, sheet.flash_source)
    inside = replace(
        profile.intra, link_bytes_per_s=load_cluster(sheet.device).intra_node.bytes_per_s
    )
    if sheet.link_share is not None:
        inside = replace(inside, link_share=sheet.link_share, source=sheet.link_source)
    if sheet.links:
        inside = reduced_intra(tables, sheet.device, sheet.links, (NNSCALER,), inside, scores)
    return replace(profile, compute=compute, intra=inside)


def _with_flash(compute: Compute, shares: tuple[float, float], source: str) -> Compute:
    """Returns the curves with fused attention at shares of the peak, forward and backward."""
    forward, backward = shares
    return replace(
        compute,
        flash_forward=replace(compute.flash_forward, efficiency=forward, source=source),
        flash_backward=replace(compute.flash_backward, efficiency=backward, source=source),
    )


def _profile(context: FitContext) -> Profile:
    recipe = context.recipe
    link = context.cluster.intra_node
    gpus = (recipe.gpu, "A100-SXM4") if recipe.gpu.startswith("A100") else (recipe.gpu,)
    # for nodes of one GPU
    inside = replace(analytic_profile(recipe.device).intra, link_bytes_per_s=link.bytes_per_s)
    if recipe.collectives:
        inside = _measured_intra(context, gpus, recipe.collectives)
    return Profile(
        name=recipe.device,
        compute=compute_curves(context),
        intra=inside,
        inter=inter(context.tables, []),
    )


def calibrate(tables: MeasurementTables) -> tuple[tuple[Profile, ...], tuple[Score, ...]]:
    """Returns every shipped profile and the errors of its curves."""
    scores: list[Score] = []
    inter(tables, scores)
    profiles: dict[str, Profile] = {}
    for recipe in RECIPES:
        cluster = load_cluster(recipe.device)
        context = FitContext(recipe=recipe, cluster=cluster, tables=tables, scores=scores)
        profiles[recipe.device] = _profile(context)
    for device, lender in LIMITS.items():
        profiles[device] = limited(profiles[device], _limit_of(profiles[lender]))
    for device, limit in STEADY.items():
        profiles[device] = limited(profiles[device], limit)
    for device in STREAMS_OF_HOPPER:
        profiles[device] = with_streams(profiles[device])
    flash1 = flash1_speed(profiles["a100-80gb"].compute, chip_of(load_cluster("a100-80gb")))
    profiles["a100-80gb"] = _with_kernels(profiles["a100-80gb"], {FlashKernel.FLASH1: flash1})
    for device, kernel in HOPPER_KERNELS.items():
        kernels = hopper_kernels(profiles[device].compute, kernel, flash1)
        profiles[device] = _with_kernels(profiles[device], kernels)
    for device in BLACKWELL_CURVES:
        flash2 = blackwell_flash2(profiles[device].compute, chip_of(load_cluster(device)))
        profiles[device] = _with_kernels(profiles[device], {FlashKernel.FLASH2: flash2})
    for variant in VARIANTS:
        lent = next((recipe for recipe in RECIPES if recipe.device == variant.lender), RECIPES[0])
        recipe = replace(lent, device=variant.device, gpu=variant.gpu or lent.gpu)
        cluster = load_cluster(variant.device)
        context = FitContext(recipe=recipe, cluster=cluster, tables=tables, scores=scores)
        profiles[variant.device] = _variant(context, variant, profiles[variant.lender])
    profiles = with_grouped_products(profiles, tables, scores)
    return tuple(profiles.values()), tuple(scores)


def shipped_profile_to_yaml(profile: Profile) -> str:
    """Returns the file of one profile.

    Its fields are in the order of the dataclasses, without empty ones.
    """
    body = yaml.safe_dump(
        _plain(document(profile)), sort_keys=False, default_flow_style=None, width=140
    )
    return (
        "# Written by `python -m parplan.profiles.build` from public measurements; do not "
        f"edit. Times in s and us, sizes in bytes.\n{body}"
    )


USER_DEFAULTS: dict[str, Any] = {  # defaults of the fields that only a user's own profile has
    "points": [],
    "named": {},
    "crossing": [],
    "nodes": 1,
    "groups": 1,
    "untiled": False,
}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: _plain(item)
            for key, item in value.items()
            if item is not None and (key not in USER_DEFAULTS or item != USER_DEFAULTS[key])
        }
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _line(score: Score) -> str:
    """Returns a line of the report, with room for the longest name of a device."""
    return f"{score.device:<16}{str(replace(score, device=''))[12:]}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Rebuilds the profiles and prints the report."""
    parser = argparse.ArgumentParser(
        prog="python -m parplan.profiles.build",
        description="Rebuild profiles/data/*.yaml from measurements.",
    )
    parser.add_argument(
        "--measurements",
        type=Path,
        required=True,
        action="append",
        help="directory of CSV tables; may be repeated",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("profiles/data"), help="directory of the YAML files"
    )
    parser.add_argument(
        "--datasheets", action="store_true", help="write the devices that nobody measured, too"
    )
    options = parser.parse_args(arguments)
    tables = MeasurementTables(tuple(options.measurements))
    profiles, fitted = calibrate(tables)
    scores = list(fitted)
    sheets = DATASHEETS if options.datasheets else ()
    assumed = [from_datasheet(sheet, tables, scores) for sheet in sheets]
    for profile in (*profiles, *assumed):
        path = options.out / f"{profile.name}.yaml"
        path.write_text(shipped_profile_to_yaml(profile), encoding="ascii")
    errors = f"{'median':>9}{'mean':>8}{'cv med':>8}{'cv mean':>8}"
    header = f"{'device':<16}{'family':<38}{'rows':>6}{errors}"
    sys.stdout.write("\n".join((header, *map(_line, scores), "")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
