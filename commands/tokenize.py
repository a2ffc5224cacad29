"""`plan tokenize`: text files become a file of token ids."""

from __future__ import annotations

from pathlib import Path

import click

from parplan.commands.options.result_options import as_json
from parplan.commands.options.sections import OUTPUT
from parplan.commands.style import Command, option, print_json, print_lines

_TOKENS = "Tokens"


@click.command(
    cls=Command,
    epilog="  plan tokenize book.txt -o tokens.bin\n  plan tokenize ~/src --glob '**/*.py' -o "
    "code.bin\n"
    "  plan tokenize corpus/ --tokenizer ./llama-3-8b -o corpus.bin",
)
@click.argument(
    "inputs", metavar="INPUT...", type=click.Path(path_type=Path), nargs=-1, required=True
)
@option(
    _TOKENS,
    "--tokenizer",
    default="bytes",
    show_default=True,
    metavar="NAME|PATH",
    help="Tokenizer: bytes, the folder of a Hugging Face tokenizer, or with --download its name "
    "on the hub.",
)
@option(
    _TOKENS,
    "--download",
    is_flag=True,
    help="Fetch the tokenizer from the hub. No other command or option uses the network.",
)
@option(
    _TOKENS,
    "--glob",
    "patterns",
    multiple=True,
    default=("*.txt",),
    show_default="*.txt",
    metavar="PATTERN",
    help="Pattern of the files to read in an INPUT that is a folder.",
)
@option(
    _TOKENS,
    "--dtype",
    type=click.Choice(("auto", "uint16", "uint32")),
    default="auto",
    show_default=True,
    help="Integer type of an id; auto takes the smallest that holds the vocabulary.",
)
@option(
    OUTPUT,
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    default="tokens.bin",
    show_default=True,
    metavar="FILE",
    help="Token file (.bin) to write; its description goes to FILE.json.",
)
@option(OUTPUT, "--force", is_flag=True, help="Write over FILE.")
@as_json
def tokenize(
    inputs: tuple[Path, ...],
    tokenizer: str,
    download: bool,
    patterns: tuple[str, ...],
    dtype: str,
    output: Path,
    force: bool,
    as_json: bool,
) -> None:
    """Turn text files into a file of token ids for `python -m parplan.executor --data`.

    Every INPUT is a file or a folder. Each file is one document; the tokenizer's end-of-document
    id follows it.
    """
    from parplan.commands.output import require_new
    from parplan.executor.data.tokens import documents, load_tokenizer, write_tokens
    from parplan.profiles.errors import ConfigError
    from parplan.profiles.units import format_bytes

    if len(patterns) > 1:
        raise ConfigError(
            f"--glob is given {len(patterns)} times, it is one pattern for all INPUTs",
            hint="name other files as INPUT",
        )
    require_new(output, force=force, other="choose another file with --output")
    written = write_tokens(
        documents(inputs, patterns[0]), output, load_tokenizer(tokenizer, download=download), dtype
    )
    if as_json:
        print_json(written)
        return
    size = format_bytes(output.stat().st_size)
    print_lines(
        f"wrote {output}: {written.count:,} tokens of {written.documents:,} documents, {size} of "
        f"{written.dtype}",
        f"tokenizer {written.tokenizer}, vocabulary {written.vocab_size:,}: the model needs a "
        f"vocab_size of {written.largest_id + 1:,} or more",
    )
