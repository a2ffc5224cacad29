"""The words that launchers and schedulers put before the lines of the programs that they start.

Known are the tags of a rank, the name of a host and times of day, in any order and several at once:

    [default0]:  [rank3]:             torchrun --tee, and the names of its redirected ranks
    [1,0]<stdout>:  [job@1,0]<stdout>:   mpirun --tag-output, Open MPI 4 and 5
    [0]                               mpiexec -prepend-rank (MPICH, Intel MPI)
    0:                                srun --label
    worker-0:                         pdsh, as the launcher of DeepSpeed
    2026-08-22T15:22:22.123Z          kubectl logs --timestamps
    Aug 22 15:22:22                   ts
    Sat Aug 22 15:22:22 2026          mpirun --timestamp-output
"""

from __future__ import annotations

import re

_MOST = 6  # prefixes of one line
_DAY = "(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)"
_MONTH = "(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)"
_CLOCK = r"[0-9]{2}:[0-9]{2}:[0-9]{2}(?:[.,][0-9]{1,9})?"
_RANK = re.compile(
    r"\[(?P<a>[A-Za-z][\w.-]{0,60}[0-9])\]: ?"
    r"|\[[\w.@-]{0,80},(?P<b>[0-9]{1,9})\]<std(?:out|err|diag)>: ?"
    r"|\[(?P<c>[0-9]{1,7})\] "
    r"|(?P<d>[0-9]{1,7}):(?: |$)"
    r"|(?P<e>[A-Za-z][A-Za-z0-9.-]{0,60}[0-9]): "
)
_TIME = re.compile(
    rf"\[?[0-9]{{4}}-[0-9]{{2}}-[0-9]{{2}}[T ]{_CLOCK}(?:Z|[+-][0-9]{{2}}:?[0-9]{{2}})?\]?(?: |$)"
    rf"|{_DAY} {_MONTH} {{1,2}}[0-9]{{1,2}} {_CLOCK}(?: [A-Z]{{3,4}})? [0-9]{{4}}"
    r"(?:<std(?:out|err)>:)? ?"
    rf"|{_MONTH} {{1,2}}[0-9]{{1,2}} {_CLOCK} "
    rf"|\[?{_CLOCK}\]? "
)
_SPACES = re.compile(r" {0,200}")


def without_prefixes(line: str) -> tuple[str, str]:
    """Returns the first word that names a rank or a host, "" where none does, and the rest."""
    rank, at = "", 0
    for _ in range(_MOST):
        spaces = _SPACES.match(line, at)
        begin = spaces.end() if spaces else at
        tagged = _RANK.match(line, begin)
        found = tagged or _TIME.match(line, begin)
        if found is None:
            break
        if tagged and not rank:
            rank = next(filter(None, tagged.groups()), "")
        at = found.end()
    return rank, line[at:]
