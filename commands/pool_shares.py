"""`plan --pools data`: pools of an unequal cluster that divide the batch, each with a plan file."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from parplan.commands.options.result_options import STDOUT, ResultOptions
from parplan.commands.style import noticing_ctrl_c, print_lines, tell_kept
from parplan.planner.request import Request
from parplan.profiles.errors import ConfigError
from parplan.profiles.interrupts import INTERRUPTED


def share_batch(request: Request, assumed: Sequence[str], result: ResultOptions) -> int:
    """Writes the plan of every pool for its share of the batch, and prints the shares.

    Raises ConfigError for equal nodes, and for an output that is not files.
    """
    from parplan.executor.placed_layers import torchrun_line
    from parplan.planner.export.files.quoting import shell_word
    from parplan.planner.plan.plan_file import write_plans
    from parplan.planner.search.largest_model import SearchWatch
    from parplan.planner.search.pools_divide_data import divide_batch
    from parplan.report.searches.share_table import print_shares
    from parplan.report.text import console

    if not request.cluster.pool_names:
        raise ConfigError(
            f"--pools data: cluster {request.cluster.name} has equal nodes",
            hint="describe its pools in a cluster file, or leave out --pools",
        )
    if result.as_json or result.output in (None, STDOUT):
        raise ConfigError(
            "--pools data writes one plan file for each pool",
            hint="name a file with --output, and leave out --json",
        )
    assert isinstance(result.output, Path), "checked above"
    files_of_pools = _files(request.cluster.pool_names, result.output)
    with noticing_ctrl_c() as interrupts:
        divided = divide_batch(request, SearchWatch(interrupted=lambda: bool(interrupts)))
    paths = [files_of_pools[share.pool] for share in divided.shares]
    print_shares(divided, request, assumed, console(sys.stdout), whole=result.verbose)
    plans = (share.plan for share in divided.shares)
    for path, kept in write_plans(dict(zip(paths, plans, strict=True))).items():
        print_lines(f"wrote {path}", err=True)
        tell_kept(kept)
    first, *others = (share.plan for share in divided.shares)
    files = " ".join(shell_word(str(path)) for path in paths)
    print_lines("run them with", f"  {torchrun_line(first, files, others)}", err=True)
    return INTERRUPTED if interrupts else 0


def _files(pools: Iterable[str], output: Path) -> dict[str, Path]:
    """Returns the plan file of each pool. Raises ConfigError for a pool whose name is no file's."""
    from parplan.profiles.documents.files import require_writable

    files = {}
    for pool in pools:
        name = f"{output.stem}-{pool}{output.suffix}"
        if "/" in name:
            raise ConfigError(
                f"--pools data names a file after each pool, and pool {pool} has a slash",
                hint="give that pool another name in its cluster file",
            )
        files[pool] = output.with_name(name)
        require_writable(files[pool])
    return files
