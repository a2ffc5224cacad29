"""The head of an exported file: its plan, its predictions, and what it lacks."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator

from parplan.planner.export.fields.arguments import Words
from parplan.planner.export.fields.configured import Priced
from parplan.planner.export.fields.losses import LostPart
from parplan.planner.plan.plan import Plan
from parplan.profiles.documents.texts import escaped
from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.machine_catalog import load_cluster, with_gpus
from parplan.profiles.units import gib

MARK = "exported by parplan from"
_WIDTH = 96
_OPTIONS = re.compile(r'^(?:# |\s*")read back with ([^"\n]+)', re.MULTILINE)


def head_lines(
    plan: Plan,
    source: str,
    target: str,
    configured: Priced,
    lost: tuple[LostPart, ...],
    stated: Iterable[tuple[str, Words]] = (),
) -> tuple[str, ...]:
    """Returns the lines, without comment signs.

    plan      with the predictions of today
    source    its file
    target    the launcher's repository and commit
    stated    options of facts that the files do not say
    """
    cluster, predicted = plan.cluster, plan.predicted
    band = predicted.error_band
    plus = "" if band is None else f" +- {band.time.share:.0%}"
    peak = max(stage.total for stage in predicted.memory_gib)
    lines = [
        f"{plan.model.name} on {cluster.gpus_text}, {MARK} {source}",
        f"for {target}",
        *_order_of_nodes(plan),
        f"the plan: {predicted.step_time_s.value:.5g} s a step{plus}, {peak:.2f} GiB a GPU at most",
        f"this file: {configured.price.step_s:.6g} s a step, {gib(configured.peak_bytes):.2f} GiB",
    ]
    if configured.missing_bytes:
        lines.append(f"it does not fit: a GPU lacks {gib(configured.missing_bytes):.2f} GiB")
    for loss in lost:
        text = f"lost: {loss.what}: {loss.step_s:+.3g} s, {gib(loss.peak_bytes):+.2f} GiB"
        lines += textwrap.wrap(text, _WIDTH, subsequent_indent="  ")
    said = [word for name, words in stated for word in (name, *words)]
    options = " ".join((*said, *_machine_options(plan).split()))
    read_back = [f"read back with {options}"] if options else []
    return tuple(escaped(line) for line in (*lines, *read_back))


def _order_of_nodes(plan: Plan) -> Iterator[str]:
    """Yields how ranks are given to the nodes of pools: a stage is on the nodes of its pool."""
    if plan.pools:
        names = ", then of ".join(dict.fromkeys(plan.pools))
        yield f"node ranks count through the nodes of {names}"


def _machine_options(plan: Plan) -> str:
    """Returns the options that name a plan's machine, empty for one that has no packaged name."""
    cluster = plan.cluster
    name = cluster.device.name
    try:
        packaged = with_gpus(load_cluster(name), cluster.num_gpus, cluster.gpus_per_node)
    except ConfigError:
        return ""
    if packaged != cluster:
        return ""
    return f"--gpu {name} --gpus {cluster.num_gpus} --gpus-per-node {cluster.gpus_per_node}"


def stated_options(text: str) -> dict[str, str]:
    """Returns the options that the head of an exported file states, by name; {} of other files."""
    stated = [line[1] for line in _OPTIONS.finditer(text) if MARK not in line[1]]
    words = stated[0].split() if stated else []
    return dict(zip(words[::2], words[1::2], strict=False))
