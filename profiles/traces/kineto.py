"""Reads the Chrome JSON of torch.profiler (Kineto): one file for each rank.

A kernel belongs to the phase and the step in which the host launched it: `correlation` ties it to
its launch, and the launch lies inside `autograd::engine::evaluate_function`, `Optimizer.step#` or
neither, and inside a `ProfilerStep#`. The arguments of NCCL's kernels say collective, elements,
type and group. In the trace of a host that is the device, the operators of torch are the work, and
gloo's annotations the collectives. Source of the format: the files that torch 1.12 to 2.13 write,
and pytorch/kineto, libkineto/src/output_json.cpp.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from parplan.profiles.documents.numbers import MAX_DIGITS, real, real_of, whole_of
from parplan.profiles.documents.ranges import RANKS, Range
from parplan.profiles.errors import ConfigError, shortened
from parplan.profiles.traces.host_phases import HostPhases, HostThread, outermost
from parplan.profiles.traces.trace_record import (
    MOMENT,
    Interval,
    Phase,
    RankTrace,
    TracedCollective,
    TracedWork,
    WorkClass,
    steps_of,
)
from parplan.profiles.traces.work_classes import class_of, operation_of

TOOL = "kineto"
_HINT = "give the file that export_chrome_trace or tensorboard_trace_handler wrote"
_EVENTS = re.compile(r'"traceEvents"\s*:\s*\[')
_SPACE = re.compile(r"[\s,]*")
_US = 1e-6
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCH = ("runtime", "driver")  # cuda_runtime, xpu_runtime, cuda_driver, ..
_MARK = ("user_annotation", "cpu_op")
_BACKWARD = "autograd::engine::evaluate_function"
_UPDATE = "Optimizer.step#"
_STEP = "ProfilerStep#"
_GLOO = "gloo:"
_OPERATOR = re.compile(r"[a-z]\w*::")
_WRAPPERS = ("autograd::", "c10d::", "torch::autograd")
_FIRST_YEAR = 2015
_MICROSECONDS = Range(0, 1e18)  # no clock is so late
MAX_EVENTS = 5_000_000  # of a GiB of text; each takes some microseconds
_ELEMENT_BYTES = {  # torch's names of types
    **dict.fromkeys(("double", "long", "int64", "float64"), 8),
    **dict.fromkeys(("float", "int", "int32", "float32"), 4),
    **dict.fromkeys(("half", "bfloat16", "short", "int16", "float16"), 2),
    **dict.fromkeys(("byte", "char", "bool", "uint8", "int8"), 1),
}


@dataclass(slots=True)
class _TraceEvents:
    """The events of a file that say anything about a step."""

    device: list[Mapping[str, Any]] = field(default_factory=list)
    launches: dict[Any, tuple[Any, float]] = field(default_factory=dict)
    threads: defaultdict[Hashable, HostThread] = field(
        default_factory=lambda: defaultdict(HostThread)
    )
    steps: list[Interval] = field(default_factory=list)
    operators: list[tuple[Any, float, float, str]] = field(default_factory=list)

    def add(self, event: Mapping[str, Any], where: str) -> None:
        """Sorts one event in. Raises ConfigError for one without its times."""
        category = event.get("cat")
        if event.get("ph") != "X" or not isinstance(category, str):
            return
        category = category.lower()
        if category in _ON_DEVICE:
            _interval_us(event, where)
            self.device.append(event)
        elif category.endswith(_LAUNCH):
            correlation = _identity(_arguments(event).get("correlation"))
            self.launches[correlation] = (
                _identity(event.get("tid")),
                _interval_us(event, where)[0],
            )
        elif category in _MARK:
            self._add_host(event, where)

    def _add_host(self, event: Mapping[str, Any], where: str) -> None:
        name, thread = str(event.get("name", "")), _identity(event.get("tid"))
        start, end = _interval_us(event, where)
        if name.startswith(_STEP):
            self.steps.append((start, end))
        elif name.startswith(_UPDATE):
            self.threads[thread].update.append((start, end))
        else:
            if name.startswith(_BACKWARD):
                self.threads[thread].backward.append((start, end))
            self.operators.append((thread, start, end, name))


def read_kineto(text: str, where: str, fingerprint: str, file_date: str) -> RankTrace:
    """Returns the steps of one rank.

    file_date   the date that counts where the trace has no clock of the calendar
    Raises ConfigError: not JSON, no events, events without times, no step.
    """
    events, header = _parse(text, where)
    phases = HostPhases(events.threads)
    on_host = not events.device
    work = _host_work(events, phases) if on_host else _device_work(events, phases, header)
    distributed = _mapping(header.get("distributedInfo"))
    marked = [(start * _US, end * _US) for start, end in outermost(events.steps)]
    return RankTrace(
        file=where,
        tool=TOOL,
        date=_date(events, header) or file_date,
        fingerprint=fingerprint,
        device="cpu" if on_host else _device_name(header, where),
        rank=_whole(distributed.get("rank")),
        world_size=_whole(distributed.get("world_size")),
        steps=steps_of(work, marked, where, host_is_device=on_host),
    )


def _parse(text: str, where: str) -> tuple[_TraceEvents, Mapping[str, Any]]:
    """Returns the events, decoded one by one, and all other keys of the file."""
    found = _EVENTS.search(text)
    if found is None:
        raise ConfigError(f"{where}: traceEvents is missing", hint=_HINT)
    events = _TraceEvents()
    try:
        end = _decode_events(text, found.end(), events, where)
        header = json.loads(text[: found.end()] + text[end:], strict=False)
    except json.JSONDecodeError as error:
        line = text.count("\n", 0, error.pos) + 1
        raise ConfigError(f"{where}:{line}: not JSON: {error.msg}", hint=_HINT) from None
    except ValueError:  # of int, for thousands of digits
        raise ConfigError(
            f"{where}: an integer has more than {MAX_DIGITS} digits", hint=_HINT
        ) from None
    except RecursionError:
        raise ConfigError(f"{where}: nested too deep", hint=_HINT) from None
    return events, _mapping(header)


def _decode_events(text: str, at: int, events: _TraceEvents, where: str) -> int:
    """Adds the events of the list that begins at `at`; returns the place of its end."""
    decoder = json.JSONDecoder(strict=False)
    for _ in range(MAX_EVENTS):
        at = _end_of_space(text, at)
        if text[at : at + 1] == "]":
            return at
        event, at = decoder.raw_decode(text, at)
        if isinstance(event, dict):
            events.add(event, where)
    raise ConfigError(f"{where}: more than {MAX_EVENTS:,} events", hint="record fewer steps")


def _end_of_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found else at


def _interval_us(event: Mapping[str, Any], where: str) -> Interval:
    start = _microseconds(event, "ts", event.get("ts"), where)
    return start, start + _microseconds(event, "dur", event.get("dur", 0), where)


def _microseconds(event: Mapping[str, Any], name: str, value: Any, where: str) -> float:
    number = real_of(value, _MICROSECONDS)
    if number is not None:
        return number
    what = f"{name} of the event {shortened(str(event.get('name')))!r} in microseconds"
    return real(value, what, where, _MICROSECONDS, _HINT)


def _device_work(
    events: _TraceEvents, phases: HostPhases, header: Mapping[str, Any]
) -> Iterator[TracedWork]:
    groups = _group_ranks(header)
    for event in events.device:
        start, end = float(event["ts"]), float(event["ts"]) + float(event.get("dur", 0))
        name, arguments = str(event.get("name", "")), _arguments(event)
        thread, launched = events.launches.get(
            _identity(arguments.get("correlation")), (None, start)
        )
        kind = class_of(name)
        phase = phases.at(thread, launched) if thread is not None else None
        if phase is None and kind is WorkClass.OPTIMIZER:
            phase = Phase.OPTIMIZER
        is_collective = kind is WorkClass.COLLECTIVES
        yield TracedWork(
            start_s=start * _US,
            end_s=end * _US,
            launched_s=launched * _US,
            kind=kind,
            phase=phase,
            collective=_collective(name, arguments, groups) if is_collective else None,
        )


def _host_work(events: _TraceEvents, phases: HostPhases) -> Iterator[TracedWork]:
    """Yields the outermost operators of torch on a host that is the device, and gloo's work."""
    by_thread: defaultdict[Any, list[tuple[float, float, str]]] = defaultdict(list)
    for thread, start, end, name in events.operators:
        if name.startswith(_GLOO) or (_OPERATOR.match(name) and not name.startswith(_WRAPPERS)):
            by_thread[thread].append((start, end, name))
    for thread, operators in by_thread.items():
        covered = 0.0
        for start, end, name in sorted(operators, key=lambda each: (each[0], -each[1])):
            if start >= covered:
                covered = end
                yield _operator(start, end, thread, phases, name)


