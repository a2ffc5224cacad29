"""Options for the model, its training and the machine."""

from __future__ import annotations

from dataclasses import dataclass

import click

from parplan.commands.options.machine_options import machine_options
from parplan.commands.options.option_values import (
    ATTENTION,
    BASE_WEIGHTS,
    NARROW,
    OPTIMIZERS,
    PRECISIONS,
    STATE_PRECISIONS,
)
from parplan.commands.options.sections import WHAT
from parplan.commands.style import List, Number, Whole, option, packs, together


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetOptions:
    """Options for the model, the training and the machine; None where the user left one open.

    vocab_size   of a launcher's own file alone
    """

    model: str | None = None
    vocab_size: int | None = None
    gpus: int | None = None
    gpu: str | None = None
    cluster: str | None = None
    gpus_per_node: int | None = None
    host_memory: str | None = None
    global_batch_size: int | None = None
    seq_length: int | None = None
    precision: str | None = None
    gradient_precision: str | None = None
    state_precision: str | None = None
    optimizer: str | None = None
    fp8: bool = False
    narrow_weights: bool = False
    lora_rank: int | None = None
    lora_targets: tuple[str, ...] = ()
    freeze: tuple[str, ...] = ()
    base_weights: str | None = None
    images_per_sequence: int | None = None
    image_tokens: int | None = None
    expert_imbalance: float = 1.0
    expert_capacity: float = 0.0
    document_lengths: str | None = None
    stack: str | None = None
    attention: str | None = None
    profile: str | None = None
    force_profile: bool = False
    module: str | None = None


training_options = together(
    option(
        WHAT,
        "--global-batch-size",
        type=Whole("global_batch_size"),
        metavar="N",
        help="Sequences in a step. [default: the model's, fewer of longer sequences]",
    ),
    option(
        WHAT,
        "--seq-length",
        type=Whole("seq_length"),
        metavar="N",
        help="Tokens in a sequence. [default: the model's]",
    ),
    option(
        WHAT,
        "--precision",
        type=click.Choice((*PRECISIONS, *NARROW)),
        help="Precision of weights and activations, or a format of the blocks' products beside "
        "bf16. [default: bf16, fp16 where the GPU has no bf16, or the profile's]",
    ),
    option(
        WHAT,
        "--gradient-precision",
        type=click.Choice(PRECISIONS),
        help="Precision in which gradients accumulate and are reduced. [default: fp32]",
    ),
    option(
        WHAT,
        "--state-precision",
        type=click.Choice(STATE_PRECISIONS),
        help="Precision of the optimizer's states of bf16 parameters: a copy and moments in fp32, "
        "moments in bf16 or fp8 beside the copy, or all in bf16 without a copy. [default: the "
        "stack's]",
    ),
    option(
        WHAT,
        "--optimizer",
        type=click.Choice(OPTIMIZERS),
        help="Optimizer: its states and its update are priced and run. [default: adam]",
    ),
    option(
        WHAT,
        "--fp8",
        is_flag=True,
        help="Run the products of the blocks in fp8, in the first format that the stack has.",
    ),
    option(
        WHAT,
        "--narrow-weights",
        is_flag=True,
        help="Gather the weights of such products in their format, and keep no copy in 16 bits "
        "where the stack needs none.",
    ),
    option(
        WHAT,
        "--images-per-sequence",
        type=Whole("images_per_sequence"),
        metavar="N",
        help="Images of a sequence that pass the tower of the model; 0: text alone, without the "
        "tower. [default: 1]",
    ),
    option(
        WHAT,
        "--image-tokens",
        type=Whole("image_tokens"),
        metavar="N",
        help="Tokens of the language model that an image becomes, for a tower that takes images "
        "of any size. [default: the model's]",
    ),
    option(
        WHAT,
        "--expert-imbalance",
        type=Number(),
        default=1.0,
        metavar="FACTOR",
        help="Copies of tokens on the rank with the fullest experts, over the mean. [default: 1, "
        "balanced]",
    ),
    option(
        WHAT,
        "--expert-capacity",
        type=Number(),
        default=0.0,
        metavar="FACTOR",
        help="Copies of tokens that each expert takes, over the mean; the rest is dropped. "
        "[default: all]",
    ),
    option(
        WHAT,
        "--document-lengths",
        metavar="FILE|MEAN",
        help="Documents that sequences are packed from, between which attention reads nothing: a "
        "file with a length on each line, or a length and a count; or the mean of exponential "
        "lengths. [default: sequences are read whole]",
    ),
    option(
        WHAT,
        "--stack",
        names="stacks",
        metavar="NAME|FILE",
        help="Software stack that trains: a name of `plan stacks`, or a YAML. [default: "
        "megatron-core, or the profile's]",
    ),
    option(
        WHAT,
        "--attention",
        type=click.Choice(ATTENTION),
        help="Attention kernel. [default: the stack's]",
    ),
)
fine_tuning_options = together(
    option(
        WHAT,
        "--lora-rank",
        type=Whole("lora_rank"),
        metavar="N",
        help="Rank of the adapters of --lora-targets. All other parameters are then frozen.",
    ),
    option(
        WHAT,
        "--lora-targets",
        type=List(click.STRING),
        default=(),
        metavar="NAME,..",
        help="Products of the blocks that get an adapter: qkv, proj, fc1, fc2, names of Hugging "
        "Face modules such as q_proj, or all-linear.",
    ),
    option(
        WHAT,
        "--freeze",
        type=List(click.STRING),
        default=(),
        metavar="PART,..",
        help="Parts that are not trained: embedding, head, norms, tower, projector, blocks:0-15, "
        "all.",
    ),
    option(
        WHAT,
        "--base-weights",
        type=click.Choice(BASE_WEIGHTS),
        help="Frozen weights of the blocks: in the precision of training, or in 8 bits with "
        "scales. [default: bf16]",
    ),
)
target_options = together(
    option(
        WHAT,
        "--model",
        names="models",
        metavar="NAME|PATH|PKG.MOD:FUNC",
        help="Model: a name of `plan models`, a YAML of that form, a Hugging Face config.json, or "
        "a function that makes a module.",
    ),
    training_options,
    fine_tuning_options,
    option(
        WHAT,
        "--module",
        metavar="huggingface|PKG.MOD:FUNC",
        help="Module that runs: transformers' module for the config.json, or the result of your "
        "function. [default: parplan's]",
    ),
    machine_options,
    packs("target", TargetOptions),
)
