"""Options for the objective and the limits of a search."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from parplan.commands.options.option_values import (
    OWN_SPACES,
    PREFERENCES,
    SEARCH_METHODS,
    SEARCHED_FOR,
)
from parplan.commands.options.pin_options import pin_options
from parplan.commands.options.sections import AIM, SEARCH
from parplan.commands.style import LONGEST_S, List, Number, Share, Whole, option, packs, together

if TYPE_CHECKING:
    from parplan.planner.request import OnProgram


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchFlags:
    """The objective and the limits of a search."""

    objective: str = "throughput"
    prefer: str | None = None
    robust: float | None = None
    points: int | None = None
    max_slowdown: float | None = None
    memory_slack: float | None = None
    memory_margin: float | None = None
    oom_risk: float | None = None
    memory_limit: str | None = None
    time_limit: float | None = None
    memory_cap: str | None = None
    solver: str = "cbc"
    explain: bool = False
    launchers: tuple[str, ...] | None = None
    method: str | None = None
    seed: int | None = None
    pools: str = "pipeline"
    on_program: OnProgram | None = None  # no option

    @property
    def launcher(self) -> str | None:
        """The launcher of an export that alone is named, None for the executor and for none."""
        if self.launchers is None or len(self.launchers) > 1:
            return None
        (name,) = self.launchers
        return None if name in OWN_SPACES else name


search_options = together(
    option(
        AIM,
        "--max-slowdown",
        type=Number(),
        metavar="SHARE",
        help="Largest slowdown against the fastest plan, for the objectives memory and peak. The "
        "fastest plan uses no host memory if one fits without. [default: 0.1]",
    ),
    option(
        AIM,
        "--memory-slack",
        type=Number(),
        metavar="SHARE",
        help="For the objective memory, memory first: the fastest plan that has at most this share "
        "more redundant memory than the leanest plan of all, which may take any time.",
    ),
    option(
        AIM,
        "--memory-margin",
        type=Number(),
        metavar="SHARE",
        help="Share of each device that stays free. [default: from measured runs]",
    ),
    option(
        AIM,
        "--oom-risk",
        type=Share(),
        metavar="SHARE",
        help="Probability that the plan runs out of memory, such as 1%; measured runs give the "
        "margin.",
    ),
    option(
        AIM,
        "--memory-limit",
        metavar="SIZE",
        help="Memory that a plan may fill on a device, such as 72GiB; replaces the margin.",
    ),
    pin_options,
    option(
        SEARCH,
        "--time-limit",
        type=Number(max=LONGEST_S),
        metavar="SECONDS",
        help="Time after which everything stops, with the best plan so far and its gap.",
    ),
    option(
        SEARCH,
        "--memory-cap",
        metavar="SIZE",
        help="Memory that the tables of one search may hold, such as 4GiB, at which it stops with "
        "the best plan so far and its gap. [default: 2GiB, on every machine]",
    ),
    option(
        SEARCH,
        "--solver",
        type=click.Choice(("cbc", "highs")),
        default="cbc",
        show_default=True,
        help="MILP solver.",
    ),
    packs("flags", SearchFlags),
)
objective_options = together(
    option(
        AIM,
        "--objective",
        type=click.Choice(("throughput", "goodput", "memory", "peak", "pareto")),
        default="throughput",
        show_default=True,
        help="Quantity to minimise. throughput: the step time. goodput, which needs --mtbf: the "
        "step time over the goodput, on the best number of nodes. memory, peak: the redundant "
        "memory, or the memory of the fullest GPU, within --max-slowdown of the fastest step. "
        "pareto: the front of time and memory. Only GPU memory counts. Host offload, as far as "
        "--offload allows it, never increases it.",
    ),
    option(
        AIM,
        "--prefer",
        type=click.Choice(PREFERENCES),
        help="Plan to take among those inside the error band of the fastest: the fastest, the one "
        "with the least memory on its fullest GPU, or the one that loses least when compute or a "
        "bandwidth is 20 % off, or by --robust. [default: fastest]",
    ),
    option(
        AIM,
        "--robust",
        type=Share(),
        metavar="SHARE",
        help="Price the plan, its runners-up and the best plan of each case where compute, a "
        "bandwidth or memory is off by a share such as 20%, and name the one of least regret. "
        "--prefer robust then takes it.",
    ),
    option(
        AIM,
        "--points",
        type=Whole("num_points"),
        metavar="N",
        help="Approximate number of plans of the pareto objective. [default: 16]",
    ),
)
launcher_option = option(
    AIM,
    "--for",
    "launchers",
    type=List(click.Choice(SEARCHED_FOR)),
    metavar="NAME,..",
    help="Launchers that may run the plan, which is the fastest of all that their arguments can "
    f"say, priced as their stacks run it: {', '.join(SEARCHED_FOR)}. parplan is the own executor, "
    "and none is a bound for one stack: every plan at its facts, whether a program can say it or "
    "not. [default: "
    "all that can run the request]",
)
method_options = together(
    option(
        SEARCH,
        "--search",
        "method",
        type=click.Choice(SEARCH_METHODS),
        help="Search method, one of thirteen on one price. All but ours choose among whole "
        "recompute levels and ZeRO stages of equal blocks, prove nothing, and stop after "
        "--time-limit CPU-seconds. [default: ours]",
    ),
    option(
        SEARCH,
        "--seed",
        type=click.IntRange(0),
        metavar="N",
        help="Seed of the search methods that draw points. [default: 0]",
    ),
)
pools_option = option(
    AIM,
    "--pools",
    type=click.Choice(("pipeline", "data")),
    default="pipeline",
    show_default=True,
    help="Pools of an unequal cluster divide the pipeline or the batch. Pools that "
    "divide the batch have a plan file each.",
)
explain_option = option(
    SEARCH, "--explain", is_flag=True, help="List the candidates that were not searched, and why."
)
