"""Measurements -> profiles/data/*.yaml: `python -m profiles.calibrate --measurements DIR [--out profiles/data]`.

Fits the forms of `profiles/curves.py` to tables of published timings (their README lists sources, flags and traps) and
prints, per device and family, the rows used and the median and mean absolute percentage error, in-sample and in 5-fold
cross-validation. What ships are fitted constants and spline knots, never rows. Same tables, same bytes.

Choices, with their reasons:
- Matmul: a log2 grid of median corrections in m, n, k on top of the form with tiles, waves and split k was tried. Where every
  size is at least 1024 the cross-validated median error is 4.2 % without and 3.2 % with it on A100, 3.3 and 2.9 on H100, 3.8
  and 3.1 on B200; over all sizes it gains 1.2 to 2 points. A grid alone is worse than the form where sizes are small.
  Training has large products, so there is no grid.
- H100, H200 and B200 slow down by 13-21 % in products above about 1e12 FLOPs, A100 does not: the power limit, which a
  training step reaches for good. Rows are compared with the form as measured; training is priced at the limit.
- Backward rows flagged tiny_gradients (gradients that underflow to zero run too fast) are not used for linear layers: the
  gradients' efficiency relative to the forward product is that of the rows without the flag. They are used for the products
  of un-fused attention on A100 and GH200, which have no others and show no such speed-up.
- CC BY-SA rows, `other_run_differs`, slow networks and GPUs named by inference are not used.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import yaml

from profiles.calibrate_compute import SUPERSCALER, Bench, Recipe, compute_curves
from profiles.calibrate_links import inter, intra
from profiles.catalog import load_cluster
from profiles.curves import Curve
from profiles.fitting import AnyCurve, Score, Tables
from profiles.measured import Passes, Profile
from profiles.provenance import Kind
from profiles.schema import document

AICONFIGURATOR = "ai-dynamo/aiconfigurator"
TRAIN_TIME = "DebarghaG/estimate-train-time"
VTRAIN = "VIA-Research/vTrain"
RECIPES = (
    Recipe(
        device="a100-80gb", gpu="A100-SXM4-80GB", throttles=False, gradients="A100-PCIe-80GB", flash=("flash2",),
        flash_backward="A100-SXM4-80GB", memory="A100-SXM4-80GB", sources=(AICONFIGURATOR, TRAIN_TIME),
        collectives=(AICONFIGURATOR, VTRAIN)),
    Recipe(
        device="h100-80gb", gpu="H100-SXM5-80GB", throttles=True, gradients="A100-PCIe-80GB", flash=("flash3",), flash_backward="",
        memory="GH200-96GB", sources=(AICONFIGURATOR,), collectives=(AICONFIGURATOR,)),
    Recipe(
        device="h200-141gb", gpu="H200-SXM-141GB", throttles=True, gradients="A100-PCIe-80GB", flash=("flash3",), flash_backward="",
        memory="GH200-96GB", sources=(AICONFIGURATOR,), collectives=(AICONFIGURATOR,)),
    Recipe(
        device="b200-180gb", gpu="B200-SXM-180GB", throttles=True, gradients="B200-SXM-180GB", flash=("flash_te",),
        flash_backward="B200-SXM-180GB", memory="GH200-96GB", sources=(AICONFIGURATOR,), collectives=(AICONFIGURATOR,)),
    Recipe(
        device="v100-32gb", gpu="V100-SXM2-32GB", throttles=False, gradients="V100-SXM2-32GB", flash=(), flash_backward="",
        memory="V100-SXM2-32GB", sources=(SUPERSCALER,), collectives=(SUPERSCALER,)),
)


def _variant(profile: Profile, device: str, note: str) -> Profile:
    """The same chip with another memory: every compute curve carried over and marked ANALYTIC."""

    def carried(curve: AnyCurve) -> AnyCurve:
        return replace(curve, kind=Kind.ANALYTIC, source=f"{note}: {curve.source}")

    moved: dict[str, Any] = {}
    for one in fields(profile.compute):
        value = getattr(profile.compute, one.name)
        if isinstance(value, Curve):
            moved[one.name] = carried(value)
        elif isinstance(value, Passes):
            moved[one.name] = Passes(forward=carried(value.forward), backward=carried(value.backward))
    return replace(profile, name=device, compute=replace(profile.compute, **moved))


def _profile(bench: Bench) -> Profile:
    recipe, link = bench.recipe, bench.cluster.intra_node
    gpus = (recipe.gpu, "A100-SXM4") if recipe.gpu.startswith("A100") else (recipe.gpu,)
    return Profile(
        name=recipe.device, compute=compute_curves(bench),
        intra=intra(bench.tables, recipe.device, gpus, recipe.collectives, link.bytes_per_s, bench.scores),
        inter=inter(bench.tables, []))


def calibrate(tables: Tables) -> tuple[tuple[Profile, ...], tuple[Score, ...]]:
    """Every shipped profile and the errors of its curves."""
    scores: list[Score] = []
    inter(tables, scores)
    profiles: list[Profile] = []
    for recipe in RECIPES:
        bench = Bench(recipe=recipe, cluster=load_cluster(recipe.device), tables=tables, scores=scores)
        profiles.append(_profile(bench))
    profiles.append(_variant(profiles[0], "a100-40gb", "a100-80gb, the same chip"))
    return tuple(profiles), tuple(scores)


def to_yaml(profile: Profile) -> str:
    """The file of one profile: fields in the order of the dataclasses, without those that are empty."""
    body = yaml.safe_dump(_plain(document(profile)), sort_keys=False, default_flow_style=None, width=140)
    return f"# Written by `python -m profiles.calibrate` from public measurements; do not edit. Times in s and us, sizes in bytes.\n{body}"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items() if item is not None}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def main(arguments: Sequence[str] | None = None) -> int:
    """Rebuilds the profiles and prints the report."""
    parser = argparse.ArgumentParser(prog="python -m profiles.calibrate", description="Rebuild profiles/data/*.yaml from measurements.")
    parser.add_argument("--measurements", type=Path, required=True, help="directory of the CSV tables")
    parser.add_argument("--out", type=Path, default=Path("profiles/data"), help="directory of the YAML files")
    options = parser.parse_args(arguments)
    profiles, scores = calibrate(Tables(options.measurements))
    for profile in profiles:
        (options.out / f"{profile.name}.yaml").write_text(to_yaml(profile), encoding="ascii")
    header = f"{'device':<12}{'family':<38}{'rows':>6}{'median':>9}{'mean':>8}{'cv med':>8}{'cv mean':>8}"
    sys.stdout.write("\n".join((header, *map(str, scores), "")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
