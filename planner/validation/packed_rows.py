"""Documents that the sequences of measured rows are packed from, where their source states them."""

from __future__ import annotations

import re

from parplan.planner.validation.row_cells import Row
from parplan.profiles.models.documents import Documents

# Column, pattern in its cell, and the mean tokens of a document.
#   nemolauncher: SQuAD 1.1, packed to 4,096 tokens (examples/README.md of
#     NVIDIA/NeMo-Framework-Launcher@26e42fa91d). Its paragraphs have 117 words and its questions 11
#     on average (Rajpurkar et al. 2016, arXiv 1606.05250), about 200 tokens with the prompt
#   mbcard: the first 10,000 conversations of Tulu 3 fill 120 rows of 32,768 tokens (card.yaml of
#     gpt-oss-20b, sft_long_context, NVIDIA-NeMo/Megatron-Bridge@067f987df0)
_MEANS = (
    ("id", r"nemolauncher-.*-(sft|lora)$", 200.0),
    ("notes", r"packed SQuAD", 200.0),
    ("notes", r"Tulu ?3", 392.0),
)


def documents_of_row(row: Row) -> Documents | None:
    """Returns the documents of a row's sequences, None where it reads them whole."""
    means = (mean for column, pattern, mean in _MEANS if re.search(pattern, row[column]))
    mean = next(means, None)
    return None if mean is None else Documents(mean=mean)
