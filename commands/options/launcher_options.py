"""Options for what a launcher's own file leaves open: its model and its machine."""

from __future__ import annotations

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
