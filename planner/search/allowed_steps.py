"""The steps that a slowdown allows to plans of the objectives memory and peak.

The slowdown is a share of the simulated step of the fastest plan, and limits the simulated step.
Searches compare closed forms. Theirs is limited by the same step over the least ratio of a
simulated step to its closed form among the replayed plans; each choice is then simulated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.master import MasterChoice
from parplan.planner.search.replay import Replayed, replayed_price
from parplan.planner.search.search_session import INFINITY, SearchSession, SolvedCandidate


@dataclass(frozen=True, slots=True)
class AllowedSteps:
    """The fastest step, and the limits that a slowdown sets to others.

    fastest_s    simulated step of the fastest plan
    slowest_s    limit of simulated steps
    closed_s     limit of closed forms
    """

    fastest_s: float
    slowest_s: float
    closed_s: float
    session: SearchSession

    @classmethod
    def of(
        cls, fastest: SolvedCandidate, replayed: Sequence[Replayed], session: SearchSession
    ) -> AllowedSteps:
        """Returns the steps that the slowdown of a session allows.

        fastest     the best closed form, which counts where nothing was replayed
        replayed    the fastest plans
        """
        closed_s = fastest.choice.step_s
        fastest_s = min((price.step_s for _, _, price in replayed), default=closed_s)
        ratios = (price.step_s / price.closed_form_s for _, _, price in replayed)
        slowest_s = fastest_s * session.slowdown
        limit_s = max(slowest_s / min((1.0, *ratios)), closed_s)
        return cls(fastest_s, slowest_s, limit_s, session)

    def step_s(self, layout: ParallelLayout, choice: MasterChoice) -> float:
        """Returns the simulated step of a choice, infinite where its exact schedule lacks room."""
        strategy = self.session.prices.strategy(layout, choice.columns)
        price = replayed_price(strategy, self.session.book_of(layout, choice))
        return price.step_s if price else INFINITY

    def kept(self, replayed: Sequence[Replayed]) -> list[Replayed]:
        """Returns the plans among those replayed that are in time."""
        return [each for each in replayed if each[2].step_s <= self.slowest_s]
