"""Speeds of Blackwell devices that no row of theirs shows: power limits, kernels bound by memory.

Both rest on ai-dynamo/aiconfigurator (Apache-2.0, 095f58a51c), whose full tables of a product or a
cast compare two devices, or two runs of a device, shape by shape.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any

from parplan.profiles.machines.curve_fitting import AnyCurve, rounded
from parplan.profiles.machines.curves import Curve, MatmulCurve, MemoryCurve
from parplan.profiles.machines.speeds import Compute, PassCurves, Profile
from parplan.profiles.provenance import Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerLimit:
    """The limit of products under steady load, as in `MatmulCurve`."""

    throttle: float
    throttle_flops: float
    source: str


# Rows of GB200 and GB300 are of rested devices. Runs of vLLM sampled the power too, 1.12 and 1.17
# times as slow, but on weights that were never initialised, which draw less of it.
GB200_LIMIT = PowerLimit(
    throttle=0.215,
    throttle_flops=4.948e12,
    source=(
        "power limit: 1.19 and 1.24, by which a run that sampled the power was slower "
        "(ai-dynamo/aiconfigurator 095f58a51c: bf16 of TensorRT-LLM 1.3.0rc17 over rc20 and rc10)"
    ),
)
# 1,400 W over 1,200 W, by the rule of variants (`profiles/build/__main__.py::slowed`). Its
# products of 3e12 FLOPs and more, which heat a device by themselves, took 0.81 and 0.83 of those of
# GB200 (SGLang 0.5.14, TensorRT-LLM 1.3.0rc20), those of 1e11 to 1e12 0.91 and 0.87: 0.10 to 0.16.
GB300_LIMIT = replace(
    GB200_LIMIT,
    throttle=rounded((1 + GB200_LIMIT.throttle) * (1400 / 1200) ** -0.5 - 1),
    source=f"{GB200_LIMIT.source}, of GB200 at 1.17 of its power",
)
STEADY: Mapping[str, PowerLimit] = MappingProxyType(
    {"gb200-186gb": GB200_LIMIT, "gb300-279gb": GB300_LIMIT}
)
# Share of the memory's bandwidth that kernels bound by it reach on Blackwell, over that on Hopper:
# the median of three kernels that cast 6.7e7 elements and more to fp8, each timed on both, 0.70
# (TensorRT-LLM 1.3.0rc20, given scale), 0.78 (vLLM 0.24.0, largest value and cast) and 0.94 (vLLM,
# given scale). A memory twice as fast is fed by a tenth more multiprocessors.
STREAM_SHARE = 0.78
STREAM_NOTE = "at 0.78 of its share, as casts to fp8 on Blackwell (ai-dynamo/aiconfigurator)"
STREAMS_OF_HOPPER = ("b200-180gb", "gb200-186gb", "gb300-279gb")


def mapped(compute: Compute, change: Callable[[str, Any], Any]) -> Compute:
    """Returns the curves after `change(name, curve)`."""
    moved: dict[str, Any] = {}
    for field in fields(compute):
        value = getattr(compute, field.name)
        if isinstance(value, Curve):
            moved[field.name] = change(field.name, value)
        elif isinstance(value, PassCurves):
            forward = change(field.name, value.forward)
            backward = change(field.name, value.backward)
            moved[field.name] = PassCurves(forward=forward, backward=backward)
    return replace(compute, **moved)


def limited(profile: Profile, limit: PowerLimit) -> Profile:
    """Returns the profile with a power limit for its products, which makes them ANALYTIC."""

    def moved(name: str, curve: AnyCurve) -> AnyCurve:
        if not isinstance(curve, MatmulCurve) or name.startswith("batched"):
            return curve
        return replace(
            curve,
            throttle=limit.throttle,
            throttle_flops=limit.throttle_flops,
            kind=Kind.ANALYTIC,
            source=f"{curve.source}; {limit.source}",
        )

    return replace(profile, compute=mapped(profile.compute, moved))


def with_streams(profile: Profile) -> Profile:
    """Returns the profile with Hopper's kernels bound by memory at Blackwell's share."""

    def moved(name: str, curve: AnyCurve) -> AnyCurve:
        if not isinstance(curve, MemoryCurve):
            return curve
        share = rounded(STREAM_SHARE * curve.bandwidth_share)
        return replace(curve, bandwidth_share=share, source=f"{curve.source}, {STREAM_NOTE}")

    return replace(profile, compute=mapped(profile.compute, moved))
