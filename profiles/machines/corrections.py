"""Corrections of a fitted form by a machine's own measurements, interpolated between points.

At each point the correction is measured over fitted time. Between points its logarithm is a
weighted mean, over the logarithms of the sizes, of the points' and of 0, which is the form alone:

    ln c(x) = sum_i w(d_i) ln c_i / (w(1) + sum_i w(d_i))
    w(d) = (1/d - 1/R)^2 for d < R, 0 beyond        R = ln 8

d_i is the largest distance in any size (Shepard 1968, doi:10.1145/800186.810593, weights with an
end as Franke and Little's). It is exact at a point, continuous, and fades with distance: a lone
point counts half where a size differs by a factor e, and nothing at 8. The end matters in three
dimensions, where many far points would otherwise outweigh a near one.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from parplan.profiles.elementwise import Number
from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.curves import Curve
from parplan.profiles.provenance import Kind, Kinds, kinds_where
from parplan.profiles.units import US_PER_S

# reach of a point in any size; cases of a model lie a factor 2 or 4 apart, as degrees do
REACH = math.log(8)
# weight of the form alone: that of a point where a size differs by a factor e
PRIOR_WEIGHT = (1 - 1 / REACH) ** 2
SAME = 1e-9  # sizes closer than this to a point are the point itself

Sizes = tuple[float, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Corrections:
    """The corrections of one curve at its points.

    sizes: logarithms of the points' sizes [points, sizes]
    measured: logarithms of measured over fitted seconds [points]
    """

    sizes: npt.NDArray[np.float64]
    measured: npt.NDArray[np.float64]

    def factor(self, sizes: tuple[Number, ...]) -> tuple[Number, Kinds]:
        """Returns the factor of the form at `sizes`, and its kind.

        It is measured at a point, interpolated inside the range of the points and within reach of
        one, and analytic elsewhere. Sizes may be arrays.
        """
        if any(isinstance(size, np.ndarray) for size in sizes):
            return _factor_of_many(self, sizes)
        return _factor_of_one(self, sizes)


def corrections_of(curve: Curve, num_sizes: int, form_s: Callable[[Sizes], float]) -> Corrections:
    """Returns the corrections of `form_s`, the fitted form of `curve`, at the points of `curve`.

    Several points of the same sizes count as their geometric mean.
    Raises ConfigError when a point does not have `num_sizes` sizes and a time, all above 0.
    """
    log_times: dict[Sizes, list[float]] = {}
    for *sizes, time_us in curve.points:
        if len(sizes) != num_sizes or min(*sizes, time_us) <= 0:
            raise ConfigError(
                f"a curve has the point {(*sizes, time_us)}, needed {num_sizes} sizes and "
                f"microseconds, all above 0 ({curve.source})",
                hint="measure the device again with: plan profile",
            )
        log_times.setdefault(tuple(sizes), []).append(math.log(time_us / US_PER_S))
    measured = [
        sum(logs) / len(logs) - math.log(form_s(sizes)) for sizes, logs in log_times.items()
    ]
    return Corrections(np.log(np.array(list(log_times), dtype=np.float64)), np.array(measured))


@functools.lru_cache(maxsize=65536)
def _factor_of_one(corrections: Corrections, sizes: Sizes) -> tuple[float, Kind]:
    if min(sizes) <= 0:
        return 1.0, Kind.ANALYTIC
    factor, measured, interpolated = _factors(corrections, np.array(sizes, dtype=np.float64))
    between = Kind.INTERPOLATED if interpolated else Kind.ANALYTIC
    return float(factor), Kind.MEASURED if measured else between


def _factor_of_many(corrections: Corrections, sizes: tuple[Number, ...]) -> tuple[Number, Kinds]:
    at = np.stack(np.broadcast_arrays(*sizes), axis=-1).astype(np.float64)
    priced = at.min(axis=-1) > 0
    factor, measured, interpolated = _factors(corrections, np.where(priced[..., None], at, 1.0))
    between = kinds_where(interpolated & priced, Kind.INTERPOLATED, Kind.ANALYTIC)
    return np.where(priced, factor, 1.0), kinds_where(measured & priced, Kind.MEASURED, between)


def _factors(corrections: Corrections, sizes: npt.NDArray[np.float64]) -> tuple[Number, ...]:
    """Returns the factor at each point of `sizes` [..., sizes], and if it is on a measured point.

    Third is whether it is inside the range of the points and within reach of one.
    """
    at = np.log(sizes)
    distances = np.abs(corrections.sizes - at[..., None, :]).max(axis=-1)
    near = distances < REACH
    weights = np.where(near, 1 / np.maximum(distances, SAME) - 1 / REACH, 0.0) ** 2
    mean = weights @ corrections.measured / (PRIOR_WEIGHT + weights.sum(axis=-1))
    measured = distances.min(axis=-1) < SAME
    exact = corrections.measured[distances.argmin(axis=-1)]
    lowest, highest = corrections.sizes.min(axis=0), corrections.sizes.max(axis=0)
    inside = ((lowest <= at + SAME) & (at - SAME <= highest)).all(axis=-1)
    return np.exp(np.where(measured, exact, mean)), measured, inside & near.any(axis=-1)
