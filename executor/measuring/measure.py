"""Measures one case on one device, in a process of its own: `measure`.

Every operator runs through the executor's own modules. Copies of its operands take turns
(executor/measuring/step_timing.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch

from parplan.executor.measuring import block_operations as blocks
from parplan.executor.measuring import layer_operations as layers
from parplan.executor.measuring import layout_costs as layouts
from parplan.executor.measuring import machine_figures as machine
from parplan.executor.measuring import products
from parplan.executor.measuring import update_operations as updates
from parplan.executor.measuring.footprints import footprint
from parplan.executor.measuring.operands import Maker, cache_bytes
from parplan.executor.measuring.products import Sizes
from parplan.executor.measuring.step_timing import ENOUGH_S, MOST_REPEATS, Rounds, measure_steps
from parplan.executor.measuring.trials import TimedPasses, Trial
from parplan.executor.tensors import DTYPES
from parplan.profiles.errors import ConfigError, unknown_name_error
from parplan.profiles.machines.measurements import Case, CaseFigures, Timing, UnsupportedCase
from parplan.profiles.models.spec import Precision
from parplan.profiles.profiler.gpus import gpu, is_gpu
from parplan.profiles.units import GIB

CACHES = 4  # bytes between two uses of a tensor, in last-level caches
MOST_HOST_BYTES = GIB
MOST_DEVICE_SHARE = 0.1
SEED = 0
BOTH = ("forward", "backward")
TIME = ("time",)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredWork:
    """The sizes and passes of a work, and its measurement: timed `parts` or a `figure`.

    sizes        names of its sizes
    passes       names of its passes
    figures      figures derived from the times
    on_host      True if it runs on the CPU for every device
    on_dtensors  True if it needs a process group
    """

    sizes: tuple[str, ...]
    passes: tuple[str, ...] = ()
    parts: Callable[[Sizes], tuple[TimedPasses, ...]] | None = None
    figure: Callable[[Sizes, torch.device], CaseFigures] | None = None
    figures: Callable[[Sizes, dict[str, Timing]], dict[str, float]] | None = None
    on_host: bool = False
    on_dtensors: bool = False


FLAGS = frozenset({"bias", "dropout", "gated", "rms", "rotary"})
BLOCK_SIZES = (
    "hidden",
    "heads",
    "kv_heads",
    "head_dim",
    "ffn",
    "gated",
    "rms",
    "rotary",
    "dropout",
    "batch",
    "seq",
)
WORKS: Mapping[str, MeasuredWork] = {
    "linear": MeasuredWork(
        sizes=("m", "n", "k", "bias"),
        passes=("forward", "input_gradient", "weight_gradient"),
        parts=products.linear,
    ),
    "attention": MeasuredWork(
        sizes=("batch", "heads", "kv_heads", "seq", "head_dim", "dropout"),
        passes=BOTH,
        parts=layers.attention,
    ),
    "batched": MeasuredWork(sizes=("batch", "m", "n", "k"), passes=BOTH, parts=products.batched),
    "softmax": MeasuredWork(sizes=("batch", "heads", "seq"), passes=BOTH, parts=layers.softmax),
    "dropout": MeasuredWork(sizes=("elements",), passes=BOTH, parts=layers.dropout),
    "layer_norm": MeasuredWork(sizes=("tokens", "hidden"), passes=BOTH, parts=layers.layer_norm),
    "rms_norm": MeasuredWork(sizes=("tokens", "hidden"), passes=BOTH, parts=layers.rms_norm),
    "gelu": MeasuredWork(sizes=("tokens", "width"), passes=BOTH, parts=layers.gelu),
    "swiglu": MeasuredWork(sizes=("tokens", "width"), passes=BOTH, parts=layers.swiglu),
    "rotary": MeasuredWork(
        sizes=("batch", "seq", "heads", "kv_heads", "head_dim"), passes=BOTH, parts=layers.rotary
    ),
    "positions": MeasuredWork(
        sizes=("batch", "seq", "hidden"), passes=BOTH, parts=layers.positions
    ),
    "dropped_positions": MeasuredWork(
        sizes=("batch", "seq", "hidden"), passes=BOTH, parts=layers.dropped_positions
    ),
    "residual": MeasuredWork(sizes=("tokens", "hidden"), passes=BOTH, parts=layers.residual),
    "dropped_residual": MeasuredWork(
        sizes=("tokens", "hidden"), passes=BOTH, parts=layers.dropped_residual
    ),
    "accumulation": MeasuredWork(sizes=("elements",), passes=TIME, parts=updates.accumulation),
    "bias_gradient": MeasuredWork(
        sizes=("tokens", "width"), passes=TIME, parts=products.bias_gradient
    ),
    "embedding": MeasuredWork(
        sizes=("tokens", "hidden", "vocab"), passes=BOTH, parts=layers.embedding
    ),
    "cross_entropy": MeasuredWork(
        sizes=("tokens", "vocab"), passes=BOTH, parts=layers.cross_entropy
    ),
    "adamw": MeasuredWork(
        sizes=("parameters",), passes=TIME, parts=updates.adamw, on_dtensors=True
    ),
    "gradient_norm": MeasuredWork(
        sizes=("parameters",), passes=TIME, parts=updates.gradient_norm, on_dtensors=True
    ),
    "block": MeasuredWork(sizes=BLOCK_SIZES, passes=BOTH, parts=blocks.block),
    "layouts": MeasuredWork(sizes=BLOCK_SIZES, figure=layouts.layouts),
    "device_copy": MeasuredWork(
        sizes=("bytes",), passes=TIME, parts=machine.device_copy, figures=machine.copied
    ),
    "transfer": MeasuredWork(sizes=("bytes",), figure=machine.transfer),
    "host_adam": MeasuredWork(
        sizes=("parameters",),
        passes=TIME,
        parts=updates.adamw,
        figures=machine.adam_rates,
        on_host=True,
        on_dtensors=True,
    ),
    "launch": MeasuredWork(sizes=(), figure=machine.launch),
    "allocator": MeasuredWork(sizes=(), figure=machine.allocator),
}


def measure(case: Case, device: str) -> CaseFigures:
    """Return times, bytes and figures of a case on a device ("cpu", "cuda:0").

    Raises ConfigError (unknown work, sizes, passes or precision), UnsupportedCase (the device, or
    torch on it, cannot run it), and torch.OutOfMemoryError or MemoryError (it does not fit).
    """
    work, precision = _checked(case)
    place = torch.device("cpu" if work.on_host else device)
    torch.set_num_threads(1)  # as torchrun gives every rank
    torch.manual_seed(SEED)
    if is_gpu(place):
        gpu(place).set_device(place)
    try:
        with updates.world_of_one(place) if work.on_dtensors else nullcontext():
            measured = _measured(case, work, place, DTYPES[precision])
    except NotImplementedError as error:
        raise UnsupportedCase(str(error).splitlines()[0]) from error
    except RuntimeError as error:
        if "can't allocate memory" not in str(error):  # torch's text if the host has no memory left
            raise
        raise MemoryError(str(error).splitlines()[0]) from error
    return replace(measured, clock_mhz=machine.clock_mhz(place))


def _checked(case: Case) -> tuple[MeasuredWork, Precision]:
    for what, name, known in (
        ("work", case.work, WORKS),
        ("precision", case.precision, list(Precision)),
    ):
        if name not in known:
            raise unknown_name_error(what, name, known, where=f"case {case.key}")
    work, sizes = WORKS[case.work], dict(case.sizes)
    if set(sizes) != set(work.sizes) or len(sizes) != len(case.sizes):
        raise ConfigError(
            f"case {case.key}: found the sizes {list(sizes)}, needed {list(work.sizes)}",
            hint="make the cases again",
        )
    for name, size in sizes.items():
        if size < (0 if name in FLAGS else 1) or (name in FLAGS and size > 1):
            legal = "0 or 1" if name in FLAGS else "at least 1"
            raise ConfigError(f"case {case.key}: {name} is {size}, it must be {legal}")
    unknown = {each.name for each in case.passes} - set(work.passes)
    if unknown:
        raise ConfigError(
            f"case {case.key}: found the passes {sorted(unknown)}, needed {list(work.passes)}",
            hint="make the cases again",
        )
    return work, Precision(case.precision)


def _measured(
    case: Case, work: MeasuredWork, device: torch.device, dtype: torch.dtype
) -> CaseFigures:
    sizes = dict(case.sizes)
    if work.parts is None:
        assert work.figure is not None
        return work.figure(sizes, device)
    passes = {each.name for each in case.passes}
    if work.figures is not None:
        passes = set(work.passes)
    times: dict[str, Timing] = {}
    saved: list[int] = []
    workspaces = []
    for part in work.parts(sizes):
        steps = {step: name for step, name in part.passes.items() if name in passes}
        if not steps:
            continue
        timings, saved_bytes, workspace = _timed(part, tuple(steps), device, dtype)
        times |= {
            steps[step]: replace(timing, median_us=timing.median_us / part.times)
            for step, timing in timings.items()
        }
        saved.append(saved_bytes)
        workspaces.append(workspace)
    figures = work.figures(sizes, times) if work.figures is not None else {}
    return CaseFigures(
        times=times,
        saved_bytes=max(saved, default=None),
        workspace_bytes=max(workspaces, default=None),
        figures=figures,
    )


def _timed(
    part: TimedPasses, timed: Sequence[str], device: torch.device, dtype: torch.dtype
) -> tuple[Mapping[str, Timing], int, int]:
    """Return times of the `timed` steps, saved bytes and workspace.

    Steps run on as many copies of the operands as keep caches cold.
    """
    maker = Maker(device, dtype)
    trial = part.make(maker)
    steps = trial.steps[: max(trial.steps.index(step) for step in timed) + 1]
    saved_bytes, workspace = footprint(trial, steps, device, maker.parameters)
    copy_bytes = maker.num_bytes + saved_bytes + sum(result.nbytes for result in trial.results)
    rounds = Rounds([trial], steps, device)
    slowest_s = max(lap for laps in rounds.run().values() for lap in laps)
    trials = [trial, *_copies(part, _num_copies(copy_bytes, slowest_s, device) - 1, device, dtype)]
    return measure_steps(Rounds(trials, steps, device), timed), saved_bytes, workspace


def _copies(part: TimedPasses, count: int, device: torch.device, dtype: torch.dtype) -> list[Trial]:
    return [part.make(Maker(device, dtype)) for _ in range(count)]


def _num_copies(copy_bytes: int, slowest_s: float, device: torch.device) -> int:
    """Return the number of copies that exceed the last-level cache some times.

    It is smaller if memory, or the time for all copies, does not allow so many.
    """
    most_bytes = MOST_HOST_BYTES
    if is_gpu(device):
        most_bytes = int(MOST_DEVICE_SHARE * gpu(device).get_device_properties(device).total_memory)
    cold = -(-CACHES * cache_bytes(device) // max(1, copy_bytes))
    return max(
        1, min(cold, most_bytes // max(1, copy_bytes), MOST_REPEATS, int(ENOUGH_S / slowest_s))
    )
