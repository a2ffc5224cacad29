"""`plan size`: how many GPUs of which kind meet a deadline, the cheapest first."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from parplan.commands.options.failure_options import FailureOptions, failure_options
from parplan.commands.options.pin_options import PinOptions
from parplan.commands.options.result_options import ResultOptions, as_json, packed_result
from parplan.commands.options.search_options import SearchFlags, search_options
from parplan.commands.options.sections import AIM, OUTPUT, WHAT, WHERE
from parplan.commands.options.target_options import (
    TargetOptions,
    fine_tuning_options,
    training_options,
)
from parplan.commands.output import require_output
from parplan.commands.style import (
    Command,
    List,
    Whole,
    option,
    packs,
    print_json,
    print_lines,
    tell_kept,
)
from parplan.commands.worker_pool import in_processes
from parplan.profiles.interrupts import INTERRUPTED

if TYPE_CHECKING:
    from parplan.costmodels.usage.goodput import Failures
    from parplan.planner.request import Request
    from parplan.planner.search.cluster_size import ClusterSize, TrainingRun
    from parplan.profiles.machines.hardware import Cluster
    from parplan.report.searches.size_table import FoundSizes

DEFAULT_KINDS = ("a100-80gb", "h100-80gb", "h200-141gb", "b200-180gb")
# 16,384 GPUs of Llama 3 405B had 419 unexpected interruptions in 54 days (arXiv 2407.21783, 3.3.4).
DEFAULT_MTBF = "50000h"


@click.command(
    "size",
    cls=Command,
    epilog=(
        "  plan size --model llama3-70b --tokens 1T --days 30\n"
        "  plan size --model llama3-8b --tokens 300B --days 7 --gpu h100-80gb,l40s-48gb "
        "--price h100-80gb=2.50 --price l40s-48gb=0.90\n"
        "  plan size --model llama3-70b --tokens 1T --days 30 --json | jq '.sizes[0]'"
    ),
)
@option(
    WHAT, "--model", names="models", metavar="NAME|PATH", required=True, help="Model, as for plan."
)
@option(AIM, "--tokens", metavar="N", required=True, help="Tokens to train on: 1T, 300B.")
@option(
    AIM,
    "--days",
    metavar="N",
    required=True,
    type=click.FloatRange(0, min_open=True),
    help="Days within which the training ends.",
)
@option(
    WHERE,
    "--gpu",
    "kinds",
    names="clusters",
    type=List(click.STRING),
    default=DEFAULT_KINDS,
    metavar="NAME,..",
    help=f"Kinds of GPU to compare, names of `plan clusters`. [default: {','.join(DEFAULT_KINDS)}]",
)
@option(
    WHERE,
    "--gpus-per-node",
    type=Whole("gpus_per_node"),
    metavar="N",
    help="GPUs in a node. [default: the cluster's, or the power of two below]",
)
@option(
    AIM,
    "--price",
    "prices",
    multiple=True,
    metavar="NAME=N",
    help="Price of an hour of a GPU of a kind, in any currency; may be given for each kind.",
)
@training_options
@fine_tuning_options
@failure_options
@search_options
@option(
    OUTPUT,
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="File for the plan of the first row.",
)
@option(
    OUTPUT,
    "-v",
    "--verbose",
    is_flag=True,
    help="Print all defaults, and the plan and the failures of every kind.",
)
@as_json
@packs("target", TargetOptions)
@packed_result
def size(
    tokens: str,
    days: float,
    kinds: tuple[str, ...],
    prices: tuple[str, ...],
    target: TargetOptions,
    failing: FailureOptions,
    pins: PinOptions,
    flags: SearchFlags,
    result: ResultOptions,
) -> int:
    """Find how many GPUs of which kind train a model by a deadline, the cheapest first.

    Numbers of GPUs are powers of two and three times those. The time includes failures, restarts
    and checkpoints; cost and energy are of all GPUs, with those of spare nodes.
    """
    from parplan.planner.search.cluster_size import DAY_S
    from parplan.profiles.errors import InfeasibleError
    from parplan.profiles.units import parse_tokens
    from parplan.report.searches.size_table import FoundSizes

    require_output(result.output)
    wanted = parse_tokens("--tokens", tokens)
    per_hour = prices_of(prices)
    asked = _Asked(target, pins, flags, failing)
    started_s = time.monotonic()
    sizes, unanswered = _sizes(asked, kinds, wanted, days * DAY_S)
    if not sizes:
        raise KeyboardInterrupt
    found = FoundSizes(
        sizes=tuple(_cheapest_first(sizes, per_hour)),
        unanswered=unanswered,
        per_hour=per_hour,
        elapsed_s=time.monotonic() - started_s,
    )
    _deliver(found, asked, result)
    if unanswered:
        return INTERRUPTED
    return 0 if any(one.run for one in sizes) else InfeasibleError.exit_code


@dataclass(frozen=True, slots=True)
class _Asked:
    """The options of a request on any cluster."""

    target: TargetOptions
    pins: PinOptions
    flags: SearchFlags
    failing: FailureOptions

    def request(self, kind: str, gpus_per_node: int, gpus: int) -> Request:
        """Returns the request on a number of GPUs of a kind. Raises ConfigError."""
        from parplan.commands.requests.requests import request_of

        on = replace(self.target, gpu=kind, gpus=gpus, gpus_per_node=min(gpus, gpus_per_node))
        return request_of(on, self.pins, self.flags)

    def failures(self, request: Request) -> Failures | None:
        """Returns the failures of the cluster of a request. Raises ConfigError."""
        return self._failures(request.cluster)[0]

    def _failures(self, cluster: Cluster) -> tuple[Failures | None, tuple[str, ...]]:
        from parplan.commands.requests.failures import failures_of

        stated = self.failing.mtbf
        failing = replace(self.failing, mtbf=stated or DEFAULT_MTBF)
        failures, assumed = failures_of(failing, cluster)
        return failures, (*(() if stated else (f"--mtbf {DEFAULT_MTBF} (Llama 3's)",)), *assumed)

    def assumed(self, run: TrainingRun | None) -> tuple[str, ...]:
        """Returns a phrase for every default of the first row, but those of its GPU."""
        from parplan.commands.requests.requests import all_assumed

        if run is None:
            return ()
        cluster = run.plan.cluster
        request = self.request(cluster.device.name, cluster.gpus_per_node, cluster.num_gpus)
        return *all_assumed(request, self.flags), *self._failures(cluster)[1]


def prices_of(texts: Sequence[str]) -> Mapping[str, float]:
    """Returns the price of a GPU-hour by kind. Raises ConfigError."""
    from parplan.profiles.errors import ConfigError
    from parplan.profiles.machines.machine_catalog import load_cluster

    prices = {}
    for text in texts:
        name, _, price = text.partition("=")
        try:
            prices[load_cluster(name, what="GPU").name] = float(price)
        except ValueError:
            raise ConfigError(
                f"--price is {text!r}, it must be a GPU and the price of its hour",
                hint="for example --price h100-80gb=2.50",
            ) from None
    return prices


def _sizes(
    asked: _Asked, kinds: Sequence[str], tokens: float, seconds: float
) -> tuple[list[ClusterSize], tuple[str, ...]]:
    """Returns the answer for each kind, and the kinds without one because Ctrl-C came first.

    Each kind is searched in a process of its own.
    """
    from parplan.profiles.machines.machine_catalog import load_cluster

    names = list(dict.fromkeys(load_cluster(kind, what="GPU").name for kind in kinds))
    found, _ = in_processes(partial(_size_of, asked, tokens, seconds), names, "kinds")
    answered = dict(found)
    return list(answered.values()), tuple(name for name in names if name not in answered)


def _size_of(asked: _Asked, tokens: float, seconds: float, kind: str) -> ClusterSize:
    """Returns the least cluster of a kind. Raises ConfigError."""
    from parplan.planner.search.cluster_size import SizeProbes, least_cluster, numbers_of_gpus
    from parplan.profiles.machines.machine_catalog import load_cluster

    node = asked.target.gpus_per_node
    if node is None:
        node = 2 ** (load_cluster(kind, what="GPU").gpus_per_node.bit_length() - 1)
    probes = SizeProbes(
        kind=kind,
        request_of=partial(asked.request, kind, node),
        failures_of=asked.failures,
        tokens=tokens,
        seconds=seconds,
    )
    return least_cluster(probes, numbers_of_gpus(node))


def _cheapest_first(
    sizes: Sequence[ClusterSize], per_hour: Mapping[str, float]
) -> list[ClusterSize]:
    """Returns the sizes by cost, those without a price by GPU-hours, and those that miss last."""

    def key(one: ClusterSize) -> tuple[bool, bool, float]:
        if one.run is None:
            return True, True, 0.0
        price = per_hour.get(one.kind)
        return False, price is None, one.run.gpu_hours * (1.0 if price is None else price)

    return sorted(sizes, key=key)


def _deliver(found: FoundSizes, asked: _Asked, result: ResultOptions) -> None:
    from parplan.planner.plan.plan_file import write_plan
    from parplan.report.searches.size_table import print_sizes, size_document
    from parplan.report.text import console

    best = found.sizes[0].run
    if result.output is not None and best is not None:
        tell_kept(write_plan(best.plan, result.output))
    if result.as_json:
        print_json(size_document(found))
        return
    print_sizes(found, asked.assumed(best), console(sys.stdout), whole=result.verbose)
    if result.output is not None and best is not None:
        print_lines(f"wrote {result.output}, the plan of the first row")