def _operator(start: float, end: float, thread: Any, phases: HostPhases, name: str) -> TracedWork:
    kind = class_of(name)
    is_collective = kind is WorkClass.COLLECTIVES
    return TracedWork(
        start_s=start * _US,
        end_s=end * _US,
        launched_s=start * _US,
        kind=kind,
        phase=phases.at(thread, start),
        collective=TracedCollective(operation=operation_of(name)) if is_collective else None,
    )


def _collective(
    name: str, arguments: Mapping[str, Any], groups: Mapping[str, tuple[int, ...]]
) -> TracedCollective:
    group = str(arguments.get("Process Group Name", ""))
    elements = [_whole(arguments.get(key)) or 0 for key in ("In msg nelems", "Out msg nelems")]
    type_bytes = _bytes_of(str(arguments.get("dtype", "")))
    ranks = _ranks(arguments.get("Process Group Ranks")) or groups.get(group)
    return TracedCollective(
        operation=operation_of(str(arguments.get("Collective name", name))),
        num_bytes=max(elements) * type_bytes if type_bytes and max(elements) else None,
        group_size=_whole(arguments.get("Group size")) or (len(ranks) if ranks else None),
        ranks=ranks,
        group=str(arguments.get("Process Group Description", "")) or group,
    )


def _bytes_of(type_name: str) -> int | None:
    name = type_name.lower()
    return 1 if name.startswith("float8") else _ELEMENT_BYTES.get(name)


