"""Waits for the rank with the longest documents, against sequences that are packed at random."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.layers.document_waits import context_share, replica_share
from parplan.costmodels.operators.sharding import Sharding
from parplan.costmodels.price_cache import PriceCache
from parplan.profiles.machines.machine_catalog import load_cluster, with_gpus
from parplan.profiles.machines.shipped_profiles import machine_for
from parplan.profiles.models.documents import Documents, documents_of
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.operator_graph import LayerKind
from parplan.profiles.models.spec import TrainingSpec
from parplan.profiles.stack import NEUTRAL, AttentionKernel, ContextForm

BLOCK, S = LayerKind.BLOCK, 8192
MODEL = load_model("llama3-8b").spec
MACHINE = machine_for(with_gpus(load_cluster("a100-80gb"), 16, 8))
TRAINING = TrainingSpec(global_batch_size=64, seq_length=S, stack=NEUTRAL)
RING = Sharding(cp=4, context_form=ContextForm.RING)
DRAWS = {
    "short": lambda draw: draw.exponential(500),
    "longer": lambda draw: draw.exponential(1500),
    "tailed": lambda draw: draw.lognormal(6.0, 1.0),
}


def packed(name):
    """Returns the keys that each query of 1,500 sequences meets, and their documents."""
    draw = np.random.default_rng(0)
    sequences = []
    for _ in range(1500):
        lengths, left = [], S
        while left:
            lengths.append(min(left, max(1, int(DRAWS[name](draw)))))
            left -= lengths[-1]
        draw.shuffle(lengths)
        sequences.append(lengths)
    met = [np.concatenate([np.arange(each) + 0.5 for each in each]) for each in sequences]
    documents = documents_of((length, 1.0) for length in itertools.chain(*sequences))
    return np.array(met), documents


@pytest.fixture(scope="module", params=sorted(DRAWS))
def simulated(request):
    return packed(request.param)


def cache(documents, **changes):
    return PriceCache(MODEL, replace(TRAINING, documents=documents, **changes), MACHINE)


def attention(documents, batch=1):
    return cache(documents).graph(batch).block.operator("attention")


def test_the_mean_is_that_of_packed_sequences(simulated):
    met, documents = simulated

    assert attention(documents).attention.keys_met(S) == pytest.approx(met.mean(), rel=0.01)


@pytest.mark.parametrize(("replicas", "sequences"), [(2, 8), (8, 4), (8, 32), (64, 16)])
def test_the_fullest_replica_is_that_of_packed_sequences(simulated, replicas, sequences):
    met, documents = simulated
    works = met.mean(axis=1) / met.mean()
    draw = np.random.default_rng(1)
    sums = draw.choice(works, (400, replicas, sequences)).mean(axis=2)

    share = replica_share(attention(documents), replicas, sequences)

    assert 1 + share == pytest.approx(sums.max(axis=1).mean(), rel=0.1)
    assert share == pytest.approx(sums.max(axis=1).mean() - 1, rel=0.3)


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_fullest_rank_of_a_sequence_is_that_of_packed_sequences(simulated, ranks, batch):
    met, documents = simulated
    parts = met.reshape(len(met), 2 * ranks, -1).mean(axis=2)
    works = (parts[:, :ranks] + parts[:, ranks:][:, ::-1]) / 2 / met.mean()
    sums = works[: len(works) // batch * batch].reshape(-1, batch, ranks).mean(axis=1)

    share = context_share(attention(documents, batch), ranks)

    assert 1 + share == pytest.approx(sums.max(axis=1).mean(), rel=0.12)
    assert share == pytest.approx(sums.max(axis=1).mean() - 1, rel=0.45)


def test_no_rank_reads_more_than_whole_sequences():
    rare = Documents(lengths=((16, 1000), (S, 1)))
    operator = attention(rare)
    whole = S / 2 / operator.attention.keys_met(S)

    assert 1 + replica_share(operator, 10_000, 1) == pytest.approx(whole)


@pytest.mark.parametrize(
    "documents", [None, Documents(lengths=((S, 1),))], ids=["whole", "one-document"]
)
def test_equal_work_waits_for_nothing(documents):
    operator = attention(documents)

    assert replica_share(operator, 8, 4) == context_share(operator, 8) == 0.0
    assert replica_share(attention(Documents(mean=500)), 1, 4) == 0.0


def attention_s(prices, sharding):
    time = prices._operators(BLOCK, (1,), sharding).compute["attention"]
    return time.forward.value_s, time.backward.value_s


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_replicas_wait_once_a_step_or_in_every_micro_batch(zero):
    documents, mesh = Documents(mean=500), Mesh(pp=1, dp=8, tp=1)
    prices, whole = cache(documents), cache(None)
    forward_s, backward_s = attention_s(prices, Sharding())
    operator = prices.graph(1).block.operator("attention")

    waiting, without = (
        each.data_parallel(BLOCK, 1, mesh, Sharding(), zero) for each in (prices, whole)
    )

    if zero < 2:  # 64 sequences are 8 of each replica
        share = replica_share(operator, 8, 8)
        assert waiting.per_step_s > without.per_step_s
        assert waiting.step.value_s - without.step.value_s >= 0.99 * 8 * share * (
            forward_s + backward_s
        )
        assert waiting.per_micro_batch_s == without.per_micro_batch_s
    else:
        share = replica_share(operator, 8, 1)
        assert waiting.forward.value_s - without.forward.value_s >= 0.99 * share * forward_s
        assert waiting.backward.value_s - without.backward.value_s >= 0.99 * share * backward_s


def test_ranks_of_a_sequence_wait_at_attention_unless_documents_are_divided():
    documents = Documents(mean=500)
    divided = cache(documents, stack=replace(NEUTRAL, divides_documents=True))
    times = [
        prices._operators(BLOCK, (1,), RING).tensor_parallel["attention"].forward.value_s
        for prices in (cache(documents), divided)
    ]
    share = context_share(attention(documents), 4)

    assert times[0] - times[1] == pytest.approx(share * attention_s(divided, RING)[0])


def test_documents_make_fused_attention_alone_faster_and_save_no_bytes():
    documents = Documents(mean=500)
    for kernel in AttentionKernel:
        packed_, whole = (cache(each, attention=kernel) for each in (documents, None))
        faster = attention_s(packed_, Sharding())[0] < attention_s(whole, Sharding())[0]
        saved = [each.activations(BLOCK, 1, Sharding()).saved for each in (packed_, whole)]

        assert faster == (kernel is AttentionKernel.FLASH)
        assert saved[0] == saved[1]
        assert packed_.flops_per_sequence < whole.flops_per_sequence
