"""Measurements -> profiles/data/*.yaml: `python -m parplan.profiles.build --measurements DIR [--out
profiles/data]`.

Fits the forms of `profiles/machines/curves.py` to tables of published timings (their README lists
sources, flags and traps) and prints, per device and family, the rows used and the median and mean
absolute percentage error, in-sample and in 5-fold cross-validation. What ships are fitted constants
and spline knots, never rows. Same tables, same bytes.

Choices, with their reasons:
- Matmul: a log2 grid of median corrections in m, n, k on top of the form with tiles, waves and
split k was tried. Where every
  size is at least 1024 the cross-validated median error is 4.2 % without and 3.2 % with it on A100,
  3.3 and 2.9 on H100, 3.8 and 3.1 on B200; over all sizes it gains 1.2 to 2 points. A grid alone is
  worse than the form where sizes are small. Training has large products, so there is no grid. The
  form holds for the narrow products of tensor parallelism: for n of 384 to 1024, m >= 2048 and k >=
  1024 that error is 4.3 % on A100, 3.4 on H100; tiles of 192 or 256 x 64 gain nothing.
- H100, H200 and B200 slow down by 13-21 % in products above about 1e12 FLOPs, A100 does not: the
power limit, which a
  training step reaches for good. Rows are compared with the form as measured; training is priced at
  the limit. The inputs of the GH200 rows are easy on power and do not show it: the limit of H100 is
  carried there, and that of B200 to GB200, since rows under steady load exist of B200 only.
- Gradients on Hopper borrow from A100-PCIe: shape by shape dx runs at 1.00 of the forward product
there and dw into fp32 at
  0.95; B200 says 0.99 and 0.93.
- Backward rows flagged tiny_gradients (gradients that underflow to zero run too fast) are not used
for linear layers: the
  gradients' efficiency relative to the forward product is that of the rows without the flag. They
  are used for the products of un-fused attention on A100 and GH200, which have no others and show
  no such speed-up.
- Fused attention, forward: rows of inference engines (with_kv_cache_write) also write k and v and
may run another kernel. Both
  are constants of the fit that do not ship: 2 to 3 passes over k and v, and 11 % on A100, 0 to 5 on
  Hopper. Without them the median error at trained head sizes is 6.7 % on A100, 7.9 on H100 and,
  from 22 rows, 23.6 on B200; with them 4.1, 5.6 and 8.5, and 64 and 128 wide heads differ on A100
  as they do in the rows without the flag.
- Fused attention, backward: none of the tables has it on Hopper. What ships is fitted to the bars
that the FlashAttention-3 paper
  prints for H100, version 3 for H100 and H200 (whose forward rows are that kernel), version 2 for
  GH200 (likewise).
- Speeds of other attention kernels beside the curves' own (`flash_kernels`) are medians over
head_dim 64 and 128 and 2k to 16k
  tokens: on Hopper of that paper's bars, on A100 FlashAttention 1 as Triton had it in July 2023
  (head_dim 64 only), which Hopper borrows beside FlashAttention 2. No public figure of
  FlashAttention 1 on H100 was found that tells its passes apart.
- A variant (the same chip with another memory, link or power) carries curves, marked ANALYTIC.
A100-PCIe has rows of products
  and attention, too few for more than the efficiency. A part with less power takes longer where
  power is the limit.
- `--datasheets` also writes the devices that nobody measured. Without such a file a device gets the
same assumptions of
  `analytic_profile`, but for the efficiency and the power limit of its products.
- CC BY-SA rows, `other_run_differs`, slow networks and GPUs named by inference are not used.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import yaml

from parplan.profiles.build.attention_curves import flash1_speed, hopper_kernels
from parplan.profiles.build.recipes import Bench, Recipe, chip_of
from parplan.profiles.build.compute_curves import SUPERSCALER, compute_curves, retimed_curves
from parplan.profiles.build.link_curves import inter, intra
from parplan.profiles.machines.machine_catalog import load_cluster
from parplan.profiles.machines.curves import Curve, FlashCurve, MatmulCurve
from parplan.profiles.machines.curve_fitting import AnyCurve, Score, MeasurementTables, rounded
from parplan.profiles.machines.shipped_profiles import analytic_profile
from parplan.profiles.provenance import Kind
from parplan.profiles.documents.schema import document
from parplan.profiles.machines.speeds import Compute, FlashSpeed, Intra, PassCurves, Profile
from parplan.profiles.stack import FlashKernel

AICONFIGURATOR = "ai-dynamo/aiconfigurator"
TRAIN_TIME = "DebarghaG/estimate-train-time"
VTRAIN = "VIA-Research/vTrain"
RECIPES = (
    Recipe(
        device="a100-80gb", gpu="A100-SXM4-80GB", throttles=False, gradients="A100-PCIe-80GB", flash=("flash2",),
        flash_backward="A100-SXM4-80GB", memory="A100-SXM4-80GB", sources=(AICONFIGURATOR, TRAIN_TIME),
        collectives=(AICONFIGURATOR, VTRAIN)),
    Recipe(
        device="h100-80gb", gpu="H100-SXM5-80GB", throttles=True, gradients="A100-PCIe-80GB", flash=("flash3",), flash_backward="flash3",
        memory="GH200-96GB", sources=(AICONFIGURATOR,), collectives=(AICONFIGURATOR,)),
    Recipe(
        device="h200-141gb", gpu="H200-SXM-141GB", throttles=True, gradients="A100-PCIe-80GB", flash=("flash3",), flash_backward="flash3",
        memory="GH200-96GB", sources=(AICONFIGURATOR,), collectives=(AICONFIGURATOR,)),
    Recipe(
        device="gh200-96gb", gpu="GH200-96GB", throttles=False, gradients="A100-PCIe-80GB", flash=("flash2",), flash_backward="flash2",
        memory="GH200-96GB", sources=(TRAIN_TIME,), collectives=()),
    Recipe(
        device="b200-180gb", gpu="B200-SXM-180GB", throttles=True, gradients="B200-SXM-180GB", flash=("flash_te", "flash_trtllm"),
        flash_backward="B200-SXM-180GB", memory="GH200-96GB", sources=(AICONFIGURATOR,), collectives=(AICONFIGURATOR,)),
    Recipe(
        device="gb200-186gb", gpu="GB200-186GB", throttles=True, gradients="B200-SXM-180GB", flash=("flash_trtllm",),
        flash_backward="B200-SXM-180GB", memory="GH200-96GB", sources=(AICONFIGURATOR,), collectives=(AICONFIGURATOR,)),
    Recipe(
        device="v100-32gb", gpu="V100-SXM2-32GB", throttles=False, gradients="V100-SXM2-32GB", flash=(), flash_backward="",
        memory="V100-SXM2-32GB", sources=(SUPERSCALER,), collectives=(SUPERSCALER,)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A device with the chip of another one.

    power  its power limit over the other's; below 1 it takes power ** -1/2 times as long where
           power is the limit
    gpu    its name in the tables, where it has rows of products and fused attention of its own
    """

    device: str
    lender: str
    power: float = 1.0
    gpu: str = ""


