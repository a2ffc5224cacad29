"""`plan tokenize`: text files become a file of token ids."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from parplan.commands.options import OUTPUT, as_json
from parplan.commands.style import Command, option

if TYPE_CHECKING:
    pass

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
    help="bytes, or a Hugging Face tokenizer: its folder, or with --download its name on the hub.",
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
    help="Files of an INPUT that is a folder.",
)
@option(
    _TOKENS,
    "--dtype",
    type=click.Choice(("auto", "uint16", "uint32")),
    default="auto",
    show_default=True,
    help="Of an id; auto: the smallest that holds the vocabulary.",
)
@option(
    OUTPUT,
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    default="tokens.bin",
    show_default=True,
    metavar="FILE",
    help="A .bin; what it holds goes beside it as FILE.json.",
)
@as_json
def tokenize(
    inputs: tuple[Path, ...],
    tokenizer: str,
    download: bool,
    patterns: tuple[str, ...],
    dtype: str,
    output: Path,
    as_json: bool,
) -> None:
    """Turn text files into a file of token ids for `python -m parplan.executor --data`.

    Every INPUT is a file or a folder. A file is a document; the tokenizer's end-of-document id
    follows each.
    """
    from parplan.executor.data.tokens import documents, load_tokenizer, write_tokens
    from parplan.profiles.errors import ConfigError
    from parplan.profiles.units import format_bytes

    if len(patterns) > 1:
        raise ConfigError(
            f"--glob is given {len(patterns)} times, it is one pattern for all INPUTs",
            hint="name other files as INPUT",
        )
    found = write_tokens(
        documents(inputs, patterns[0]), output, load_tokenizer(tokenizer, download=download), dtype
    )
    if as_json:
        click.echo(json.dumps(asdict(found), indent=2))
        return
    size = format_bytes(output.stat().st_size)
    click.echo(
        f"wrote {output}: {found.count:,} tokens of {found.documents:,} documents, {size} of "
        f"{found.dtype}\n"
        f"tokenizer {found.tokenizer}, vocabulary {found.vocab_size:,}: the model needs a "
        f"vocab_size of {found.largest_id + 1:,} or more"
    )
