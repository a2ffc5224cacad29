"""Fits the host rates of one device and one process to records of copies and of Adam."""

from __future__ import annotations

from collections.abc import Sequence

from parplan.profiles.machines.measurements import CaseOutcome, Record
from parplan.profiles.machines.speeds import HostSpeed

RATES = {  # field of the rates -> work and figure of a record
    "to_device_bytes_per_s": ("transfer", "to_device_bytes_per_s"),
    "from_device_bytes_per_s": ("transfer", "from_device_bytes_per_s"),
    "adam_bytes_per_s": ("host_adam", "bytes_per_s"),
}


def host_speed(records: Sequence[Record]) -> HostSpeed | None:
    """The best measured value of each rate, reached at the largest size; None without records."""
    rates = {
        name: rate
        for name, (work, figure) in RATES.items()
        if (rate := _best(records, work, figure)) is not None
    }
    return HostSpeed(**rates) if rates else None


def _best(records: Sequence[Record], work: str, figure: str) -> float | None:
    rates = [
        record.measured.figures[figure]
        for record in records
        if record.case.work == work
        and record.outcome is CaseOutcome.MEASURED
        and record.measured
        and figure in record.measured.figures
    ]
    return max(rates, default=None)
