"""Conversion of units: seconds, bytes and FLOPs inside, the field's units at the edges."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby

from parplan.profiles.errors import ConfigError

KIB = 1024
MIB = 1024**2
GIB = 1024**3
GB = 10**9
TERA = 10**12
US_PER_S = 1e6
LARGEST = 10**18  # bytes
_SIZE_UNITS = {
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "tib": 1024 * GIB,
    "kb": 10**3,
    "mb": 10**6,
    "gb": GB,
    "tb": TERA,
}
_SPAN_UNITS = {"s": 1, "min": 60, "h": 3600, "d": 86_400, "days": 86_400, "weeks": 604_800}
_COUNT_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": TERA}


def parse_span(flag: str, text: str) -> float:
    """Returns the seconds of a time span: 50000h, 10 min, 30 days. Raises ConfigError."""
    return _with_unit(flag, text, _SPAN_UNITS, "12h (or s, min, d, weeks)")


def parse_rate(flag: str, text: str) -> float:
    """Returns the bytes/s of a rate: 2TB/s, 400 GB/s. Raises ConfigError."""
    units = {f"{unit}/s": scale for unit, scale in _SIZE_UNITS.items()}
    return _with_unit(flag, text, units, "200GB/s (or TB/s, GiB/s)")


def parse_tokens(flag: str, text: str) -> float:
    """Returns a number of tokens: 1T, 300B, 15e12. Raises ConfigError."""
    return _with_unit(flag, text, _COUNT_UNITS, "1T (or B, M, a plain number)")


def _with_unit(flag: str, text: str, units: Mapping[str, float], example: str) -> float:
    """Returns a positive number times its unit. Raises ConfigError."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?(?:e[0-9]+)?)\s*([A-Za-z/]*)", text.strip())
    scale = units.get(match[2].lower()) if match else None
    if match is None or scale is None:
        raise ConfigError(
            f"{flag} is {text[:40]!r}, it must be a number and a unit",
            hint=f"for example {flag} {example}",
        )
    value = float(match[1]) * scale
    if not 0 < value <= LARGEST:
        raise ConfigError(
            f"{flag} is {text[:40]}, it must be more than nothing and at most {LARGEST:.0e}",
            hint=f"for example {flag} {example}",
        )
    return value


def parse_size(flag: str, text: str) -> int:
    """Returns the bytes of a size: 72GiB, 73728 MiB, 80GB. Raises ConfigError naming `flag`."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]+)", text.strip())
    scale = _SIZE_UNITS.get(match[2].lower()) if match else None
    if match is None or scale is None:
        raise ConfigError(
            f"{flag} is {text!r}, it must be a number and a unit",
            hint=f"for example {flag} 72GiB (or MiB, GB, MB)",
        )
    size = float(match[1]) * scale
    if not 0.5 < size <= LARGEST:
        needed = "at most 888 PiB" if size > LARGEST else "more than nothing"
        raise ConfigError(
            f"{flag} is {text[:40]}, it must be {needed}", hint=f"for example {flag} 72GiB"
        )
    return round(size)


def gib(n_bytes: float) -> float:
    return n_bytes / GIB


def tflops(flops_per_s: float) -> float:
    return flops_per_s / TERA


def format_number(value: float, digits: int) -> str:
    """Returns a number in `digits` significant digits: `16,410`, `0.0123`.

    Thousands are separated; there are no trailing zeros and no exponent.
    """
    rounded = float(f"{value:.{digits}g}")
    if not rounded or not math.isfinite(rounded):
        return f"{rounded:g}"
    text = f"{rounded:,.{max(0, digits - 1 - math.floor(math.log10(abs(rounded))))}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def counted(count: int, noun: str) -> str:
    """Returns a count before its noun: `1 stage`, `1,024 stages`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def format_seconds(seconds: float) -> str:
    """Returns a duration in the unit that a person would choose: `20.1 s`, `3.25 ms`, `12.0 us`."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= scale:
            return (
                f"{format_number(seconds / scale, 3)} {unit}"
                if seconds < 1000 * scale
                else f"{seconds / scale:,.0f} {unit}"
            )
    return f"{format_number(seconds / 1e-6, 3)} us"


def format_bytes(n_bytes: float) -> str:
    """Returns a size in binary units: `61.2 GiB`, `3.5 MiB`, `512 B`."""
    for scale, unit in ((1024 * GIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if n_bytes >= scale:
            return f"{n_bytes / scale:,.1f} {unit}"
    return f"{n_bytes:.0f} B"


def format_count(count: float) -> str:
    """Returns a number of parameters or tokens: `20.6 B`, `1.5 M`, `432`."""
    for scale, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= scale:
            return f"{format_number(count / scale, 3)} {unit}"
    return f"{count:.0f}"


def spans_text(numbers: Sequence[int]) -> str:
    """Formats numbers with a hyphen for each run of consecutive ones: `0-17, 24-41`."""
    runs = [
        [number for _, number in group]
        for _, group in groupby(enumerate(numbers), lambda item: item[1] - item[0])
    ]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def shortest(inside: float, unit: float, convert: Callable[[float], float]) -> float:
    """Returns the number with the fewest decimals that `convert` turns into exactly `inside`.

    A file that is read and written again thus keeps its text.
    """
    outside = inside / unit
    return next((short for short in _spellings(outside) if convert(short) == inside), outside)


def seconds_of(microseconds: float) -> float:
    """Converts microseconds to seconds."""
    return microseconds / US_PER_S


def microseconds_of(seconds: float) -> float:
    """Returns the shortest microseconds that `seconds_of` turns into exactly `seconds`."""
    return shortest(seconds, 1 / US_PER_S, seconds_of)


def _spellings(number: float) -> Iterator[float]:
    yield round(number)
    for decimals in range(1, 18):
        yield round(number, decimals)
    yield math.nextafter(number, math.inf)
    yield math.nextafter(number, -math.inf)
