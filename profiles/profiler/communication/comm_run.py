"""Measures communication cases one by one; rank 0 chooses them and writes the journal.

Before each case rank 0 notes on disk that it is in flight. A collective that fails or passes its
timeout ends the run, because its communicators cannot be used again: rank 0 records the case and
the next run continues after it. A case that is still noted when a run begins has ended the run
before, or was interrupted with it. It is tried again, and given up when that has happened too
often.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from parplan.profiles.documents.files import write_text
from parplan.profiles.documents.reader import read_json
from parplan.profiles.documents.schema import parse
from parplan.profiles.errors import ConfigError, PlannerError
from parplan.profiles.machines.measurements import Case, CaseOutcome, Record
from parplan.profiles.profiler.communication.collective_timing import FULL, Effort, measure_case
from parplan.profiles.profiler.communication.measuring_ranks import MeasuringRank
from parplan.profiles.profiler.journal import Journal

STOP = -1
ATTEMPTS = 3  # runs that may end silently in a case; being killed from outside looks alike
ENDED = {
    CaseOutcome.HUNG: "hung in",
    CaseOutcome.CRASHED: "crashed in",
    CaseOutcome.OUT_OF_MEMORY: "out of memory in",
}
AGAIN = "run the same command again: it goes on with what is left"
# Other ranks wait this long after an error, because torchrun ends all when the first exits.
LAST_WORD_S = 3.0


@dataclass(frozen=True, slots=True)
class _Note:
    """The key of a case, and the number of runs that have begun it."""

    case: str
    attempts: int


@dataclass(frozen=True, slots=True)
class InFlight:
    """The note on the case that is being measured, in a file beside the journal."""

    path: Path

    def begin(self, case: Case) -> None:
        """Notes the case and the number of runs that have begun it."""
        noted = json.dumps({"case": case.key, "attempts": self.attempts(case) + 1})
        write_text(noted, self.path, hint="make room, and run the command again: it goes on")

    def attempts(self, case: Case) -> int:
        """The number of runs that ended in this case."""
        noted = self._noted()
        return noted.attempts if noted is not None and noted.case == case.key else 0

    def end(self) -> None:
        self.path.unlink(missing_ok=True)

    def _noted(self) -> _Note | None:
        try:
            return parse(_Note, read_json(self.path), str(self.path))
        except ConfigError:
            return None


@dataclass(kw_only=True)
class Chief:
    """Rank 0's part: the order of cases, the journal, the note in flight and the end of the budget.

    told     called with each record, the number of cases with a record, and that of all cases
    parent   the process that started this one; without it the run stops
    """

    cases: Sequence[Case]
    journal: Journal
    in_flight: InFlight
    ends_at_s: float = math.inf  # by time.monotonic()
    told: Callable[[Record, int, int], None] = lambda record, done, number: None
    parent: int = field(default_factory=os.getppid)

    def left(self) -> tuple[Case, ...]:
        """The cases without a record, in order."""
        return tuple(case for case in self.cases if case.key not in self.journal.records)

    def give_up(self, attempts: int) -> None:
        """Records the case in flight as crashed if `attempts` runs have ended in it."""
        for case in self.left():
            if self.in_flight.attempts(case) >= attempts:
                self.keep(
                    Record(
                        case=case,
                        outcome=CaseOutcome.CRASHED,
                        detail=f"{attempts} runs ended in it without a word",
                    )
                )

    def next_index(self) -> int:
        """The index of the next case, STOP when none or no time is left."""
        if os.getppid() != self.parent:
            return STOP
        for index, case in enumerate(self.cases):
            if case.key not in self.journal.records:
                return index if time.monotonic() < self.ends_at_s else STOP
        return STOP

    def keep(self, record: Record) -> None:
        """Writes the record to disk and ends the note in flight."""
        self.journal.append(record)
        self.in_flight.end()
        self.told(record, len(self.cases) - len(self.left()), len(self.cases))


def run_cases(
    cases: Sequence[Case], ranks: MeasuringRank, chief: Chief | None, effort: Effort = FULL
) -> None:
    """Measures the cases that rank 0, which alone has a `chief`, chooses.

    Raises PlannerError when a collective failed.
    """
    while (index := _next(ranks, chief)) != STOP:
        case = cases[index]
        if chief is not None:
            chief.in_flight.begin(case)
        try:
            record = measure_case(case, ranks, effort)
        except RuntimeError as error:
            raise _failed(case, error, chief) from None
        if chief is not None:
            chief.keep(record)


def _next(ranks: MeasuringRank, chief: Chief | None) -> int:
    try:
        return ranks.decided(STOP if chief is None else chief.next_index())
    except RuntimeError as error:
        raise PlannerError(
            f"lost the other ranks between two cases: {_first_line(error)}", hint=AGAIN
        ) from None


def _failed(case: Case, error: RuntimeError, chief: Chief | None) -> PlannerError:
    """Records the case on rank 0 and returns the error of a run that cannot go on."""
    reason = _first_line(error)
    outcome = CaseOutcome.CRASHED
    if isinstance(error, torch.OutOfMemoryError):
        outcome = CaseOutcome.OUT_OF_MEMORY
    elif any(words in reason.lower() for words in ("timed out", "timeout")):
        outcome = CaseOutcome.HUNG
    if chief is None:
        time.sleep(LAST_WORD_S)
    else:
        chief.keep(Record(case=case, outcome=outcome, detail=reason))
    return PlannerError(
        f"{ENDED[outcome]} {case.key}: {reason}", hint=f"{AGAIN}, without this case"
    )


def _first_line(error: RuntimeError) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
