"""A Chrome trace for Perfetto: one process a rank, predicted above measured time.

The trace event format is
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU (complete events, ph
X, times in microseconds; names of processes and threads as metadata events, ph M). Both timelines
start with the step.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from parplan.planner.runs.run_file import WHOLE_RANK, WorkSpan
from parplan.profiles.units import US_PER_S


def trace_document(ranks: Mapping[str, Mapping[str, Sequence[WorkSpan]]]) -> dict[str, Any]:
    """Returns the trace as JSON values; `ranks` maps a process name to spans by thread name."""
    metadata: list[dict[str, Any]] = []
    events: list[dict[str, Any]] = []
    for process, (name, threads) in enumerate(ranks.items()):
        metadata += [
            _named("process_name", process, 0, name),
            _sorted("process_sort_index", process, 0, process),
        ]
        for thread, (title, spans) in enumerate(threads.items()):
            metadata += [
                _named("thread_name", process, thread, title),
                _sorted("thread_sort_index", process, thread, thread),
            ]
            events += _events(spans, process, thread)
    return {
        "traceEvents": [*metadata, *sorted(events, key=lambda event: event["ts"])],
        "displayTimeUnit": "ms",
    }


def trace_json(ranks: Mapping[str, Mapping[str, Sequence[WorkSpan]]]) -> str:
    """Returns the text of the trace file."""
    return json.dumps(trace_document(ranks)) + "\n"


def _events(spans: Sequence[WorkSpan], process: int, thread: int) -> Iterator[dict[str, Any]]:
    for span in spans:
        place = (
            {}
            if span.stage == WHOLE_RANK
            else {"stage": span.stage, "micro_batch": span.micro_batch}
        )
        yield {
            "name": span.name,
            "cat": span.work,
            "ph": "X",
            "ts": span.start_s * US_PER_S,
            "dur": span.seconds * US_PER_S,
            "pid": process,
            "tid": thread,
            "args": {**place, "seconds": span.seconds},
        }


def _named(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}


def _sorted(kind: str, process: int, thread: int, index: int) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"sort_index": index}}
