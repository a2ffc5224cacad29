"""`plan read`: the plan of a launcher's own configuration, with its price."""

from __future__ import annotations

from pathlib import Path

import click

from parplan.commands.options.launcher_options import program_options, vocab_size_option
from parplan.commands.options.result_options import as_json, verbose_option
from parplan.commands.options.sections import OUTPUT
from parplan.commands.options.target_options import TargetOptions, target_options
from parplan.commands.style import Command, option, tell


@click.command(
    "read",
    cls=Command,
    epilog="  plan read megatron.sh\n"
    "  plan read train.sh --gpu h100-80gb --gpus 128 -o plan.yaml\n"
    "  plan read train.sh --model llama3-70b --gpu h100-80gb --gpus 128",
)
@click.argument("file", metavar="FILE", type=click.Path(path_type=Path))
@target_options
@vocab_size_option
@program_options
@option(
    OUTPUT,
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Plan file to write; - for stdout.",
)
@verbose_option
@as_json
def read(
    file: Path,
    target: TargetOptions,
    micro_batch_size: int | None,
    recompute: str | None,
    output: Path | None,
    verbose: bool,
    as_json: bool,
) -> None:
    """Read a launcher's own configuration, and price it.

    FILE is a shell script with arguments of Megatron-LM's pretrain_gpt.py, torchtitan or the
    Trainer of transformers, or with overrides of Megatron-Bridge or NeMo; a YAML or TOML file of
    one of them or of GPT-NeoX; a recipe of Megatron-Bridge (FILE.py::RECIPE); or a JSON of
    DeepSpeed. It is not run. Arguments that change time or memory and have no price are errors,
    also unknown ones by their names; other unknown ones stand in the first lines of the answer. A
    machine that the file does not state is named by options, and so are the model and the sequence
    length.
    """
    from parplan.commands.launcher_plans import launcher_file, launcher_plan
    from parplan.commands.output import deliver, require_output
    from parplan.profiles.errors import ConfigError
    from parplan.report.plans.summary_context import SummaryContext

    require_output(output)
    read_file = launcher_file(file)
    if read_file is None:
        raise ConfigError(
            f"{file}: it has no arguments of a launcher that is known",
            hint="give a script or a configuration of a launcher; plan show reads plans",
        )
    said = {"--micro-batch-size": micro_batch_size, "--recompute": recompute}
    plan, assumed = launcher_plan(read_file, target, said)
    unknown = read_file.not_understood
    context = SummaryContext(
        assumed=tuple(assumed), plan_file=str(output or ""), whole=verbose, not_understood=unknown
    )
    if unknown and as_json:
        tell(read_file.unknown_text)
    deliver(plan, context, output, as_json=as_json)
    for remark in read_file.remarks(plan):
        tell(f"note: {remark}")
