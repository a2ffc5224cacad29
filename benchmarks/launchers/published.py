"""Published configurations of launchers, read without editing, beside their measured steps.

    python -m benchmarks.launchers.published REPOSITORIES
    python -m benchmarks.launchers.published REPOSITORIES --steps steps.csv --markdown

REPOSITORIES is a folder with a checkout of each repository of `PUBLISHED`, by its name. Each
configuration is read as `plan read` reads it, on the machine that its measurement names, or on the
one that its documentation names. `--steps` is a table of published steps as `plan validate --steps`
takes it: the measured step stands beside the predicted one, and whether it is inside the band. A
file that is not read is listed with the reason.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import click
from rich.console import Console

from parplan.commands.launcher_plans import launcher_file, launcher_plan
from parplan.commands.options.target_options import TargetOptions
from parplan.profiles.errors import PlannerError
from parplan.report.text import print_table, say

MEGATRON = "Megatron-LM"
BRIDGE = "Megatron-Bridge"
NEMO = "NeMo-Framework-Launcher"
GALVATRON = "Hetu-Galvatron"
_TESTS = "tests/functional_tests/test_cases"
_PERF = "src/megatron/bridge/perf_recipes"
_RECIPES = "src/megatron/bridge/recipes"
_H100 = "h100-80gb"


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A configuration in a repository, and the machine that it is for.

    measured    the row of the table of published steps that ran it; "" where none did
    """

    repository: str
    path: str
    gpu: str
    gpus: int
    model: str | None = None
    vocab_size: int | None = None
    seq_length: int | None = None
    measured: str = ""


def _nemo(script: str, gpus: int, measured: str = "", vocab_size: int | None = None) -> Published:
    return Published(
        repository=NEMO,
        path=f"examples/training/{script}.sh",
        gpu=_H100,
        gpus=gpus,
        vocab_size=vocab_size,
        measured=measured,
    )


def _bridge(recipe: str, gpus: int, measured: str = "") -> Published:
    return Published(repository=BRIDGE, path=recipe, gpu=_H100, gpus=gpus, measured=measured)


def _test(case: str, gpu: str, gpus: int, measured: str = "") -> Published:
    return Published(
        repository=MEGATRON,
        path=f"{_TESTS}/{case}/model_config.yaml",
        gpu=gpu,
        gpus=gpus,
        measured=measured,
    )


