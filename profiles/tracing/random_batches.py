"""Random batches for modules that read token ids and for Hugging Face models, labels included."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from parplan.profiles.errors import ConfigError

IDS, TARGETS = "ids", "targets"
_OF_SAMPLES = (
    "SequenceClassification",
    "ImageClassification",
    "AudioClassification",
    "VideoClassification",
)
_NEXT_TOKEN = ("CausalLM", "LMHeadModel")  # they shift the labels themselves
_OTHER_TOKENS = ("MaskedLM", "ForConditionalGeneration")


def next_token_batch(module: nn.Module, seq_length: int) -> Callable[[int], dict[str, Tensor]]:
    """Returns a function from size to ids [size, seq_length] and targets, one token later.

    Raises ConfigError for a module without token table.
    """
    tables = [part.num_embeddings for part in module.modules() if isinstance(part, nn.Embedding)]
    if not tables:
        raise ConfigError(
            f"module: {type(module).__name__} has no torch.nn.Embedding, nothing says what its "
            "inputs are",
            hint="let the function return (module, batch), batch(size) a dict of tensors",
        )

    def batch(size: int) -> dict[str, Tensor]:
        tokens = torch.randint(tables[0], (size, seq_length + 1))
        return {IDS: tokens[:, :-1].contiguous(), TARGETS: tokens[:, 1:].contiguous()}

    return batch


def next_token_loss(logits: Any, targets: Tensor) -> Tensor:
    """Mean cross entropy of logits [b, S, V] and targets [b, S]. Raises ConfigError."""
    if not isinstance(logits, Tensor) or logits.ndim != 3 or logits.shape[:2] != targets.shape:
        returned = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise ConfigError(
            f"module: it returned {returned}, it must return logits "
            f"{[*targets.shape, 'vocabulary']}, or something with .logits",
            hint="let the function return (module, batch, loss)",
        )
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def drawn_batch(
    module: nn.Module, config: Any, seq_length: int
) -> tuple[Callable[[int], dict[str, Tensor]], str]:
    """Returns the batches of a Hugging Face model, and their unit.

    Raises ConfigError for an input or a loss that this function does not know.
    """
    taken = inspect.signature(module.forward).parameters
    main = getattr(module, "main_input_name", "input_ids")
    inputs, unit = _input(main, config, seq_length)
    labels = _labels(type(module).__name__, config, taken)

    def batch(size: int) -> dict[str, Tensor]:
        values = {main: inputs(size)}
        return values | {key: draw(size, values[main]) for key, draw in labels.items()}

    return batch, unit


def _input(main: str, config: Any, seq_length: int) -> tuple[Callable[[int], Tensor], str]:
    if main == "input_ids":
        positions = getattr(config, "max_position_embeddings", None)
        if positions is not None and seq_length > positions:
            raise ConfigError(
                f"module: seq_length is {seq_length}, the model has {positions} positions",
                hint=f"use --seq-length {positions}",
            )
        vocab = _size(config.get_text_config(), "vocab_size")
        return lambda size: torch.randint(vocab, (size, seq_length)), "tokens"
    if main == "pixel_values":
        side = _size(config, "image_size")
        height, width = (side, side) if isinstance(side, int) else side
        return lambda size: torch.randn(
            size, getattr(config, "num_channels", 3), height, width
        ), "samples"
    if main == "input_features":
        shape = _size(config, "num_mel_bins"), 2 * _size(config, "max_source_positions")
        return lambda size: torch.randn(size, *shape), "samples"
    raise ConfigError(
        f"module: nothing says how to make the {main} of {type(config).__name__}",
        hint="wrap the model in a function that returns (module, batch)",
    )


def _size(config: Any, name: str) -> Any:
    size = getattr(config, name, None)
    if size is None:
        raise ConfigError(
            f"module: {type(config).__name__} has no {name}, so nothing says how large its inputs "
            "are",
            hint="wrap the model in a function that returns (module, batch)",
        )
    return size


def _labels(name: str, config: Any, taken: Any) -> dict[str, Callable[[int, Tensor], Tensor]]:
    """Returns functions by name that draw the labels of `size` samples and their main input."""
    if "start_positions" in taken:
        return {
            key: lambda size, main: torch.randint(main.shape[1], (size,))
            for key in ("start_positions", "end_positions")
        }
    if "labels" not in taken:
        raise ConfigError(
            f"module: {name} takes no labels, so it has no loss",
            hint="name a class with a head in architectures, as "
            '"architectures": ["BertForMaskedLM"]',
        )
    if name.endswith(_OF_SAMPLES):
        return {"labels": lambda size, main: torch.randint(config.num_labels, (size,))}
    if name.endswith("TokenClassification"):
        return {"labels": lambda size, main: torch.randint(config.num_labels, tuple(main.shape))}
    if name.endswith(_NEXT_TOKEN):
        return {"labels": lambda size, main: main.clone()}
    if name.endswith(_OTHER_TOKENS):
        vocab = _size(config.get_text_config(), "vocab_size")
        length = getattr(config, "max_target_positions", None)
        return {"labels": lambda size, main: torch.randint(vocab, (size, length or main.shape[1]))}
    raise ConfigError(
        f"module: nothing says what the labels of {name} are",
        hint="wrap the model in a function that returns (module, batch)",
    )