VARIANTS = (
    Variant(device="a100-40gb", lender="a100-80gb"),
    Variant(device="a800-80gb", lender="a100-80gb"),
    Variant(device="a100-80gb-pcie", lender="a100-80gb", gpu="A100-PCIe-80GB"),
    Variant(device="a100-40gb-pcie", lender="a100-80gb-pcie"),
    Variant(device="h100-96gb-hbm2e", lender="h100-80gb", power=500 / 700),
    Variant(device="v100-16gb", lender="v100-32gb"),
)
HOPPER_KERNELS = {  # device -> the kernel of its flash curves
    "h100-80gb": FlashKernel.FLASH3, "h200-141gb": FlashKernel.FLASH3, "gh200-96gb": FlashKernel.FLASH2,
}
# power limit of products carried: rows too easy on power, or rested
LIMITS = {"gh200-96gb": "h100-80gb", "gb200-186gb": "b200-180gb"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Datasheet:
    """What is assumed of a device that nobody measured, beyond `analytic_profile`.

    efficiency  of products, share of the peak at the boost clock; sustained: share of that which
                steady load leaves
    """

    device: str
    efficiency: float
    sustained: float
    source: str


DATASHEETS = (
    Datasheet(
        device="rtx3090-24gb", efficiency=0.95, sustained=0.95,
        source="assumed: at half rate the tensor cores of GA102 wait for little, and 350 W carry them"),
    Datasheet(device="a10g-24gb", efficiency=0.9, sustained=0.9, source="assumed: as GA102 at half rate, with less power"),
    Datasheet(
        device="l4-24gb", efficiency=0.75, sustained=0.63,
        source="assumed: 72 W; 8192^3 in bf16 at 59 TFLOP/s and 2048^3 at 71 are reported (zzc0721/torch-performance-test-data issue 120)"),
)


def _mapped(compute: Compute, change: Callable[[str, Any], Any]) -> Compute:
    """The same curves after `change(name, curve)`."""
    moved: dict[str, Any] = {}
    for one in fields(compute):
        value = getattr(compute, one.name)
        if isinstance(value, Curve):
            moved[one.name] = change(one.name, value)
        elif isinstance(value, PassCurves):
            moved[one.name] = PassCurves(forward=change(one.name, value.forward), backward=change(one.name, value.backward))
    return replace(compute, **moved)


def _slowed(curve: Any, power: float) -> Any:
    """A curve at a share `power` of the power limit: what steady products and fused attention take
    grows as power ** -1/2.

    Between the cube root of a chip whose voltage falls with its clock and the whole power of one at
    its least voltage.
    """
    factor = power**-0.5
    if isinstance(curve, MatmulCurve) and curve.throttle:
        return replace(curve, throttle=rounded((1 + curve.throttle) * factor - 1))
    return replace(curve, efficiency=rounded(curve.efficiency / factor)) if isinstance(curve, FlashCurve) else curve


def _variant(bench: Bench, variant: Variant, lender: Profile) -> Profile:
    """The same chip with another memory, link or power: what it has no rows of is carried over and
    marked ANALYTIC.
    """
    note = f"{variant.lender}, the same chip" + (f" at {variant.power:.2f} of its power" if variant.power != 1 else "")

    def carried(name: str, curve: AnyCurve) -> AnyCurve:
        moved: AnyCurve = curve if variant.power == 1 else _slowed(curve, variant.power)
        return replace(moved, kind=Kind.ANALYTIC, source=f"{note}: {curve.source}")

    compute = _mapped(lender.compute, carried)
    if variant.gpu:
        compute = retimed_curves(bench, compute, lender.compute)
    return Profile(name=variant.device, compute=compute, intra=_carried_intra(bench, lender, note), inter=lender.inter)


def _carried_intra(bench: Bench, lender: Profile, note: str) -> Intra:
    """The lender's curves on the same link; on a slower one of the same sort their shares; on PCIe
    what is assumed.
    """
    link = bench.cluster.intra_node
    if link.bytes_per_s == lender.intra.link_bytes_per_s:
        return lender.intra
    if link.name.startswith("pcie"):
        return replace(analytic_profile(bench.recipe.device).intra, link_bytes_per_s=link.bytes_per_s)
    return replace(
        lender.intra, link_bytes_per_s=link.bytes_per_s, kind=Kind.ANALYTIC, curves=(), source=f"shares of {note}: {lender.intra.source}")


def _limited(profile: Profile, lender: Profile) -> Profile:
    """The profile with the power limit of another chip for its products, which makes them
    ANALYTIC.
    """
    limit = lender.compute.forward

    def limited(name: str, curve: AnyCurve) -> AnyCurve:
        if not isinstance(curve, MatmulCurve) or name.startswith("batched"):
            return curve
        source = f"{curve.source}; power limit of {lender.name}"
        return replace(curve, throttle=limit.throttle, throttle_flops=limit.throttle_flops, kind=Kind.ANALYTIC, source=source)

    return replace(profile, compute=_mapped(profile.compute, limited))


def _with_kernels(profile: Profile, kernels: Mapping[FlashKernel, FlashSpeed]) -> Profile:
    return replace(profile, compute=replace(profile.compute, flash_kernels=kernels))


def from_datasheet(sheet: Datasheet) -> Profile:
    """A profile of assumptions: that of a device without measurements, with its own efficiency and
    power limit of products.
    """
    throttle = rounded(1 / sheet.sustained - 1)

    def assumed(name: str, curve: AnyCurve) -> AnyCurve:
        if not isinstance(curve, MatmulCurve):
            return curve
        return replace(curve, efficiency=sheet.efficiency, throttle=throttle, source=sheet.source)

    profile = analytic_profile(sheet.device)
    link_bytes_per_s = load_cluster(sheet.device).intra_node.bytes_per_s
    return replace(
        profile, compute=_mapped(profile.compute, assumed), intra=replace(profile.intra, link_bytes_per_s=link_bytes_per_s))


def _profile(bench: Bench) -> Profile:
    recipe, link = bench.recipe, bench.cluster.intra_node
    gpus = (recipe.gpu, "A100-SXM4") if recipe.gpu.startswith("A100") else (recipe.gpu,)
    # one GPU a node
    inside = replace(analytic_profile(recipe.device).intra, link_bytes_per_s=link.bytes_per_s)
    if recipe.collectives:
        inside = intra(bench.tables, recipe.device, gpus, recipe.collectives, link.bytes_per_s, bench.scores)
    return Profile(name=recipe.device, compute=compute_curves(bench), intra=inside, inter=inter(bench.tables, []))


def calibrate(tables: MeasurementTables) -> tuple[tuple[Profile, ...], tuple[Score, ...]]:
    """Every shipped profile and the errors of its curves."""
    scores: list[Score] = []
    inter(tables, scores)
    profiles: dict[str, Profile] = {}
    for recipe in RECIPES:
        profiles[recipe.device] = _profile(Bench(recipe=recipe, cluster=load_cluster(recipe.device), tables=tables, scores=scores))
    for device, lender in LIMITS.items():
        profiles[device] = _limited(profiles[device], profiles[lender])
    flash1 = flash1_speed(profiles["a100-80gb"].compute, chip_of(load_cluster("a100-80gb")))
    profiles["a100-80gb"] = _with_kernels(profiles["a100-80gb"], {FlashKernel.FLASH1: flash1})
    for device, own in HOPPER_KERNELS.items():
        profiles[device] = _with_kernels(profiles[device], hopper_kernels(profiles[device].compute, own, flash1))
    for variant in VARIANTS:
        lenders = next((recipe for recipe in RECIPES if recipe.device == variant.lender), RECIPES[0])
        recipe = replace(lenders, device=variant.device, gpu=variant.gpu or lenders.gpu)
        bench = Bench(recipe=recipe, cluster=load_cluster(variant.device), tables=tables, scores=scores)
        profiles[variant.device] = _variant(bench, variant, profiles[variant.lender])
    return tuple(profiles.values()), tuple(scores)


def shipped_profile_to_yaml(profile: Profile) -> str:
    """The file of one profile: fields in the order of the dataclasses, without those that are
    empty.
    """
    body = yaml.safe_dump(_plain(document(profile)), sort_keys=False, default_flow_style=None, width=140)
    return f"# Written by `python -m parplan.profiles.build` from public measurements; do not edit. Times in s and us, sizes in bytes.\n{body}"


OF_OWN: dict[str, Any] = {  # what only a machine's own profile has
    "points": [], "named": {}, "crossing": [], "nodes": 1, "groups": 1, "untiled": False}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items() if item is not None and (key not in OF_OWN or item != OF_OWN[key])}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _line(one: Score) -> str:
    """A line of the report, with room for the longest name of a device."""
    return f"{one.device:<16}{str(replace(one, device=''))[12:]}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Rebuilds the profiles and prints the report."""
    parser = argparse.ArgumentParser(prog="python -m parplan.profiles.build", description="Rebuild profiles/data/*.yaml from measurements.")
    parser.add_argument("--measurements", type=Path, required=True, help="directory of the CSV tables")
    parser.add_argument("--out", type=Path, default=Path("profiles/data"), help="directory of the YAML files")
    parser.add_argument("--datasheets", action="store_true", help="write the devices that nobody measured, too")
    options = parser.parse_args(arguments)
    profiles, scores = calibrate(MeasurementTables(options.measurements))
    for profile in (*profiles, *(map(from_datasheet, DATASHEETS) if options.datasheets else ())):
        (options.out / f"{profile.name}.yaml").write_text(shipped_profile_to_yaml(profile), encoding="ascii")
    header = f"{'device':<16}{'family':<38}{'rows':>6}{'median':>9}{'mean':>8}{'cv med':>8}{'cv mean':>8}"
    sys.stdout.write("\n".join((header, *map(_line, scores), "")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
