"""Options for what a launcher's own file leaves open: its model and its machine."""

from __future__ import annotations

import click

from parplan.commands.options.machine_options import machine_options
from parplan.commands.options.sections import WHAT
from parplan.commands.options.target_options import TargetOptions
from parplan.commands.style import Whole, option, packs, together

vocab_size_option = option(
    WHAT,
    "--vocab-size",
    type=Whole("tokens"),
    metavar="N",
    help="Tokens of the vocabulary, where a launcher's file leaves them to its tokenizer.",
)
program_options = together(
    option(
        WHAT,
        "--micro-batch-size",
        type=Whole("micro_batch_size"),
        metavar="N",
        help="Sequences of a micro-batch, where a launcher's file leaves them to its program.",
    ),
    option(
        WHAT,
        "--recompute",
        type=click.Choice(("none", "full")),
        help="Recompute of all blocks, where a launcher's file leaves it to its program.",
    ),
)
launcher_options = together(
    option(
        WHAT,
        "--model",
        metavar="NAME|PATH",
        help="Model of a launcher's own file, where its arguments name none.",
    ),
    vocab_size_option,
    option(
        WHAT,
        "--seq-length",
        type=Whole("seq_length"),
        metavar="N",
        help="Tokens in a sequence, where a launcher's file does not say them.",
    ),
    machine_options,
    packs("stated", TargetOptions),
)
