"""Megatron-LM's words for the blocks of pipeline stages.

The grammar is that of `PipelineParallelLayerLayout.parse_str_to_list`
(megatron/core/transformer/pipeline_parallel_layer_layout.py of NVIDIA/Megatron-LM at d98e8a64dd):
`E` embedding, `t` block, `m` multi-token prediction, `L` loss, `|` between virtual stages in the
order of the model, `(..)*n` and `x*n` repeat, commas are cosmetic.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby

# a group, or one letter; a group in a group is not repeated
_REPEATED = (re.compile(r"\(([^()]{1,4096})\)\*([0-9]{1,9})"), re.compile(r"(.)\*([0-9]{1,9})"))
_LETTERS = "EtmL"
MOST_LETTERS = 20_000  # stages and blocks of a model, which has at most 4,096 of each
_SHOWN = 40  # most characters of a layout in a message


def layout_word(blocks: Sequence[int], mtp_layers: int = 0) -> str:
    """Returns the layout of stages with these blocks, in the order of the model."""
    stages = [_repeated("t", count) for count in blocks]
    stages[0] = f"E{stages[0]}"
    stages[-1] = f"{stages[-1]}{'m' * mtp_layers}L"
    runs = [(stage, len(tuple(group))) for stage, group in groupby(stages)]
    parts = [f"({stage}|)*{count}" if count > 1 else f"{stage}|" for stage, count in runs[:-1]]
    last, count = runs[-1]
    return "".join((*parts, *([f"({last}|)*{count - 1}"] if count > 1 else []), last))


def _repeated(letter: str, count: int) -> str:
    return f"{letter}*{count}" if count > 2 else letter * count


def expanded(word: str) -> str:
    """Returns a layout without repetitions, commas and spaces. Raises ValueError: too long."""
    text = "".join(word.split()).replace(",", "")
    for pattern in _REPEATED:
        if len(text) <= MOST_LETTERS:
            text = _repeated_once(text, pattern)
    if len(text) > MOST_LETTERS:
        raise ValueError(f"the layout {word[:_SHOWN]} has more than {MOST_LETTERS:,} letters")
    return text


def _repeated_once(text: str, pattern: re.Pattern[str]) -> str:
    """Returns a text with the repetitions of one form, cut after more letters than there may be."""
    parts: list[str] = []
    at = size = 0
    for match in pattern.finditer(text):
        times = min(int(match[2]), MOST_LETTERS + 1)
        parts += text[at : match.start()], match[1] * times
        at = match.end()
        size += len(parts[-1]) + len(parts[-2])
        if size > MOST_LETTERS:
            break
    return "".join((*parts, text[at:]))


def layout_blocks(word: str) -> tuple[int, ...]:
    """Returns the blocks of the stages of a layout.

    Raises ValueError for an unknown letter, for more stages and blocks than a model has, and where
    the embedding or the loss is not at its end.
    """
    text = expanded(word)
    stages = text.split("|")
    wrong = next((letter for letter in text if letter not in f"{_LETTERS}|"), None)
    if wrong:
        raise ValueError(f"{wrong} is none of {', '.join(_LETTERS)}")
    if not text.startswith("E") or not text.endswith("L") or text.count("E") + text.count("L") > 2:
        raise ValueError("a layout begins with E and ends with L")
    if "m" in text and "m" not in stages[-1]:
        raise ValueError("multi-token prediction apart from the loss is not priced")
    return tuple(stage.count("t") for stage in stages)
