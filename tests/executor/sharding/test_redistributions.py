from __future__ import annotations

import random

import pytest
from torch.distributed.tensor import Partial, Replicate, Shard

from parplan.costmodels.communication.redistribution import moves
from parplan.costmodels.operators.sharding import PARTIAL
from tests.helpers.redistributions import (
    SHAPE,
    Collective,
    Transition,
    measure,
    on_accelerator,
    transitions,
)

pytestmark = pytest.mark.multiproc

WHOLE = SHAPE[0] * SHAPE[1] * SHAPE[2]


def _expected(source, target, tp: int, between_shards: str) -> tuple[Collective, ...]:
    """The textbook's: one collective, of what a rank holds."""
    if source == target or source.is_replicate():
        return ()
    if source.is_partial():
        return (Collective("all-reduce" if target.is_replicate() else "reduce-scatter", 0, WHOLE),)
    if target.is_partial():
        return ()
    return (Collective("all-gather" if target.is_replicate() else between_shards, 0, WHOLE // tp),)


def _expected_backward(
    transition: Transition, tp: int, between_shards: str
) -> tuple[Collective, ...]:
    """Steps from the gradient's placement to the source's.

    A gradient that is whole stays whole for a source of partial sums.
    """
    target = transition.source[0]
    if target.is_partial() and not transition.gradient[0].is_partial():
        target = Replicate()
    return _expected(transition.gradient[0], target, tp, between_shards)


@pytest.mark.parametrize(
    ("tp", "run", "between_shards"),
    [
        pytest.param(2, measure, "all-gather", id="2-gloo-ranks"),
        pytest.param(4, measure, "all-gather", id="4-gloo-ranks"),
        pytest.param(4, on_accelerator, "all-to-all", id="4-accelerators"),
    ],
)
def test_a_transition_on_one_axis_sends_what_the_textbook_says(tp, run, between_shards):
    outcome = run((tp,), transitions(1))

    for transition, sent in outcome.items():
        assert sent.forward == _expected(
            transition.source[0], transition.target[0], tp, between_shards
        ), transition
        assert sent.backward == _expected_backward(transition, tp, between_shards), transition


@pytest.mark.parametrize(
    ("source", "target", "steps"),
    [
        pytest.param(
            "PP", "RR", ["all-reduce@1", "all-reduce@0"], id="two-sums-are-two-all-reduces"
        ),
        pytest.param(
            "S1S1", "RR", ["all-gather@1", "all-gather@0"], id="the-inner-shard-is-gathered-first"
        ),
        pytest.param(
            "S1S1",
            "S2S2",
            ["all-gather@1", "all-to-all@0"],
            id="a-nested-shard-is-gathered-and-cut-again",
        ),
        pytest.param("S1S0", "S1S2", ["all-to-all@1"], id="axes-that-agree-send-nothing"),
        pytest.param(
            "S0P",
            "RS1",
            ["reduce-scatter@1", "all-gather@0"],
            id="from-the-inner-axis-to-the-outer",
        ),
    ],
)
def test_a_transition_on_two_axes_goes_axis_by_axis(source, target, steps):
    transition = Transition(
        source=_placements(source), target=_placements(target), gradient=_placements(target)
    )

    sent = on_accelerator((2, 2), [transition])[transition]

    assert [f"{collective.name}@{collective.axis}" for collective in sent.forward] == steps


def _placements(text: str):
    kinds = {"R": Replicate(), "P": Partial(), "0": Shard(0), "1": Shard(1), "2": Shard(2)}
    return tuple(kinds[letter] for letter in text.replace("S", ""))


_DIMS = ("batch", "sequence", "feature")
_NAMES = {
    "all_gather": "all-gather",
    "all_reduce": "all-reduce",
    "reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
}


def _place(placements) -> tuple[str | None, ...]:
    """Placements as the cost model says them."""
    return tuple(
        None if p.is_replicate() else PARTIAL if p.is_partial() else _DIMS[p.dim]
        for p in placements
    )


def _priced(source, target, shape: tuple[int, ...]) -> list[tuple[str, int, int]]:
    """The collectives that the cost model prices, each with the elements that a rank hands in."""
    return [
        (
            _NAMES[move.collective],
            move.axis,
            move.num_bytes // (shape[move.axis] if move.collective == "all_gather" else 1),
        )
        for move in moves(WHOLE, _place(source), _place(target), shape)
    ]


@pytest.mark.parametrize(
    "shape",
    [
        (2,),
        *(pytest.param(more, marks=pytest.mark.slow) for more in ((2, 2), (4,), (2, 4), (2, 2, 2))),
    ],
    ids=str,
)
def test_the_cost_model_prices_what_the_executor_sends(shape):
    requested = transitions(len(shape))
    if len(shape) == 3:
        requested = random.Random(1).sample(requested, 100)

    for transition, sent in on_accelerator(shape, requested).items():
        forward = [(c.name, c.axis, c.input_elements) for c in sent.forward]
        assert forward == _priced(transition.source, transition.target, shape), transition
        if not any(
            place.is_partial() for place in transition.source
        ):  # the graph's edges leave no partial sums
            backward = [(c.name, c.axis, c.input_elements) for c in sent.backward]
            assert backward == _priced(transition.gradient, transition.source, shape), transition
