"""The lines that launchers print of their steps: one row a launcher, with the release read.

Named groups of a pattern are quantities in the unit of their name:

    iteration      number of the step
    total          number of the last step, by which bars of evaluations are known
    s, ms          time of a step
    s_per_it, it_per_s   the same of a progress bar
    samples_per_s  sequences of all GPUs in a second
    tokens_per_s   tokens of one GPU in a second
    batch          sequences of a step
    allocated_..., reserved_...   most memory of a GPU, in mib or gib
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_F = r"[0-9][0-9,]*(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFormat:
    """The lines of one launcher.

    framework   the launcher's name in the rows of a steps table
    steps       patterns of the line of a step
    starts      pattern of a line that a run prints once, before its first step
    memory      patterns of lines with memory, which may be those of steps
    partly      the memory is of some ranks alone
    source      repository and release of which the lines were read
    """

    name: str
    framework: str
    steps: tuple[re.Pattern[str], ...]
    starts: re.Pattern[str]
    memory: tuple[re.Pattern[str], ...] = ()
    source: str


MEGATRON = LogFormat(
    name="megatron",
    framework="Megatron-LM",
    # training_log; older releases have neither the time of day nor the throughput
    steps=(
        re.compile(
            rf"iteration +(?P<iteration>\d+)/ *\d+ \|.*"
            rf"elapsed time per iteration \(ms\): (?P<ms>{_F}) \|"
            rf"(?:.*global batch size: +(?P<batch>\d+) \|)?"
        ),
    ),
    starts=re.compile(r"-{6,} arguments -{6,}"),
    # report_memory
    memory=(
        re.compile(
            rf"memory \(MB\) \|.*max allocated: (?P<allocated_mib>{_F}) \|.*"
            rf"max reserved: (?P<reserved_mib>{_F})"
        ),
    ),
    source="NVIDIA/Megatron-LM at d98e8a64dd, megatron/training/training.py and utils",
)
TORCHTITAN = LogFormat(
    name="torchtitan",
    framework="torchtitan",
    # MetricsProcessor.log; `wps` was the name before 2025
    steps=(
        re.compile(
            rf"(?<!validate )step: +(?P<iteration>\d+) +loss: .*memory: +(?P<reserved_gib>{_F})GiB"
            rf".*(?:tps|wps): (?P<tokens_per_s>{_F})"
        ),
    ),
    starts=re.compile(r"Training starts at step"),
    memory=(re.compile(rf"(?<!validate )step: .*memory: +(?P<reserved_gib>{_F})GiB"),),
    source="torchtitan 0.2.2 and 0.3.0, torchtitan/components/metrics.py",
)
DEEPSPEED = LogFormat(
    name="deepspeed",
    framework="DeepSpeed",
    # ThroughputTimer, and train_batch of the pipeline engine
    steps=(
        re.compile(
            rf"global_step=(?P<iteration>\d+), RunningAvgSamplesPerSec=.*"
            rf"CurrSamplesPerSec=(?P<samples_per_s>{_F})"
        ),
        re.compile(rf"steps: (?P<iteration>\d+) loss: .*iter time \(s\): (?P<s>{_F})"),
    ),
    starts=re.compile(r"DeepSpeedEngine configuration|DeepSpeed info: version"),
    # ThroughputTimer, and see_memory_usage: its GB are of 1024^3 bytes
    memory=(
        re.compile(rf"MaxMemAllocated=(?P<allocated_gib>{_F})GB"),
        re.compile(rf"Max_MA (?P<allocated_gib>{_F}) GB.*Max_CA (?P<reserved_gib>{_F}) GB"),
    ),
    source="DeepSpeed 0.19.6, deepspeed/utils/timer.py and runtime/pipe/engine.py",
)
NEMO = LogFormat(
    name="nemo",
    framework="NeMo",
    # ProgressPrinter counts from 0; MegatronProgressBar ends with the metrics in brackets
    steps=(
        re.compile(
            rf"Training epoch \d+, iteration (?P<iteration>\d+)/\d+ \|"
            rf"(?:.*global_batch_size: (?P<batch>\d+))?.*train_step_timing in s: (?P<s>{_F})"
        ),
        re.compile(rf"Epoch \d+: .*?(?P<iteration>\d+)/\d+ \[.*train_step_timing in s=(?P<s>{_F})"),
    ),
    starts=re.compile(r"LOCAL_RANK: 0 - CUDA_VISIBLE_DEVICES"),
    source="NVIDIA/NeMo at 8cfedd7203, nemo/lightning/pytorch/callbacks/progress_printer.py",
)
TRAINER = LogFormat(
    name="trainer",
    framework="Hugging Face Trainer",
    # the progress bar of ProgressCallback, whose rate tqdm smooths over some steps
    steps=(
        re.compile(
            rf"\d+%\|[^|]*\| *(?P<iteration>\d+)/(?P<total>\d+) \[[\d:]+<[\d:?]+, +"
            rf"(?:(?P<s_per_it>{_F})s/it|(?P<it_per_s>{_F})it/s)"
        ),
    ),
    starts=re.compile(r"\*{5} Running training \*{5}"),
    source="transformers 5.23.0, src/transformers/trainer_callback.py and tqdm",
)
FORMATS: tuple[LogFormat, ...] = (MEGATRON, TORCHTITAN, DEEPSPEED, NEMO, TRAINER)