# The GPUs are those of the measurement; else those of the script, or of the README beside it.
# Megatron-LM's release tests do not say theirs: validation infers them from FLOPs and memory.
PUBLISHED: tuple[Published, ...] = (
    _nemo("gpt/h100/5b_fp8_8node", 64, "nemolauncher-gpt3-5b-64-pt"),
    _nemo("gpt/h100/175b_fp8_16node", 128),
    _nemo("llama/h100/llama2_7b_fp8", 8, "nemolauncher-llama2-7b-8-pt"),
    _nemo("llama/h100/llama2_13b_fp8", 16, "nemolauncher-llama2-13b-16-pt"),
    _nemo("llama/h100/llama2_70b_fp8", 64, "nemolauncher-llama2-70b-64-pt"),
    _nemo("llama/h100/llama3_8b_fp8", 8, "nemolauncher-llama3-8b-8-pt"),
    _nemo("llama/h100/llama3_70b_fp8", 64, "nemolauncher-llama3-70b-64-pt"),
    _nemo("nemotron/h100/nemotron_22b_fp8", 64, vocab_size=256000),
    _nemo("mixtral/h100/mixtral_8x7b_bf16", 64),
    _bridge(
        f"{_PERF}/llama/h100/llama31.py::llama31_405b_pretrain_1024gpu_h100_fp8cs_config",
        1024,
        "mbridge-26.06-LLAMA3.1_405B-h100-1024-fp8-main-pretrain-l106",
    ),
    _bridge(
        f"{_PERF}/qwen/h100/qwen3_moe.py::qwen3_30b_a3b_pretrain_16gpu_h100_fp8cs_config",
        16,
        "mbridge-26.06-Qwen3_30B_a3B-h100-16-fp8-main-pretrain-l132",
    ),
    _bridge(
        f"{_PERF}/gpt_oss/h100/gpt_oss.py::gpt_oss_120b_pretrain_64gpu_h100_bf16_config",
        64,
        "mbridge-26.04.01-GPT_OSS_120B-h100-64-bf16-main-pretrain-l238",
    ),
    _bridge(
        f"{_PERF}/deepseek/h100/deepseek_v3.py::deepseek_v3_pretrain_1024gpu_h100_bf16_config",
        1024,
        "mbcard-deepseek-v3-pretrain_performance-H100",
    ),
    _bridge(
        f"{_RECIPES}/qwen/h100/qwen3.py::qwen3_8b_pretrain_16gpu_h100_bf16_config",
        16,
        "mbcard-qwen3-8b-pretrain-H100",
    ),
    _bridge(
        f"{_RECIPES}/moonlight/h100/moonlight_16b.py::moonlight_16b_pretrain_16gpu_h100_bf16_config",
        16,
        "mbcard-moonlight-16b-a3b-pretrain-H100",
    ),
    _bridge(
        f"{_PERF}/llama/h100/llama3.py::llama3_70b_pretrain_64gpu_h100_bf16_config",
        64,
    ),
    _test(
        "gpt/gpt3_15b_8t_release",
        "a100-80gb",
        256,
        "mcoreci-gpt-gpt3_15b_8t_release-lts-dgx_a100",
    ),
    _test(
        "gpt/gpt3_7b_tp1_pp4_memory_speed",
        "a100-80gb",
        8,
        "mcoreci-gpt-gpt3_7b_tp1_pp4_memory_speed-dev-dgx_a100",
    ),
    _test(
        "gpt/gpt3_7b_tp4_pp1_memory_speed",
        "a100-80gb",
        8,
        "mcoreci-gpt-gpt3_7b_tp4_pp1_memory_speed-dev-dgx_a100",
    ),
    _test("mixtral/mixtral_8x22b_tp2pp8ep8vpp1_release", "a100-80gb", 128),
    Published(
        repository=MEGATRON, path="examples/llama/train_llama3_8b_h100_fp8.sh", gpu=_H100, gpus=8
    ),
    Published(
        repository=MEGATRON,
        path="examples/mixtral/train_mixtral_8x7b_distributed.sh",
        gpu=_H100,
        gpus=32,
    ),
    Published(
        repository=MEGATRON,
        path="examples/gpt3/train_gpt3_175b_distributed.sh",
        gpu=_H100,
        gpus=1024,
    ),
    Published(
        repository=MEGATRON,
        path="examples/megatron_fsdp/sbatch_mfsdp_deepseek_v3.sh",
        gpu="b200-180gb",
        gpus=512,
    ),
    Published(
        repository=GALVATRON,
        path="galvatron/models/gpt/configs/"
        "galvatron_config_llama2-7b_1nodes_8gpus_per_node_36GB_bf16.json",
        gpu="a100-40gb",
        gpus=8,
        model="llama2-7b",
        seq_length=2048,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A configuration as it was read.

    refused    the reason why it has no price, "" where it has one
    band       share of the predicted step
    """

    repository: str
    path: str
    gpus: int
    target: str = ""
    refused: str = ""
    step_s: float | None = None
    peak_gib: float | None = None
    band: float | None = None
    measured_s: float | None = None

    @property
    def inside(self) -> bool | None:
        """True if the measured step is in the band, None where one of both is not known."""
        if self.step_s is None or self.band is None or self.measured_s is None:
            return None
        return abs(self.measured_s - self.step_s) <= self.band * self.step_s


def outcome(one: Published, folder: Path, measured: Mapping[str, float]) -> Outcome:
    """Returns a configuration as it is read and priced."""
    step_s = measured.get(one.measured)
    path = folder / one.repository / one.path
    found = Outcome(repository=one.repository, path=one.path, gpus=one.gpus, measured_s=step_s)
    known = {name: value for name, value in asdict(found).items() if name != "refused"}
    try:
        file = launcher_file(path)
        if file is None:
            return Outcome(**known, refused="it has no arguments of a launcher that is known")
        options = TargetOptions(
            gpu=one.gpu,
            gpus=one.gpus,
            model=one.model,
            vocab_size=one.vocab_size,
            seq_length=one.seq_length,
        )
        plan = launcher_plan(file, options)[0]
    except PlannerError as error:
        return Outcome(**known, refused=str(error).removeprefix(f"{folder}/"))
    predicted = plan.predicted
    return Outcome(
        **known
        | {
            "target": file.target.name,
            "step_s": predicted.step_time_s.value,
            "peak_gib": max(stage.total for stage in predicted.memory_gib),
            "band": predicted.error_band.time.share if predicted.error_band else None,
        }
    )


def measured_steps(path: Path | None) -> dict[str, float]:
    """Returns the seconds of a step by the row of a table of published steps."""
    if path is None:
        return {}
    with path.open(encoding="utf-8", newline="") as file:
        rows = {
            row["id"]: row["step_time_s"] or row["derived_step_time_s"]
            for row in csv.DictReader(file)
        }
    return {name: float(text) for name, text in rows.items() if text}


def _cells(one: Outcome) -> tuple[str, ...]:
    name = one.path.rpartition("::")[2].rpartition("/")[2]
    if name == "model_config.yaml":
        name = one.path.split("/")[-2]
    numbers = (
        "" if one.step_s is None else f"{one.step_s:.3g}",
        "" if one.band is None else f"{one.band:.0%}",
        "" if one.measured_s is None else f"{one.measured_s:.3g}",
        "" if one.inside is None else ("yes" if one.inside else "no"),
        "" if one.peak_gib is None else f"{one.peak_gib:.1f}",
    )
    return (one.repository, name, f"{one.gpus}", *numbers, one.refused)


HEAD = (
    "repository",
    "configuration",
    "GPUs",
    "step s",
    "+-",
    "measured s",
    "inside",
    "GiB",
    "not read",
)


def _markdown(outcomes: list[Outcome]) -> Iterator[str]:
    yield f"| {' | '.join(HEAD)} |"
    yield f"|{'---|' * len(HEAD)}"
    yield from (f"| {' | '.join(_cells(one))} |" for one in outcomes)


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--steps", type=click.Path(path_type=Path, exists=True), help="Published steps.")
@click.option("--markdown", is_flag=True, help="Print the table of the documentation.")
@click.option("--json", "as_json", is_flag=True)
def main(folder: Path, steps: Path | None, markdown: bool, as_json: bool) -> None:
    """Read published configurations, price them, and compare them with measured steps."""
    measured = measured_steps(steps)
    outcomes = [outcome(one, folder, measured) for one in PUBLISHED]
    if as_json:
        click.echo(json.dumps([asdict(one) for one in outcomes]))
    elif markdown:
        click.echo("\n".join(_markdown(outcomes)))
    else:
        console = Console()
        print_table(console, HEAD, map(_cells, outcomes), left=(HEAD[0], HEAD[1], HEAD[-1]))
        read = sum(not one.refused for one in outcomes)
        compared = [one.inside for one in outcomes if one.inside is not None]
        say(console, f"{read} of {len(outcomes)} read, {sum(compared)} of {len(compared)} in band")


if __name__ == "__main__":
    main()
