"""Error bands by the traits of a run, from the deviations of measured runs.

A band is conformal: it is a quantile of scores of measured runs whose prices had not seen them
(EQUATIONS E1). With d the deviation measured / predicted - 1 of a run,

    score = (|d| + 0.01) / sigma(traits)
    log sigma(traits) = a + sum of b over the traits: ridge regression of log (|d| + 0.01)
    band(traits) = sigma(traits) * (smallest score that 80 % of the scores do not exceed) - 0.01

The score of a run is taken with the sigma of a regression that left out its experiment, and the
quantile counts one run more than there are (Lei et al. 2018, doi:10.1080/01621459.2017.1307116,
section 5.2, locally weighted; Barber et al. 2021, arXiv 1905.02928, for folds). A kind of traits
may have a quantile for each of its traits, which then counts where it is the larger one (Vovk 2012,
arXiv 1209.2673, conditional on a class).
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

BAND_SHARE = 0.8
FEWEST = 4  # runs of a trait, the fewest of which one lies above the quantile of one more
LEAST_DEVIATION = 0.01  # added before the logarithm, so that a run that agrees by luck says little

_Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Deviating:
    """A measured run: its experiment, its traits, and measured / predicted - 1.

    Equal ids are prices of the same measurement.
    """

    id: str
    experiment: str
    traits: tuple[str, ...]
    deviation: float


class ConformalBands:
    """The bands of runs by their traits, from measured runs.

    Each trait begins with `prior_rows` runs of no effect (the ridge): the more there are, the less
    a band differs from that of all runs. A trait that begins with `own` has no smaller a quantile
    than its own runs ask for. Raises ValueError for no measured runs.
    """

    def __init__(self, runs: Sequence[Deviating], prior_rows: float, own: str = "") -> None:
        if not runs:
            raise ValueError("a band needs measured runs")
        self._prior_rows = prior_rows
        ids_of = {(run.id, trait) for run in runs for trait in run.traits}
        self.rows_of: Mapping[str, int] = Counter(trait for _, trait in ids_of)
        self.num_rows = len({run.id for run in runs})
        self._names = tuple(sorted(self.rows_of))
        self._experiments: npt.NDArray[np.str_] = np.array([run.experiment for run in runs])
        self._has = np.array(
            [[1.0, *(name in run.traits for name in self._names)] for run in runs], dtype=float
        )
        self._deviations = np.abs([run.deviation for run in runs]) + LEAST_DEVIATION
        self._own = [
            (name, self._has[:, index] > 0)
            for index, name in enumerate(self._names, 1)
            if own and name.startswith(own)
        ]
        self._band = functools.cache(self._fitted_band)

    def share(self, traits: Sequence[str], without: str | None = None) -> float:
        """Returns the band of a run with `traits` as +- a share of the prediction.

        `without` leaves an experiment out. A trait that no run had counts as the trait of its kind
        with the widest band, and as nothing where there is no other of its kind.
        """
        effects, quantiles = self._band(without)
        known = dict(zip(self._names, effects[1:], strict=True))
        log = effects[0] + sum(_effect(trait, known) for trait in traits)
        quantile = max(quantiles.get(trait, 0.0) for trait in ("", *traits))
        return max(0.0, float(quantile * math.exp(log)) - LEAST_DEVIATION)

    def _fitted_band(self, without: str | None) -> tuple[tuple[float, ...], dict[str, float]]:
        """Returns the effects, that of every run first, and the quantiles of the scores by trait.

        That of all runs has an empty name. A trait of few runs has none.
        """
        kept = np.not_equal(self._experiments, without or "")
        scores = np.empty(len(kept))
        for experiment in sorted(set(self._experiments[kept])):
            own = np.equal(self._experiments, experiment)
            sigma = np.exp(self._has[own] @ self._effects(kept & ~own))
            scores[own] = self._deviations[own] / sigma
        quantiles = {"": _quantile(scores[kept])}
        for name, having in self._own:
            if np.count_nonzero(kept & having) >= FEWEST:
                quantiles[name] = _quantile(scores[kept & having])
        return tuple(self._effects(kept)), quantiles

    def _effects(self, kept: npt.NDArray[np.bool_]) -> _Array:
        has = self._has[kept]
        ridge = np.diag([1e-6, *([self._prior_rows] * len(self._names))])
        logs = np.log(self._deviations[kept])
        effects: _Array = np.linalg.solve(has.T @ has + ridge, has.T @ logs)
        rows = np.count_nonzero(has, axis=0)[1:]
        known = {
            name: effect
            for name, effect, count in zip(self._names, effects[1:], rows, strict=True)
            if count
        }
        effects[1:] = [_effect(name, known) for name in self._names]
        return effects


def _quantile(scores: _Array) -> float:
    ordered = np.sort(scores)
    place = min(len(ordered), math.ceil((len(ordered) + 1) * BAND_SHARE))
    return float(ordered[place - 1])


def _effect(trait: str, known: Mapping[str, float]) -> float:
    """Returns the effect of a trait; of an unknown one the largest of its kind, its first word."""
    if trait in known:
        return known[trait]
    kind = trait.split()[0]
    return max((effect for name, effect in known.items() if name.split()[0] == kind), default=0.0)
