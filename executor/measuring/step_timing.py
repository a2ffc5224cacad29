"""Seconds of the steps of trials.

In each round every step runs on all copies of the operands. Caches are then as cold as in a
training step, where a whole model lies between two uses of a weight, and the rest of a forward pass
between saving a tensor and using it. On a GPU the device is kept busy until the host has launched
the round, so that the events around a step time its kernels and not the host's launches; on a CPU
the host is the device.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Mapping, Sequence

import torch

from parplan.executor.measuring.trials import Trial
from parplan.profiles.machines.measurements import Timing
from parplan.profiles.profiler.gpus import gpu, is_gpu
from parplan.profiles.units import US_PER_S

ENOUGH_S = 0.3  # seconds of measurement of one pass
MOST_REPEATS = 50
LEAST_REPEATS = 5
LEAST_SLOW_REPEATS = 3
SLOW_S = 1.0
LEAST_WARM_UP = 2
MOST_WARM_UP = 6
ENTRY_REPEATS = 100  # of autograd's engine without work, about 10 us each
CLOSE = 0.1  # largest relative difference of two repeats in a row on a warm device
# Trials launched ahead of the device: a queue holds about a thousand kernels, and the host waits
# if it is full.
MOST_LAUNCHED = 16
SPIN_MARGIN = 1.2  # over the last launch time
SPIN_HZ = 2e9  # at least the clock that torch.cuda._sleep counts
MOST_SPIN_S = 0.5

Laps = dict[str, list[float]]


class Rounds:
    """Rounds over trials on one device.

    steps       the steps that run: the first ones of a trial, in order
    launched_s  seconds of the host to launch a trial's step the last time
    """

    def __init__(self, trials: Sequence[Trial], steps: Sequence[str], device: torch.device) -> None:
        self.trials = trials
        self.steps = steps
        self.device = device
        self.launched_s = dict.fromkeys(steps, 0.0)

    def run(self) -> Laps:
        """Return the seconds of each step on each trial."""
        collects = gc.isenabled()
        gc.disable()
        try:
            timed = self._on_gpu if is_gpu(self.device) else self._on_host
            return {step: timed(step) for step in self.steps}
        finally:
            if collects:
                gc.enable()

    def _on_host(self, step: str) -> list[float]:
        laps = []
        for trial in self.trials:
            trial.before(step)
            started = time.perf_counter()
            trial.run(step)
            laps.append(time.perf_counter() - started)
            trial.release(step)
        return laps

    def _on_gpu(self, step: str) -> list[float]:
        groups = (
            self.trials[i : i + MOST_LAUNCHED] for i in range(0, len(self.trials), MOST_LAUNCHED)
        )
        return [lap for group in groups for lap in self._launched(step, group)]

    def _launched(self, step: str, trials: Sequence[Trial]) -> list[float]:
        marks = [[gpu(self.device).Event(enable_timing=True) for _ in range(2)] for _ in trials]
        gpu(self.device).synchronize(self.device)
        gpu(self.device)._sleep(
            int(min(MOST_SPIN_S, SPIN_MARGIN * len(trials) * self.launched_s[step]) * SPIN_HZ)
        )
        started = time.perf_counter()
        for trial, (start, end) in zip(trials, marks, strict=True):
            trial.before(step)
            start.record()
            trial.run(step)
            end.record()
            trial.release(step)
        self.launched_s[step] = (time.perf_counter() - started) / len(trials)
        gpu(self.device).synchronize(self.device)
        return [start.elapsed_time(end) / 1000 for start, end in marks]


def measure_steps(rounds: Rounds, timed: Sequence[str]) -> Mapping[str, Timing]:
    """Return median and spread of the `timed` steps, after a warm-up."""
    _warm_up(rounds)
    entry_s = engine_entry_s() if rounds.device.type == "cpu" else 0.0
    laps: Laps = {step: [] for step in rounds.steps}
    while not all(_enough(laps[step]) for step in timed):
        for step, seconds in rounds.run().items():
            laps[step] += [lap - entry_s for lap in seconds] if step == "backward" else seconds
    return {step: timing(laps[step]) for step in timed}


def engine_entry_s() -> float:
    """Least seconds of autograd's engine without work.

    A training step pays them once for the backward passes of all its operators.
    """
    leaf, gradient = torch.zeros((), requires_grad=True), torch.zeros(())
    laps = []
    for _ in range(ENTRY_REPEATS):
        started = time.perf_counter()
        torch.autograd.grad(leaf, (leaf,), gradient)
        laps.append(time.perf_counter() - started)
    return min(laps)


def timing(laps: Sequence[float]) -> Timing:
    """Return the timing of `laps` in seconds."""
    median_s = statistics.median(laps)
    low, _, high = statistics.quantiles(laps, n=4, method="inclusive")
    return Timing(
        median_us=median_s * US_PER_S, spread=(high - low) / 2 / median_s, repeats=len(laps)
    )


def _warm_up(rounds: Rounds) -> None:
    """Run rounds until two repeats in a row are close.

    At least one round runs, since the first use of a copy allocates memory.
    """
    seen: Laps = {step: [] for step in rounds.steps}
    while True:
        for step, laps in rounds.run().items():
            seen[step] += laps
        repeats = len(seen[rounds.steps[0]])
        if repeats >= MOST_WARM_UP or (
            repeats >= LEAST_WARM_UP and all(_close(*laps[-2:]) for laps in seen.values())
        ):
            return


def _close(a: float, b: float) -> bool:
    return abs(a - b) <= CLOSE * max(a, b)


def _enough(laps: Sequence[float]) -> bool:
    least = LEAST_SLOW_REPEATS if laps and min(laps) >= SLOW_S else LEAST_REPEATS
    return len(laps) >= MOST_REPEATS or (len(laps) >= least and sum(laps) >= ENOUGH_S)
