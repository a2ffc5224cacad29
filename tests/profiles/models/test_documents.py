"""Documents in packed sequences: the keys met, counted one by one, and lengths in a plan."""

from __future__ import annotations

import numpy as np
import pytest

from parplan.profiles.errors import ConfigError
from parplan.profiles.models.documents import MOST_LENGTHS, Documents, documents_of, reading

SEQUENCE = 4096
MIXED = Documents(lengths=((64, 8), (512, 3), (2048, 1)))


def met_by_hand(documents, *, window=0, chunked=False):
    """The keys that each query meets, half of its own counted, over all offsets of chunks."""
    met = []
    for length, number in documents.lengths:
        age = np.arange(length) + 0.5
        if chunked:
            offsets = np.arange(window)[:, None]
            age = np.minimum(age, (np.arange(length) + offsets) % window + 0.5).ravel()
            met.append(np.repeat(age, number))
        else:
            met.append(np.tile(np.minimum(age, window or length), int(number)))
    return np.concatenate(met)


@pytest.mark.parametrize(
    "mask",
    [
        pytest.param({}, id="causal"),
        pytest.param({"window": 128}, id="window"),
        pytest.param({"window": 4096}, id="window-of-the-sequence"),
        pytest.param({"window": 128, "chunked": True}, id="chunks-that-begin-anywhere"),
    ],
)
def test_queries_meet_the_keys_that_are_counted_one_by_one(mask):
    counted = met_by_hand(MIXED, **mask)
    read = reading(MIXED, SEQUENCE, causal=True, **{"window": 0, "chunked": False} | mask)

    assert read.mean == pytest.approx(counted.mean(), rel=2e-3)
    assert read.variance == pytest.approx(counted.var(), rel=1e-2)


def test_a_token_reads_its_whole_document_both_ways():
    read = reading(MIXED, SEQUENCE, causal=False, window=0, chunked=False)

    squares = 8 * 64**2 + 3 * 512**2 + 2048**2
    assert read.mean == pytest.approx(squares / (8 * 64 + 3 * 512 + 2048))


def test_one_document_a_sequence_is_the_whole_sequence():
    read = reading(
        Documents(lengths=((SEQUENCE, 7),)), SEQUENCE, causal=True, window=0, chunked=False
    )

    assert (read.mean, read.drift, read.longest) == (SEQUENCE / 2, 0.0, SEQUENCE)
    assert read.spread(SEQUENCE) == read.spread(1) == 0.0


def test_a_long_stretch_varies_by_its_documents_and_a_short_one_by_its_queries():
    read = reading(MIXED, SEQUENCE, causal=True, window=0, chunked=False)
    draw = np.random.default_rng(0)
    length, number = np.array(MIXED.lengths).T
    drawn = draw.choice(length, (500, 4000), p=number / number.sum())
    met = np.concatenate([np.arange(each) + 0.5 for each in drawn[0].astype(int)])
    works = [(row**2 / 2).sum() for row in drawn]
    tokens = [row.sum() for row in drawn]
    beyond = np.array(works) - read.mean * np.array(tokens)

    assert read.spread(1e9) * 1e9 * read.mean**2 == pytest.approx(read.drift, rel=1e-3)
    assert read.drift == pytest.approx(beyond.var() / np.mean(tokens), rel=0.15)
    assert read.spread(1e-9) * read.mean**2 == pytest.approx(met.var(), rel=0.1)


@pytest.mark.parametrize("mean", [1, 300, 2000, 4000, SEQUENCE])
def test_a_mean_stands_for_exponential_lengths_within_a_sequence(mean):
    read = reading(Documents(mean=mean), SEQUENCE, causal=True, window=0, chunked=False)
    draw = np.random.default_rng(0)
    scale = next(  # of an exponential distribution whose lengths are cut at a sequence
        scale
        for scale in np.geomspace(mean, 1e11, 20000)
        if -scale * np.expm1(-SEQUENCE / scale) >= mean * (1 - 1e-6)
    )
    drawn = np.minimum(draw.exponential(scale, 400_000), SEQUENCE)

    assert read.mean == pytest.approx((drawn**2).sum() / 2 / drawn.sum(), rel=0.01)
    assert read.longest == 0


def test_a_long_table_of_lengths_is_joined_and_reads_as_much():
    draw = np.random.default_rng(0)
    drawn = np.clip(draw.lognormal(5.5, 1.2, 100_000), 1, SEQUENCE).astype(int)

    documents = documents_of((int(length), 1.0) for length in drawn)

    assert len(documents.lengths) <= MOST_LENGTHS < len(set(drawn))
    assert documents.mean_length == pytest.approx(drawn.mean(), rel=2e-3)
    assert documents.longest <= SEQUENCE
    read = reading(documents, SEQUENCE, causal=True, window=0, chunked=False)
    assert read.mean == pytest.approx((drawn**2).sum() / 2 / drawn.sum(), rel=1e-3)


def test_equal_lengths_are_added_up_in_any_order():
    documents = documents_of([(9, 1.0), (4, 2.0), (9, 3.0)])

    assert documents.lengths == ((4, 2.0), (9, 4.0))
    assert str(documents) == "documents of 7 tokens on average"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        pytest.param({}, "both a mean and lengths, or neither", id="nothing"),
        pytest.param({"mean": 5.0, "lengths": ((5, 1.0),)}, "both a mean and lengths", id="both"),
        pytest.param({"mean": -5.0}, "not positive", id="negative-mean"),
        pytest.param({"lengths": ((0, 1.0),)}, "not positive", id="empty-document"),
        pytest.param({"lengths": ((5, 1.0), (5, 2.0))}, "a length twice", id="twice"),
    ],
)
def test_lengths_that_cannot_be_are_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        Documents(**fields)
