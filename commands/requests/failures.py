"""The failures that options state, with a phrase for every default."""

from __future__ import annotations

from dataclasses import replace

from parplan.commands.options.failure_options import FailureOptions
from parplan.commands.options.search_options import SearchFlags
from parplan.costmodels.usage.goodput import Failures
from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.hardware import Cluster
from parplan.profiles.units import GB, parse_rate, parse_span

GOODPUT = "goodput"  # this objective is the fastest plan's
RESTART = "10min"  # assumed
REPAIR = "24h"  # assumed
# Llama 3's storage sustained 2 TB/s for 2,048 nodes (arXiv 2407.21783, section 3.3.1).
STORAGE_BYTES_PER_S = GB


def failures_of(
    options: FailureOptions, cluster: Cluster
) -> tuple[Failures | None, tuple[str, ...]]:
    """Returns the failures, None where no option asks for them, and phrases for the defaults.

    Raises ConfigError for text that is no time span or rate, and for options without --mtbf.
    """
    if options.mtbf is None:
        _require_alone(options)
        return None, ()
    assumed = []
    restart, repair = options.restart_time or RESTART, options.repair_time or REPAIR
    if options.restart_time is None:
        assumed.append(f"--restart-time {restart}")
    if options.repair_time is None:
        assumed.append(f"--repair-time {repair}")
    if options.storage is None:
        rate = float(STORAGE_BYTES_PER_S * cluster.nodes)
        assumed.append(f"--storage {rate / GB:.0f}GB/s (1 for each node)")
    else:
        rate = parse_rate("--storage", options.storage)
    failures = Failures(
        mtbf_s=parse_span("--mtbf", options.mtbf),
        restart_s=parse_span("--restart-time", restart),
        storage_bytes_per_s=rate,
        repair_s=parse_span("--repair-time", repair),
        spare_nodes=options.spare_nodes,
    )
    return failures, tuple(assumed)


def chooses_spares(flags: SearchFlags, options: FailureOptions, *, described: bool) -> bool:
    """True if the search chooses how many nodes train and how many wait as spares.

    With --spare-nodes all GPUs of the request train. Raises ConfigError where it cannot choose.
    """
    if flags.objective != GOODPUT or options.spare_nodes is not None:
        return False
    lacking = {
        "a traced module": not described,
        "--for": flags.launchers is not None,
        "--search": flags.method is not None,
    }
    for what, given in lacking.items():
        if given:
            raise ConfigError(
                f"--objective {GOODPUT} chooses how many nodes train, which does not go with "
                f"{what}",
                hint="add --spare-nodes 0, so that all GPUs train",
            )
    return True


def without_goodput(flags: SearchFlags, options: FailureOptions) -> SearchFlags:
    """Returns the flags with the objective that finds the plan of most goodput on some nodes.

    A checkpoint is one copy of what is trained, and a failure stops all GPUs: every plan on as many
    nodes loses the same share of its time. So the fastest of them has the most goodput, with the
    same bound and gap. Raises ConfigError where no failures are stated.
    """
    if flags.objective != GOODPUT:
        return flags
    if options.mtbf is None:
        raise ConfigError(
            f"--objective {GOODPUT} needs the time between failures",
            hint="add --mtbf, for example --mtbf 50000h",
        )
    return replace(flags, objective="throughput")


def _require_alone(options: FailureOptions) -> None:
    """Raises ConfigError for an option that only --mtbf gives a meaning."""
    given = {
        "--restart-time": options.restart_time,
        "--repair-time": options.repair_time,
        "--storage": options.storage,
        "--spare-nodes": options.spare_nodes,
    }
    for name, value in given.items():
        if value is not None:
            raise ConfigError(
                f"{name} is for the goodput, which needs --mtbf",
                hint="add --mtbf, for example --mtbf 50000h",
            )
