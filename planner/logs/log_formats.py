"""The lines that launchers print of their steps: one row a launcher, with the release read.

Named figures of a pattern are quantities in the unit of their name:

    iteration      number of the step
    total          number of the last step, by which bars of evaluations are known
    s, ms          time of a step
    s_per_it, it_per_s   the same of a progress bar
    samples_per_s  sequences of all GPUs in a second
    tokens_per_s   tokens of one GPU in a second
    batch          sequences of a step
    allocated_..., reserved_...   most memory of a GPU, in bytes, mib, gib or gb (10^9 bytes)
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from parplan.planner.logs.log_fields import FIGURE, LogFigure, Part, Pattern

_COUNT = "[0-9]{1,12}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFormat:
    """The lines of one launcher.

    framework   the launcher's name in the rows of a steps table
    steps       patterns of the line of a step
    starts      texts of a line that a run prints once, before its first step
    memory      patterns of lines with memory, which may be those of steps
    source      repository and release of which the lines were read
    """

    name: str
    framework: str
    steps: tuple[Pattern, ...]
    starts: tuple[str, ...]
    memory: tuple[Pattern, ...] = ()
    source: str


def _line(*parts: Part, mark: str = "") -> Pattern:
    """Returns a kind of line, whose mark is the longest of the words that it must have."""
    words = [
        part.words[0]
        for part in parts
        if isinstance(part, LogFigure) and not part.may_lack and len(part.words) == 1
    ]
    return Pattern(mark or max(words, key=len), parts)


def _after(*words: str, name: str = "", ends: str = "", never: str = "") -> LogFigure:
    return LogFigure(name=name, words=words, ends=ends, never=never)


def _perhaps(*words: str, name: str, ends: str = "") -> LogFigure:
    return LogFigure(name=name, words=words, ends=ends, may_lack=True)


MEGATRON = LogFormat(
    name="megatron",
    framework="Megatron-LM",
    # training_log; older releases have neither the time of day nor the throughput
    steps=(
        _line(
            re.compile(rf"iteration {{1,20}}(?P<iteration>{_COUNT})/ {{0,20}}{_COUNT} \|"),
            _perhaps("global batch size:", name="batch", ends=" |"),
            _after("elapsed time per iteration (ms):", name="ms", ends=" |"),
        ),
    ),
    starts=(" arguments ------",),
    # report_memory of Megatron-LM, and of Megatron-Bridge, whose GB are of 10^9 bytes
    memory=(
        _line(
            _after("memory (MB) |"),
            _after(" max allocated:", name="allocated_mib", ends=" |"),
            _after(" max reserved:", name="reserved_mib"),
        ),
        _line(
            _after("memory (GB) |"),
            _after("mem-max-allocated-gigabytes:", name="allocated_gb"),
            _after("mem-max-reserved-gigabytes:", name="reserved_gb"),
        ),
    ),
    source="NVIDIA/Megatron-LM at d98e8a64dd, megatron/training/training.py and utils",
)
_STEP = "step:"
_VALIDATION = "validate "
_TITAN_MEMORY = _after("memory:", name="reserved_gib", ends="GiB")
TORCHTITAN = LogFormat(
    name="torchtitan",
    framework="torchtitan",
    # MetricsProcessor.log; `wps` was the name before 2025
    steps=(
        _line(
            _after(_STEP, name="iteration", ends=" ", never=_VALIDATION),
            _after("loss: "),
            _TITAN_MEMORY,
            _after("tps:", "wps:", name="tokens_per_s"),
        ),
    ),
    starts=("Training starts at step",),
    memory=(_line(_after(_STEP, name="iteration", ends=" ", never=_VALIDATION), _TITAN_MEMORY),),
    source="torchtitan 0.2.2 and 0.3.0, torchtitan/components/metrics.py",
)
DEEPSPEED = LogFormat(
    name="deepspeed",
    framework="DeepSpeed",
    # ThroughputTimer, and train_batch of the pipeline engine
    steps=(
        _line(
            _after("global_step=", name="iteration", ends=", RunningAvgSamplesPerSec="),
            _after("CurrSamplesPerSec=", name="samples_per_s"),
        ),
        _line(
            _after("steps:", name="iteration", ends=" loss: "),
            _after("iter time (s):", name="s"),
        ),
    ),
    starts=("DeepSpeedEngine configuration", "DeepSpeed info: version"),
    # ThroughputTimer, and see_memory_usage: its GB are of 1024^3 bytes
    memory=(
        _line(_after("MaxMemAllocated=", name="allocated_gib", ends="GB")),
        _line(
            _after("Max_MA", name="allocated_gib", ends=" GB"),
            _after("Max_CA", name="reserved_gib", ends=" GB"),
        ),
    ),
    source="DeepSpeed 0.19.6, deepspeed/utils/timer.py and runtime/pipe/engine.py",
)
_BAR = rf"(?P<iteration>{_COUNT})/{_COUNT} \["
NEMO = LogFormat(
    name="nemo",
    framework="NeMo",
    # ProgressPrinter counts from 0; MegatronProgressBar ends with the metrics in brackets
    steps=(
        _line(
            _after("Training epoch "),
            re.compile(rf"iteration (?P<iteration>{_COUNT})/{_COUNT} \|"),
            _perhaps("global_batch_size:", name="batch"),
            _after("train_step_timing in s:", name="s"),
        ),
        _line(
            _after("Epoch "),
            re.compile(_BAR),
            _after("train_step_timing in s=", name="s"),
        ),
    ),
    starts=("LOCAL_RANK: 0 - CUDA_VISIBLE_DEVICES",),
    # MemoryMonitor, in bytes
    memory=(
        _line(
            _after("Training epoch "),
            _perhaps("max_memory_allocated:", name="allocated_bytes"),
            _perhaps("max_memory_reserved:", name="reserved_bytes"),
        ),
        _line(
            _after("Epoch "),
            _perhaps("max_memory_allocated=", name="allocated_bytes"),
            _perhaps("max_memory_reserved=", name="reserved_bytes"),
        ),
    ),
    source="NVIDIA/NeMo at 8cfedd7203, nemo/lightning/pytorch/callbacks/progress_printer.py",
)
TRAINER = LogFormat(
    name="trainer",
    framework="Hugging Face Trainer",
    # the progress bar of ProgressCallback, whose rate tqdm smooths over some steps
    steps=(
        _line(
            re.compile(
                rf"[0-9]{{1,3}}%\|[^|]{{0,400}}\| {{0,9}}"
                rf"(?P<iteration>{_COUNT})/(?P<total>{_COUNT}) \["
                rf"[0-9:]{{1,20}}<[0-9:?]{{1,20}}, {{1,9}}"
                rf"(?:(?P<s_per_it>{FIGURE})s/it|(?P<it_per_s>{FIGURE})it/s)"
            ),
            mark="%|",
        ),
    ),
    starts=("***** Running training *****",),
    source="transformers 5.23.0, src/transformers/trainer_callback.py and tqdm",
)
FORMATS: tuple[LogFormat, ...] = (MEGATRON, TORCHTITAN, DEEPSPEED, NEMO, TRAINER)
