"""Attention over context-parallel ranks: outputs and gradients of every form."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from parplan.costmodels.communication.mesh import Mesh
from parplan.executor.checking.parity import run_ranks
from parplan.executor.context.context_attention import Context, KeysRead
from parplan.executor.context.zigzag import in_order, part_of
from parplan.profiles.stack import ContextForm

TOKENS, BATCH, FEATURES = 24, 2, 8
TOLERANCE = 2e-6  # of sums in fp32 in another order, of numbers around 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One form of attention over `ranks` ranks; in the two-level form two exchange heads."""

    form: ContextForm
    ranks: int
    kv_heads: int = 4
    window: int = 0
    value_features: int = FEATURES

    @property
    def mesh(self) -> Mesh:
        return Mesh(pp=1, dp=1, tp=1, cp=self.ranks, context_form=self.form)

    def __str__(self) -> str:
        window = f"-window{self.window}" if self.window else ""
        values = f"-values{self.value_features}" if self.value_features != FEATURES else ""
        return f"{self.form}-cp{self.ranks}-kv{self.kv_heads}{window}{values}"


CARRIED = (ContextForm.RING, ContextForm.ALL_GATHER)
CASES = (
    *(Case(form=form, ranks=n, kv_heads=h) for form in CARRIED for n in (2, 4) for h in (4, 2)),
    *(
        Case(form=form, ranks=n, window=window)
        for form in CARRIED
        for n in (2, 4)
        for window in (1, 2, 3, 4, 7, 13, 23, 24)
    ),
    *(Case(form=form, ranks=4, value_features=6) for form in CARRIED),
    *(Case(form=ContextForm.ALL_TO_ALL, ranks=n, kv_heads=h) for n in (2, 4) for h in (4, 2, 1)),
    *(Case(form=ContextForm.TWO_LEVEL, ranks=4, kv_heads=h) for h in (4, 2, 1)),
    Case(form=ContextForm.TWO_LEVEL, ranks=4, window=5),
    Case(form=ContextForm.ALL_TO_ALL, ranks=2, window=5),
)


def inputs_of(case: Case) -> list[Tensor]:
    """Queries, keys, values and the gradient of the output, of whole sequences."""
    generator = torch.Generator().manual_seed(3)
    features = (FEATURES, FEATURES, case.value_features, case.value_features)
    heads = (4, case.kv_heads, case.kv_heads, 4)
    return [
        torch.randn((BATCH, n, TOKENS, size), generator=generator)
        for n, size in zip(heads, features, strict=True)
    ]


def one_process(case: Case) -> tuple[Tensor, ...]:
    """Output and gradients of the definition of attention, in fp64."""
    query, key, value, gradient = (each.double() for each in inputs_of(case))
    leaves = [each.requires_grad_() for each in (query, key, value)]
    repeats = 4 // case.kv_heads
    scores = query @ key.repeat_interleave(repeats, 1).transpose(-2, -1) * FEATURES**-0.5
    distance = torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)
    unread = (distance < 0) | (distance >= (case.window or TOKENS))
    weights = scores.masked_fill(unread, float("-inf")).softmax(-1)
    out = weights @ value.repeat_interleave(repeats, 1)
    return out, *torch.autograd.grad(out, leaves, gradient)


def context_of(case: Case) -> Context:
    """The context of this rank; every rank makes every group."""
    rank, ranks = dist.get_rank(), case.ranks
    exchanging = {ContextForm.ALL_TO_ALL: ranks, ContextForm.TWO_LEVEL: 2}.get(case.form, 1)
    neighbours = [list(range(i, i + exchanging)) for i in range(0, ranks, exchanging)]
    rings = [list(range(i, ranks, exchanging)) for i in range(exchanging)]
    groups = [[(each, dist.new_group(each)) for each in sets] for sets in (neighbours, rings)]
    heads, around = (next(g for each, g in sets if rank in each) for sets in groups)
    return Context(
        rank=rank,
        ranks=ranks,
        form=case.form,
        heads=heads if exchanging > 1 else None,
        around=around if exchanging < ranks else None,
    )


def run(case: Case) -> list[Tensor]:
    """This rank's parts of output and gradients."""
    context = context_of(case)
    *inputs, gradient = (
        part_of(each, context.rank, case.ranks, dim=2).requires_grad_() for each in inputs_of(case)
    )
    out = context.attend(*context.enter(*inputs), KeysRead(window=case.window))
    gradients = torch.autograd.grad(out, inputs, gradient.detach())
    return [each.detach().clone() for each in (out, *gradients)]


PLAIN = {  # every form over 2 and 4 ranks, and windows within a part, of one, and of several
    case for case in CASES if case.window in (0, 5) or (case.ranks == 4 and case.window in (4, 23))
}


@cache
def results(ranks: int, *, plain: bool) -> dict[Case, list[list[Tensor]]]:
    """The results of all ranks of the plain cases or of the others, which share a world."""
    cases = [case for case in CASES if case.ranks == ranks and (case in PLAIN) is plain]
    return dict(zip(cases, run_ranks(cases, run), strict=True))


@pytest.mark.multiproc
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=str(case), marks=() if case in PLAIN else pytest.mark.slow)
        for case in CASES
    ],
)
def test_ranks_that_divide_a_sequence_compute_what_one_process_does(case):
    of_ranks = results(case.ranks, plain=case in PLAIN)[case]

    for index, expected in enumerate(one_process(case)):
        parts = torch.stack([each[index] for each in of_ranks])
        whole = in_order(parts, 2).double()
        assert (whole - expected).abs().max() <= TOLERANCE