def _ranks(text: Any) -> tuple[int, ...] | None:
    """Returns the ranks of `[0, 1, 2]`, None where torch shortened the list."""
    if not isinstance(text, str) or not (text.startswith("[") and text.endswith("]")):
        return None
    return _all_ranks([each.strip() for each in text[1:-1].split(",")])


def _all_ranks(values: Sequence[object]) -> tuple[int, ...] | None:
    """Returns ranks, None where one of the values is none."""
    ranks = [whole_of(each, RANKS) for each in values]
    return None if None in ranks else tuple(rank for rank in ranks if rank is not None)


def _group_ranks(header: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Returns the ranks of the groups that the file lists."""
    groups = _mapping(header.get("distributedInfo")).get("pg_config")
    return {
        str(group["pg_name"]): ranks
        for group in (groups if isinstance(groups, list) else ())
        if isinstance(group, dict)
        and "pg_name" in group
        and isinstance(group.get("ranks"), list)
        and (ranks := _all_ranks(group["ranks"])) is not None
    }


def _device_name(header: Mapping[str, Any], where: str) -> str:
    devices = header.get("deviceProperties")
    if not isinstance(devices, list) or not devices or "name" not in _mapping(devices[0]):
        raise ConfigError(
            f"{where}: deviceProperties is missing, which names the device", hint=_HINT
        )
    return str(devices[0]["name"])


def _date(events: _TraceEvents, header: Mapping[str, Any]) -> str:
    """Returns the day of the first event, empty where the clock starts at another moment."""
    first = [float(event["ts"]) for event in events.device[:1]] or [
        start for _, start, _, _ in events.operators[:1]
    ]
    base_ns = real_of(header.get("baseTimeNanoseconds", 0), MOMENT)
    if not first or base_ns is None:
        return ""
    seconds = base_ns * 1e-9 + first[0] * _US
    if not 0 <= seconds < 1e11:
        return ""
    day = datetime.fromtimestamp(seconds, UTC)
    return day.date().isoformat() if day.year >= _FIRST_YEAR else ""


def _arguments(event: Mapping[str, Any]) -> Mapping[str, Any]:
    return _mapping(event.get("args"))


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _identity(value: Any) -> int | str | None:
    """Returns the number or name of a thread or a launch, None for all else."""
    return value if isinstance(value, int | str) else None


def _whole(value: Any) -> int | None:
    return None if isinstance(value, str) else whole_of(value)
