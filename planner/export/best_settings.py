"""The best settings of a launcher: the plan of `--for`, proven over all that the launcher can say.

Layouts are taken in the order of the bounds of every search, whose plans include all settings of
the launcher. The settings of a layout are priced one by one, as an export prices them, until none
can be faster than the best (planner/baselines/optimum.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import product

from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.price_cache import PriceCache
from parplan.costmodels.step import StepPrice
from parplan.costmodels.strategy import ParallelLayout, Strategy
from parplan.planner.baselines.optimum import fastest, fits
from parplan.planner.candidates.branch_and_bound import (
    BranchOutcome,
    BranchWatch,
    best_of,
    branch_and_bound,
)
from parplan.planner.candidates.never_searched import UnsearchedPart
from parplan.planner.export.fields.launcher import Target, read_back, require_plain
from parplan.planner.export.fields.settings import (
    Settings,
    model_facts,
    training_facts,
)
from parplan.planner.export.launcher_space import LauncherSpace
from parplan.planner.export.settings_bounds import SettingsBounds
from parplan.planner.export.settings_certificate import certified_settings
from parplan.planner.export.shared_search import SharedSearch
from parplan.planner.infeasible.shortfall import price_cache_of
from parplan.planner.objective import Objective, Prefer
from parplan.planner.plan.assemble import assemble, runner_up
from parplan.planner.plan.plan import Plan
from parplan.planner.plan.prediction import Candidates, SearchRecord, Status
from parplan.planner.request import OnProgress, Request
from parplan.planner.search.certificate import BESIDE, with_counts, with_program
from parplan.planner.search.price_factory import DescribedFactory
from parplan.planner.search.search_session import SearchPrices, SearchSession
from parplan.planner.solver import Unsolved, counted_programs
from parplan.profiles.errors import ConfigError, InfeasibleError, OutOfTimeError, SolverError
from parplan.profiles.stack import EVERY_RECOMPUTE


@dataclass(frozen=True, slots=True)
class BestOfLayout:
    """The fastest settings of one layout, as a strategy with its price."""

    strategy: Strategy
    price: StepPrice
    bound: float
    settings: Settings

    @property
    def value(self) -> float:
        return self.price.step_s


def best_settings(
    request: Request,
    target: Target,
    on_progress: OnProgress | None = None,
    *,
    shared: SharedSearch | None = None,
) -> Plan:
    """Returns the fastest plan that a launcher can say.

    shared    the prices of the searches for other launchers
    Raises ConfigError for a request whose pins or training the launcher cannot say, InfeasibleError
    where none of its settings fits, and OutOfTimeError.
    """
    search = SettingsSearch(as_said(request, target), target, on_progress, shared or SharedSearch())
    return search.plan()


@dataclass
class SettingsSearch:
    """The search of one launcher's settings, for a request as the launcher says it.

    candidates  the candidates, their limit and their bounds; None to enumerate them
    share       least ratio of a simulated step to its closed form
    bounds_s    closer bounds of layouts than those of their passes
    least_s     simulated steps that no settings of a layout are below
    """

    request: Request
    target: Target
    on_progress: OnProgress | None
    shared: SharedSearch
    candidates: SearchPrices | None = None
    share: float = 1.0
    bounds_s: dict[ParallelLayout, float] = field(default_factory=dict)
    least_s: dict[ParallelLayout, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        prices = self.candidates or LauncherFactory(self.request, self.target).prices(())
        self.session = SearchSession(prices, self.request.options, self.on_progress)
        limit = self.session.limit_bytes
        self.space = LauncherSpace(self.target, self.request, limit, self.shared)
        self.bounds = SettingsBounds(self.space)

    def plan(self) -> Plan:
        """Returns the fastest plan. Raises InfeasibleError and OutOfTimeError."""
        with counted_programs() as count:
            outcome = self.outcome()
            if not outcome.solved:
                raise self.nothing_found()
            first, *rest = outcome.solved
            record = self.certified(self.record(outcome), first)
        record = with_counts(record, count)
        record = replace(
            record, runners_up=tuple(runner_up(each.strategy, each.price) for each in rest[:9])
        )
        return assemble(first.strategy, first.price, record, self.exact_prices(first))

    @property
    def layouts(self) -> Sequence[ParallelLayout]:
        return self.session.prices.space.layouts

    def outcome(self) -> BranchOutcome[BestOfLayout]:
        session = self.session
        return branch_and_bound(
            ((self.bounds.passes_s(layout), layout) for layout in self.layouts),
            self.solve,
            lambda solved: best_of(solved) / self.share,
            BranchWatch(
                objective=Objective.THROUGHPUT,
                left_s=session.left_s,
                on_progress=self.on_progress,
            ),
            closer=self._closer_s,
        )

    def _closer_s(self, layout: ParallelLayout) -> Iterator[float]:
        for bound_s in self.bounds.closer_s(layout):
            yield self._raised_s(layout, bound_s)

    def _raised_s(self, layout: ParallelLayout, bound_s: float) -> float:
        """Stores a bound of a layout, and returns the best known one."""
        self.bounds_s[layout] = max(bound_s, self.bounds_s.get(layout, 0.0))
        return self.bounds_s[layout]

    def solve(
        self, layout: ParallelLayout, _: float, cut_s: float, __: float
    ) -> BestOfLayout | None:
        """Returns the fastest settings of a layout below the cut.

        Where the stages are given, blocks that recompute beside those that have to are slower.
        """
        best, enough = None, set[int]()
        given = not self.space.divides_freely(layout)
        limit = self.session.limit_bytes
        for each in self.bounds.fitting(layout):
            if each.bound_s >= cut_s:
                break
            some = given and each.kind.recompute is Recompute.FULL
            if (some and each.zero in enough) or not self.space.says(each.settings, layout):
                continue
            settings = each.settings
            listed = tuple(self.bounds.possible_stages(each, layout, cut_s))
            strategies = tuple(self.space.strategies(settings, layout, listed, cut_s))
            prices = self.space.prices(settings)
            faster = fastest(strategies, prices, limit, self.session.deadline, cut_s)
            whole = len(listed) == len(self.space.listed(layout))
            if some and whole and all(fits(strategy, prices, limit) for strategy in strategies):
                enough.add(each.zero)
            if faster is not None:
                price = faster.price
                best = BestOfLayout(faster.strategy, price, price.step_s, settings)
                cut_s = price.step_s
        self.least_s[layout] = cut_s
        if best is not None:
            self.share = min(self.share, best.price.step_s / best.price.closed_form_s)
        return best

    def exact_prices(self, best: BestOfLayout) -> PriceCache:
        """Returns the prices in the training of a plan, whose switches are on where they matter."""
        prices, training = self.space.prices(best.settings), self.space.training(best.settings)
        if prices.training == training:
            return prices
        return price_cache_of(replace(self.request, training=training))

    def record(self, outcome: BranchOutcome[BestOfLayout]) -> SearchRecord:
        best, space = outcome.solved[0], self.session.prices.space
        bound_s = min(best.value, outcome.bound, *map(self.bound_s, self.layouts))
        considered, solved = space.considered, len(outcome.solved)
        return SearchRecord(
            objective=Objective.THROUGHPUT,
            status=Status.OPTIMAL if outcome.finished else Status.FEASIBLE,
            value=round(best.value, 6),
            bound=round(bound_s, 6),
            gap=round(max(0.0, 1 - bound_s / best.value), 6),
            fastest_step_time_s=round(best.price.closed_form_s, 6),
            launcher=self.target.name,
            candidates=Candidates(
                considered=considered,
                pruned=considered - solved - outcome.left,
                solved=solved,
                left=outcome.left,
            ),
        )

    def certified(self, record: SearchRecord, best: BestOfLayout) -> SearchRecord:
        """Returns the record with the certificate of a plan, and a gap that includes it."""
        program, options = None, self.request.options
        if record.status is Status.OPTIMAL and not options.deadline.is_over:
            with suppress(Unsolved, SolverError, OutOfTimeError):  # the plan stands without it
                program = certified_settings(
                    best.strategy,
                    best.value,
                    self._near(best),
                    self.session.limit_bytes,
                    options,
                )
        record = with_program(record, program, self.session)
        if program is None or not program.gap or program.optimum_s is None:
            return record
        bound_s = min(record.bound, program.optimum_s)
        return replace(record, bound=bound_s, gap=round(1 - bound_s / best.value, 6))

    def _near(self, best: BestOfLayout) -> Iterator[tuple[Strategy, PriceCache]]:
        """Yields the strategies of the plan's layout that may be as fast, also without room.

        They come from the space, and not from the bounds that chose among them.
        """
        layout, below_s = best.strategy.layout, best.value * (1 + BESIDE)
        listed = self.space.listed(layout)
        for kind, counts in self.space.kinds(layout):
            for zero, count in product(self.space.zeros(layout), counts):
                settings = replace(kind, zero=zero, recompute_blocks=count)
                if self.space.says(settings, layout):
                    prices = self.space.prices(settings)
                    for strategy in self.space.strategies(settings, layout, listed, below_s):
                        yield strategy, prices

    def bound_s(self, layout: ParallelLayout) -> float:
        """Returns the bound of a layout's simulated step.

        Bounds hold for the closed form. Those of pipelines are lowered by the largest share by
        which a simulated step was below it, which is measured and not proven.
        """
        if layout in self.least_s:
            return self.least_s[layout]
        known_s = self.bounds_s.get(layout)
        if known_s is None:
            known_s = self.bounds.passes_s(layout)
        return known_s * (self.share if layout.mesh.pp > 1 else 1.0)

    def nothing_found(self) -> ConfigError | InfeasibleError:
        name, request = self.target.name, self.request
        return InfeasibleError(
            f"{request.model.name} fits {request.cluster.num_gpus} GPUs in no setting of {name}"
            + (f", which does not say {', '.join(self.space.unsaid)}" if self.space.unsaid else ""),
            hint="leave out --for to see what fits",
        )


class LauncherFactory(DescribedFactory):
    """The candidates of a launcher, and the parts of a plan that it is not searched for."""

    def __init__(self, request: Request, target: Target) -> None:
        super().__init__(relaxed(request, target))

    def unsearched(self) -> tuple[UnsearchedPart, ...]:
        return _NOT_SEARCHED


_NOT_SEARCHED = (
    UnsearchedPart(
        "blocks with a ZeRO stage, a recompute or a division of their own",
        "a plan for a launcher has one of each for all blocks",
    ),
    UnsearchedPart(
        "interleaved stages of other lengths",
        "they are equal, but for one block less on the first and the last",
    ),
    UnsearchedPart(
        "unequal stages of blocks of several classes, where a part of each stage recomputes",
        "they are as equal as can be",
    ),
    UnsearchedPart(
        "states and activations on the host",
        "they are exported where a plan of --for none has them",
    ),
    UnsearchedPart(
        "the precision of the training, its products and its optimizer's states",
        "they are those of the request",
    ),
    UnsearchedPart(
        "states over some of the data-parallel ranks",
        "all of them share one copy, unless --zero-ranks says how many",
    ),
    UnsearchedPart(
        "Megatron-Core's fused loss, and sizes of the buckets of gradients",
        "in the prices this loss saves no time and holds more, and buckets cost memory alone",
    ),
)
# facts that a launcher says of every layout, or of none
_OF_TRAINING = ("precision", "products", "state_precision", "optimizer", "attention")


def _require_settings(request: Request, target: Target) -> None:
    """Raises ConfigError for a request that asks for more than settings of a launcher."""
    require_plain(request.model, request.training, target)
    pins, stack = request.constraints, request.training.stack.name
    other_goals = {
        f"--objective {request.objective}": request.objective is not Objective.THROUGHPUT,
        f"--prefer {request.options.prefer}": request.options.prefer is not Prefer.FASTEST,
        "--robust": request.options.robust is not None,
    }
    unsaid = {
        "--recompute-first-stage": pins.recompute_first_stage is not None,
        "--zero-by-operator": pins.zero_by_operator,
        "--tp-overlap": pins.tp_overlap not in (None, (0,)),
        "--weights-over-data": True in (pins.weights_over_data or ()),
        "--offload": bool(pins.offload),
        "--module": request.module is not None,
        f"--profile of the stack {stack}": stack not in target.stacks,
    }
    for flag, given in (other_goals | unsaid).items():
        if given:
            reason = (
                "the settings of one launcher are searched for the shortest step"
                if flag in other_goals
                else "its settings are searched without it"
            )
            raise ConfigError(
                f"--for {target.name} and {flag} exclude each other: {reason}",
                hint="leave one of them out",
            )


def as_said(request: Request, target: Target) -> Request:
    """Returns the request with the precision of gradients that a launcher has.

    A default gives way to what the launcher always does. Raises ConfigError where the user has
    asked for anything else, and for a request that settings cannot answer.
    """
    _require_settings(request, target)
    model, cluster = request.model, request.cluster
    training = request.training
    settings = Settings(  # one sequence a GPU: what is asked depends on no batch
        dp=cluster.num_gpus,
        zero=target.zeros[-1],
        blocks=(model.num_layers,),
        **model_facts(model),
        **training_facts(replace(training, global_batch_size=cluster.num_gpus)),
        **next(iter(target.recomputes(model, model.num_layers))),
    )
    unsaid: list[str] = []
    with suppress(ConfigError):  # the launcher does not run as many data-parallel ranks
        asked, settings = settings, read_back(target, settings, model, cluster)
        unsaid = [name for name in _OF_TRAINING if getattr(asked, name) != getattr(settings, name)]
    if unsaid:
        facts = (f"{name.replace('_', ' ')} {getattr(asked, name)}" for name in unsaid)
        raise ConfigError(
            f"{target.name} does not say {', '.join(facts)}", hint="choose another launcher"
        )
    said = settings.gradient_precision
    if said is training.gradient_precision:
        return request
    option = f"--gradient-precision {training.gradient_precision}"
    if option not in request.assumed:
        raise ConfigError(f"{option}: {target.name} has {said}", hint="leave it out")
    its_own = f"--gradient-precision {said} ({target.name}'s)"
    assumed = tuple(its_own if phrase == option else phrase for phrase in request.assumed)
    training = replace(training, gradient_precision=said)
    return replace(request, training=training, assumed=assumed)


def relaxed(request: Request, target: Target) -> Request:
    """Returns the request whose plans include all settings that a launcher may have.

    Blocks recompute any of their operators, each block its own, at any of its ZeRO stages. Raises
    ConfigError where pins leave no ZeRO stage of the launcher.
    """
    pins, training = request.constraints, request.training
    allowed = pins.resolved().zero or target.zeros
    zeros = tuple(zero for zero in target.zeros if zero in allowed)
    if not zeros:
        raise ConfigError(
            f"--zero {','.join(map(str, allowed))}: {target.name} has the stages "
            f"{', '.join(map(str, target.zeros))}",
            hint="pin one of these",
        )
    wider = replace(
        pins,
        zero=zeros,
        recompute=None,
        tp_overlap=(0,),
        megatron_sharding=True,
        weights_over_data=(False,),
        offload=(),
        forbid=tuple(ban for ban in pins.forbid if ban.name not in ("zero", "recompute")),
    )
    stack = replace(training.stack, recompute=EVERY_RECOMPUTE)
    return replace(request, training=replace(training, stack=stack), constraints=wider)
