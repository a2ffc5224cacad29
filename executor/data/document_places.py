"""The documents that sequences are packed from, as the place of each token in its document.

The end-of-document ids of a token file say where documents end. Files without them, and synthetic
batches, have documents whose lengths are drawn from those of the plan, the same for every mesh. A
sequence begins a document and cuts its last one.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from parplan.executor.data.batches import document_end, file_sequences, sequences_of
from parplan.executor.run_options import Options, derived_seed
from parplan.planner.plan.plan import Plan
from parplan.profiles.models.documents import Documents, length_histogram

Places = Callable[[int], Tensor]


def build_places(plan: Plan, replica: int, options: Options) -> Places | None:
    """Returns a function from the step to the places of this replica's tokens.

    They are [rows, sequence length]; None where attention reads whole sequences. Raises
    ConfigError.
    """
    documents, length = plan.training.documents, plan.training.seq_length
    if documents is None:
        return None
    dp_rank = replica // plan.mesh.cp
    end = None if options.data is None else document_end(options.data)
    if options.data is None or end is None:
        return drawn_places(plan, dp_rank, options.seed)
    ids_of = file_sequences(plan, options)

    def sequence(index: int) -> Tensor:
        ends = (ids_of(index)[:length] == end).nonzero().flatten() + 1
        return places_of(_between([0, *ends.tolist(), length]))

    return sequences_of(plan, dp_rank, sequence)


def drawn_places(plan: Plan, dp_rank: int, seed: int) -> Places:
    """Returns places in documents with the plan's lengths, which its sequences must have."""
    documents, length = plan.training.documents, plan.training.seq_length
    assert documents is not None, "the plan packs documents"

    def sequence(index: int) -> Tensor:
        return places_of(drawn_lengths(documents, length, derived_seed(seed, index)))

    return sequences_of(plan, dp_rank, sequence)


def drawn_lengths(documents: Documents, sequence: int, seed: int) -> list[int]:
    """Returns lengths of documents that fill a sequence, drawn as often as there are such ones."""
    each, number = length_histogram(documents, sequence)
    generator = np.random.default_rng(seed)
    ends = [0]
    while ends[-1] < sequence:
        drawn = generator.choice(each, p=number / number.sum())
        ends.append(min(sequence, ends[-1] + max(1, round(float(drawn)))))
    return _between(ends)


def places_of(lengths: list[int]) -> Tensor:
    """Returns the place of each token in its document, from 0."""
    return torch.cat([torch.arange(length) for length in lengths])


def _between(ends: list[int]) -> list[int]:
    """Returns the distances of neighbours, without those of 0."""
    distances = (end - start for start, end in pairwise(ends))
    return [distance for distance in distances if distance]
