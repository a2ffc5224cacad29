"""The survey's schemes of parallel training as a table that can be asked (S1).

Every scheme uses all devices of a request by itself, or as many as it can, with data parallelism
over the rest. Devices are idle where no such layout is legal. The schemes that the search may
choose are priced as the search prices them; the others have formulas of their own
(costmodels/schemes/formula_schemes.py). The symbols of the texts are those of EQUATIONS T6.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from parplan.costmodels.host.offload import Offload
from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.schedules.schedule import Schedule
from parplan.costmodels.schemes.formula_schemes import (
    SchemeCost,
    asynchronous_server,
    local_sgd,
    parameter_server,
    tensor_3d,
    tensor_25d,
)
from parplan.planner.infeasible.shortfall import price_cache_of
from parplan.planner.request import Request
from parplan.planner.schemes.scheme_prices import (
    Price,
    SchemeInput,
    asynchronous_pipeline,
    by_formula,
    by_search,
    context_of_form,
    copies_of_degree,
    experts_of_degree,
    grid_of_degree,
    interleaved,
    stages_of_degree,
    tensor_of_degree,
    two_buffered_pipeline,
)
from parplan.planner.search.estimate import UniformChoices
from parplan.profiles.divisors import divisors
from parplan.profiles.errors import ConfigError, InfeasibleError
from parplan.profiles.stack import EVERY_SCHEDULE, ContextForm

LOCAL_STEPS = 8  # between two sums of local SGD, where a request does not say it


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """One row of the table.

    time, sends, holds     formulas of the seconds of a step, the bytes that a device sends in it,
                           and the bytes that it holds (docs/equations.md, T6)
    source                 the publication of the formulas
    divides                False where every device has a whole model, so that no fewer can run it
    searched               whether a search may choose it
    changes_convergence    whether a step is another than that of one device with the whole batch
    """

    name: str
    time: str
    sends: str
    holds: str
    source: str
    price: Price
    divides: bool = True
    searched: bool = True
    changes_convergence: bool = False


@dataclass(frozen=True, slots=True)
class PricedScheme:
    """A scheme with its cost over `degree` devices, of which there are `copies`; others are idle.

    cost      None where no number of devices can run it
    reason    why not all devices run it together, empty where they do
    """

    scheme: Scheme
    cost: SchemeCost | None
    degree: int = 1
    copies: int = 1
    reason: str = ""


_RATIO = "(n-1)/n"
_GRADIENTS = f"2{_RATIO} g w"
_COPIES = "(p + g + 12) w + A"
_DATA = (
    Scheme(
        name="data parallel",
        time="C/n + AR(g w)",
        sends=_GRADIENTS,
        holds=_COPIES,
        source="Li et al. 2020, arXiv 2006.15704",
        price=by_search(copies_of_degree),
        divides=False,
    ),
    *(
        Scheme(
            name=f"ZeRO {stage}",
            time=time,
            sends=sends,
            holds=holds,
            source="Rajbhandari et al. 2020, arXiv 1910.02054",
            price=by_search(copies_of_degree, UniformChoices(zero=stage)),
            divides=False,
        )
        for stage, time, sends, holds in (
            (1, "C/n + RS(g w) + AG(p w)", f"{_RATIO} (g + p) w", "(p + g + 12/n) w + A"),
            (2, "C/n + M RS(g w) + AG(p w)", f"{_RATIO} (M g + p) w", "(p + (g + 12)/n) w + A"),
            (
                3,
                "C/n + M (2 AG(p w) + RS(g w))",
                f"{_RATIO} M (g + 2p) w",
                "(g + 12)/n w + 2 layers + A",
            ),
        )
    ),
    Scheme(
        name="parameter server",
        time="C/n + n max(g, p) w/B",
        sends="g w; the server n p w",
        holds=_COPIES,
        source="Li et al. 2014, OSDI, parameter server",
        price=by_formula(parameter_server, shared=False),
        divides=False,
        searched=False,
    ),
    Scheme(
        name="asynchronous server",
        time="max(C/n, n max(g, p) w/B)",
        sends="g w; the server n p w",
        holds=_COPIES,
        source="Dean et al. 2012, NeurIPS 25, Downpour SGD",
        price=by_formula(asynchronous_server, shared=False),
        divides=False,
        searched=False,
        changes_convergence=True,
    ),
    Scheme(
        name="local SGD",
        time="C/n + AR(4 w)/H",
        sends=f"2{_RATIO} 4 w/H",
        holds=_COPIES,
        source="Stich 2019, arXiv 1805.09767",
        price=by_formula(local_sgd, shared=False),
        divides=False,
        searched=False,
        changes_convergence=True,
    ),
)
_TENSOR = (
    Scheme(
        name="tensor 1-D",
        time="C/n + 4 M L AR(e S b h)",
        sends=f"8{_RATIO} M L e S b h",
        holds="(p + g + 12) w/n + part of A",
        source="Shoeybi et al. 2019, arXiv 1909.08053",
        price=by_search(tensor_of_degree),
    ),
    Scheme(
        name="tensor 1-D, sequence",
        time="C/n + M L (6 AG + 4 RS)(e S b h)",
        sends=f"10{_RATIO} M L e S b h",
        holds="(p + g + 12) w/n + A/n",
        source="Korthikanti et al. 2022, arXiv 2205.05198",
        price=by_search(tensor_of_degree, sequence_parallel=True),
    ),
    Scheme(
        name="tensor 2-D",
        time="C/n + 3 M sum(AG(X/q) + AG(W/q)), n = q q",
        sends="3 M (q-1)/q2 sum(X + W)",
        holds="(p + g + 12) w/n + A/n",
        source="Xu et al. 2021, arXiv 2104.05343",
        price=by_search(grid_of_degree),
    ),
    Scheme(
        name="tensor 2.5-D",
        time="C/n + 3 M sum(AG(X/(q d)) + AG(W/q)) + AR(W/q2), n = q q d",
        sends="3 M (q-1)/q2 sum(X/d + W) + 2(d-1)/d W/q2",
        holds="(p + g + 12) w/q2 + A/n",
        source="Wang et al. 2021, arXiv 2105.14500",
        price=by_formula(tensor_25d),
        searched=False,
    ),
    Scheme(
        name="tensor 3-D",
        time="C/n + 3 M sum(AG(X/l2) + AG(W/l2) + RS(Y/l2)), n = l l l",
        sends="3 M (l-1)/l3 sum(X + W + Y)",
        holds="(p + g + 12) w/n + A/n",
        source="Bian et al. 2021, arXiv 2105.14450",
        price=by_formula(tensor_3d),
        searched=False,
    ),
)
_CONTEXT = tuple(
    Scheme(
        name=f"context, {form}",
        time=f"C/n + {time} + AR(g w)",
        sends=f"{sends} + {_GRADIENTS}",
        holds="(p + g + 12) w + A/n",
        source=source,
        price=by_search(context_of_form(form)),
    )
    for form, time, sends, source in (
        (
            ContextForm.RING,
            "max(0, 3 M L (n-1) P2P(KV/n) - attention)",
            "3 M L (n-1)/n KV",
            "Liu et al. 2023, arXiv 2310.01889",
        ),
        (
            ContextForm.ALL_GATHER,
            "M L (2 AG + RS)(KV)",
            f"3 M L {_RATIO} KV",
            "Llama 3, arXiv 2407.21783",
        ),
        (
            ContextForm.ALL_TO_ALL,
            "M L 2 (A2A(Q/n + KV/n) + A2A(O/n)) + M L A2A(O/n)",
            f"M L {_RATIO} (2 Q + 2 KV + 3 O)/n",
            "Jacobs et al. 2023, arXiv 2309.14509",
        ),
    )
)
_MESSAGES = "2 M e S b h"
_SCHEDULES = tuple(
    Scheme(
        name=f"pipeline, {name}",
        time=time,
        sends=_MESSAGES if schedule not in (Schedule.ZBV, Schedule.DUALPIPEV) else "4 M e S b h",
        holds=f"(p + g + 12) w/n + {stashes}",
        source=source,
        price=by_search(
            stages_of_degree,
            UniformChoices(recompute=recompute),
            schedule=schedule,
            virtual_stages=2 if schedule in (Schedule.ZBV, Schedule.DUALPIPEV) else 1,
        ),
    )
    for schedule, name, time, stashes, source, recompute in (
        (
            Schedule.GPIPE,
            "GPipe",
            "(M + n - 1)/M C/n",
            "M A/n",
            "Huang et al. 2019, arXiv 1811.06965",
            Recompute.NONE,
        ),
        (
            Schedule.ONE_F_ONE_B,
            "1F1B",
            "(M + n - 1)/M C/n",
            "A",
            "Narayanan et al. 2021, arXiv 2104.04473",
            Recompute.NONE,
        ),
        (
            Schedule.ZBV,
            "ZB-V",
            "(6 M + n - 1)/(6 M) C/n",
            "A",
            "Qi et al. 2024, arXiv 2405.15362",
            Recompute.NONE,
        ),
        (
            Schedule.DUALPIPEV,
            "DualPipeV",
            "(6 M + n - 1)/(6 M) C/n",
            "A + A/(2 n)",
            "DeepSeek-AI 2025, github deepseek-ai/DualPipe",
            Recompute.NONE,
        ),
        *(
            (
                schedule,
                name,
                f"(M + n - 1)(F + B) + {recomputed}",
                "L e S b h + A/L",
                "Lai et al. 2023, arXiv 2206.04959",
                Recompute.FULL,
            )
            for schedule, name, recomputed in (
                (Schedule.EARLY_RECOMPUTE, "early R", "M R"),
                (Schedule.LAST_NO_RECOMPUTE, "last no R", "(M - 2) R"),
                (Schedule.SCP, "SCP", "(M - 2) R - min(R, B - F)"),
            )
        ),
    )
)
_PIPELINES = (
    *_SCHEDULES,
    Scheme(
        name="pipeline, interleaved",
        time="(M + (n - 1)/v)/M C/n",
        sends="2 v M e S b h",
        holds="(p + g + 12) w/n + (1 + (n-1)/(n v)) A",
        source="Narayanan et al. 2021, arXiv 2104.04473",
        price=interleaved,
    ),
    Scheme(
        name="PipeDream, stashing",
        time="C/n + (M - 1) Adam(w/n)",
        sends=_MESSAGES,
        holds="(n p + g + 12) w/n + A",
        source="Narayanan et al. 2019, doi 10.1145/3341301.3359646",
        price=asynchronous_pipeline,
        searched=False,
        changes_convergence=True,
    ),
    Scheme(
        name="PipeDream-2BW",
        time="C/n",
        sends=_MESSAGES,
        holds="(2 p + g + 12) w/n + A",
        source="Narayanan et al. 2021, arXiv 2006.09503",
        price=two_buffered_pipeline,
        searched=False,
        changes_convergence=True,
    ),
)
_OTHERS = (
    Scheme(
        name="expert parallel",
        time="C/n + 4 M L A2A(k e S b h) + AR(g w')",
        sends=f"4{_RATIO} M L k e S b h + 2{_RATIO} g w'",
        holds="(p + g + 12) (w' + w''/n) + A",
        source="Lepikhin et al. 2020, arXiv 2006.16668",
        price=by_search(experts_of_degree),
    ),
    Scheme(
        name="selective recompute",
        time="C/n + a few operators + AR(g w)",
        sends=_GRADIENTS,
        holds="(p + g + 12) w + part of A",
        source="Korthikanti et al. 2022, arXiv 2205.05198",
        price=by_search(copies_of_degree, UniformChoices(recompute=Recompute.SELECTIVE)),
        divides=False,
    ),
    Scheme(
        name="full recompute",
        time="4/3 C/n + AR(g w)",
        sends=_GRADIENTS,
        holds="(p + g + 12) w + L e S b h",
        source="Chen et al. 2016, arXiv 1604.06174",
        price=by_search(copies_of_degree, UniformChoices(recompute=Recompute.FULL)),
        divides=False,
    ),
    Scheme(
        name="ZeRO 3 on the host",
        time="C/n + M (2 AG(p w) + RS(g w)) + copies",
        sends=f"{_RATIO} M (g + 2p) w",
        holds="2 layers + A",
        source="Ren et al. 2021, arXiv 2101.06840",
        price=by_search(copies_of_degree, UniformChoices(zero=3, offload=(Offload.STATES,))),
        divides=False,
    ),
    Scheme(
        name="activations on host",
        time="C/n + AR(g w) + copies",
        sends=_GRADIENTS,
        holds="(p + g + 12) w + 2 blocks of A",
        source="Rhu et al. 2016, arXiv 1602.08124",
        price=by_search(copies_of_degree, UniformChoices(offload=(Offload.ACTIVATIONS,))),
        divides=False,
    ),
)
SCHEMES = (*_DATA, *_TENSOR, *_CONTEXT, *_PIPELINES, *_OTHERS)


def priced_schemes(
    request: Request, micro_batch_size: int, local_steps: int = LOCAL_STEPS
) -> Iterator[PricedScheme]:
    """Yields every scheme over all devices of a request, or over as many as can run it.

    micro_batch_size    sequences of one device in a micro-batch; of all devices together where they
                        share a micro-batch
    local_steps         steps of a device between two sums of local SGD
    The stack's prices hold for schedules that it does not run too.
    """
    training = request.training
    stack = replace(training.stack, schedules=EVERY_SCHEDULE)
    request = replace(request, training=replace(training, stack=stack))
    given = SchemeInput(
        request=request,
        micro_batch_size=micro_batch_size,
        price_cache=price_cache_of(request),
        local_steps=local_steps,
    )
    for scheme in SCHEMES:
        yield priced_scheme(scheme, given)


def priced_scheme(scheme: Scheme, given: SchemeInput) -> PricedScheme:
    """Returns a scheme on as many devices as can run it, at the greatest degree that is legal.

    Devices are left over only where no degree is legal on all of them.
    """
    reasons: list[str] = []
    for devices in sorted(divisors(given.num_devices), reverse=True):
        for degree in sorted(divisors(devices), reverse=True) if scheme.divides else (devices,):
            try:
                cost = scheme.price(given.on(devices), degree)
            except (ConfigError, InfeasibleError) as error:
                reasons.append(str(error))
            else:
                return PricedScheme(scheme, cost, degree, devices // degree, *reasons[:1])
    return PricedScheme(scheme, None, reason=reasons[0])
