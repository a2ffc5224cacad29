"""Context parallelism: what attention sends in each form, by hand, and what it hides."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parplan.costmodels.communication.collectives import (
    Collective,
    collective_time,
    point_to_point_time,
)
from parplan.costmodels.communication.hiding import contention
from parplan.costmodels.communication.mesh import Mesh, Placement
from parplan.costmodels.layers.context_parallel import (
    ContextCall,
    context_calls,
    illegal_context,
    ranks_with_heads,
)
from parplan.costmodels.operators.sharding import Sharding
from parplan.costmodels.price_cache import PriceCache
from parplan.profiles.machines.machine_catalog import load_cluster, with_gpus
from parplan.profiles.machines.shipped_profiles import machine_for
from parplan.profiles.models.blocks import BlockRun
from parplan.profiles.models.documents import Documents
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.operator_graph import LayerKind
from parplan.profiles.models.spec import TrainingSpec, text_alone
from parplan.profiles.stack import NEUTRAL, ContextForm

BLOCK = LayerKind.BLOCK
MODEL = load_model("llama3-8b").spec
SEQUENCE = 32768
TRAINING = TrainingSpec(global_batch_size=8, seq_length=SEQUENCE, stack=NEUTRAL)
CLUSTER = with_gpus(load_cluster("a100-80gb"), 16, 8)
MACHINE = machine_for(CLUSTER)
RING, ALL_GATHER, ALL_TO_ALL, TWO_LEVEL = ContextForm


@pytest.fixture(scope="module")
def prices():
    return PriceCache(MODEL, TRAINING, MACHINE)


def sent_s(prices, sharding):
    """Seconds that attention of a block waits for other ranks, forward and backward."""
    time = prices._operators(BLOCK, (1,), sharding).tensor_parallel["attention"]
    return time.forward.value_s, time.backward.value_s


def local_bytes(cp, features, tp=1):
    return 2 * SEQUENCE // cp * features // tp


KV = 2 * 8 * 128  # features of keys and values
Q = 32 * 128


@pytest.mark.parametrize(("cp", "tp"), [(2, 1), (4, 2), (8, 1)])
def test_a_gather_waits_for_keys_and_values_of_all_tokens(prices, cp, tp):
    where = Placement(nodes=1, ranks_per_node=cp, groups_per_node=1)
    whole = cp * local_bytes(cp, KV, tp)
    gathered, reduced = (
        collective_time(kind, whole, where, MACHINE).value_s
        for kind in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER)
    )

    forward_s, backward_s = sent_s(prices, Sharding(tp, tp > 1, cp=cp, context_form=ALL_GATHER))

    assert forward_s == pytest.approx(gathered)
    assert backward_s == pytest.approx(gathered + reduced)


@pytest.mark.parametrize("cp", [2, 4, 8])
def test_an_exchange_sends_all_tensors_of_attention(prices, cp):
    where = Placement(nodes=1, ranks_per_node=cp, groups_per_node=1)
    read, made, both = (
        collective_time(Collective.ALL_TO_ALL, local_bytes(cp, features), where, MACHINE).value_s
        for features in (Q + KV, Q, 2 * Q)  # the output comes back with its gradient
    )

    assert sent_s(prices, Sharding(cp=cp, context_form=ALL_TO_ALL)) == pytest.approx(
        (read + made, both + read)
    )


def test_keys_of_more_ranks_than_heads_are_copied(prices):
    where = Placement(nodes=2, ranks_per_node=8, groups_per_node=1)
    once = sum(
        collective_time(Collective.ALL_TO_ALL, local_bytes(16, features), where, MACHINE).value_s
        for features in (Q + 2 * KV, Q)  # 8 heads of keys for 16 ranks
    )

    assert sent_s(prices, Sharding(cp=16, context_form=ALL_TO_ALL))[0] == pytest.approx(once)


@pytest.mark.parametrize("cp", [2, 8, 16])
def test_a_ring_passes_under_the_attention_of_the_piece_before(prices, cp):
    sharding = Sharding(cp=cp, context_form=RING)
    compute = prices._operators(BLOCK, (1,), sharding).compute["attention"]
    one_s = point_to_point_time(
        local_bytes(cp, KV), level=int(cp > 8), sharing=1, machine=MACHINE
    ).value_s
    hop_s = (one_s, 2 * one_s)  # keys and values, and their gradients
    exposed = [
        (cp - 1) * (max(0.0, hop - step) + contention(MACHINE) * min(hop, step))
        for hop, step in zip(
            hop_s, (compute.forward.value_s / cp, compute.backward.value_s / cp), strict=True
        )
    ]

    assert sent_s(prices, sharding) == pytest.approx(exposed)


def test_two_levels_exchange_in_a_node_and_pass_between_nodes(prices):
    two_level = Sharding(cp=16, context_form=TWO_LEVEL)
    compute = prices._operators(BLOCK, (1,), two_level).compute["attention"]
    where = Placement(nodes=1, ranks_per_node=8, groups_per_node=1)
    once = sum(
        collective_time(Collective.ALL_TO_ALL, local_bytes(16, features), where, MACHINE).value_s
        for features in (Q + KV, Q)
    )
    hop_s = point_to_point_time(local_bytes(16, KV), level=1, sharing=8, machine=MACHINE).value_s
    step_s = compute.forward.value_s / 2
    passed = max(0.0, hop_s - step_s) + contention(MACHINE) * min(hop_s, step_s)

    assert sent_s(prices, two_level)[0] == pytest.approx(once + passed)


def test_each_rank_has_its_part_of_the_tokens_and_reads_the_keys_of_all(prices):
    whole, part = (
        prices.graph(1).block,
        prices.divided_layer(BLOCK, 1, Sharding(cp=4, context_form=RING)),
    )

    assert part.flops_forward * 4 == whole.flops_forward
    assert part.operator("attention").size("keys") == SEQUENCE
    assert (
        4 * part.operator("qkv").outputs[0].num_bytes == whole.operator("qkv").outputs[0].num_bytes
    )
    saved = [
        prices.activations(BLOCK, 1, sharding).saved
        for sharding in (Sharding(), Sharding(cp=4, context_form=RING))
    ]
    assert saved[0] == 4 * saved[1]


def test_states_are_those_of_all_ranks_that_hold_copies(prices):
    by_data = prices.states(BLOCK, Mesh(pp=1, dp=16, tp=1), Sharding(), 3)
    both = prices.states(
        BLOCK,
        Mesh(pp=1, dp=4, cp=4, tp=1, context_form=RING),
        Sharding(cp=4, context_form=RING),
        3,
    )

    assert both.states == by_data.states
    reduced = [
        prices.data_parallel(BLOCK, 1, mesh, sharding, 0).per_step_s
        for mesh, sharding in (
            (Mesh(pp=1, dp=16, tp=1), Sharding()),
            (
                Mesh(pp=1, dp=4, cp=4, tp=1, context_form=RING),
                Sharding(cp=4, context_form=RING),
            ),
        )
    ]
    assert reduced[1] >= reduced[0] > 0  # the window of a fourth of the tokens hides less


def calls_of(sharding, *, window=0, documents=None, sends_within_windows=True):
    model = replace(MODEL, blocks=(BlockRun(window=window),)) if window else MODEL
    stack = replace(NEUTRAL, sends_within_windows=sends_within_windows)
    training = replace(TRAINING, documents=documents, stack=stack)
    block = PriceCache(model, training, MACHINE).divided_layer(BLOCK, 1, sharding)
    return context_calls(block.operator("attention"), sharding, 8, stack)


@pytest.mark.parametrize("form", [RING, ALL_GATHER])
@pytest.mark.parametrize(
    ("reach", "pieces"),
    [
        pytest.param({"window": 4096}, 2, id="the-piece-before-each"),
        pytest.param({"window": 4098}, 4, id="two-pieces-before-each"),
        pytest.param({"documents": Documents(lengths=((4096, 1),))}, 2, id="longest-document"),
        pytest.param(
            {"window": 9000, "documents": Documents(lengths=((4000, 1),))}, 2, id="the-shorter"
        ),
    ],
)
def test_a_stack_may_send_a_piece_to_those_ranks_alone_that_read_it(form, reach, pieces):
    sharding = Sharding(cp=4, context_form=form)  # of eight pieces of 4,096 tokens
    (forward,), (backward,) = calls_of(sharding, **reach)

    assert forward == ContextCall(
        kind=Collective.ALL_TO_ALL, ranks=4, num_bytes=pieces * local_bytes(8, KV), chosen=True
    )
    assert backward == replace(forward, calls=2)


@pytest.mark.parametrize(
    "how",
    [
        pytest.param({}, id="no-window"),
        pytest.param({"window": SEQUENCE}, id="window-of-the-sequence"),
        pytest.param({"window": 4096, "sends_within_windows": False}, id="a-stack-that-sends-all"),
        pytest.param({"documents": Documents(mean=500)}, id="no-document-is-known-to-be-longest"),
    ],
)
def test_all_keys_and_values_are_sent_where_nothing_bounds_the_reach(how):
    sharding = Sharding(cp=4, context_form=RING)

    assert calls_of(sharding, **how)[0] == (
        ContextCall(kind=None, ranks=4, num_bytes=local_bytes(4, KV), calls=3),
    )


def test_two_levels_send_pieces_of_groups_and_all_to_all_the_same_with_a_window():
    exchanges = {form: calls_of(Sharding(cp=8, context_form=form)) for form in ContextForm}
    windowed = {
        form: calls_of(Sharding(cp=8, context_form=form), window=1024) for form in ContextForm
    }

    assert windowed[ALL_TO_ALL] == exchanges[ALL_TO_ALL]
    assert windowed[TWO_LEVEL][0][:-1] == exchanges[TWO_LEVEL][0][:-1]
    assert windowed[TWO_LEVEL][0][-1].chosen
    assert not exchanges[TWO_LEVEL][0][-1].chosen


def test_a_window_that_is_sent_within_waits_less(prices):
    sharding = Sharding(cp=16, context_form=ALL_GATHER)
    windowed = replace(MODEL, blocks=(BlockRun(window=1024),))
    sends_all, sends_pieces = (
        PriceCache(
            windowed,
            replace(TRAINING, stack=replace(NEUTRAL, sends_within_windows=within)),
            MACHINE,
        )
        for within in (False, True)
    )

    assert all(
        less < more
        for less, more in zip(
            sent_s(sends_pieces, sharding), sent_s(sends_all, sharding), strict=True
        )
    )


@pytest.mark.parametrize(
    ("form", "cp", "tp", "near"),
    [
        (RING, 16, 1, 1),
        (ALL_GATHER, 16, 1, 1),
        (ALL_TO_ALL, 16, 1, 16),
        (ALL_TO_ALL, 64, 1, None),
        (ALL_TO_ALL, 8, 8, None),
        (TWO_LEVEL, 16, 1, 8),
        (TWO_LEVEL, 16, 2, 4),
        (TWO_LEVEL, 2, 1, None),
        (TWO_LEVEL, 8, 8, None),
    ],
)
def test_heads_and_nodes_decide_who_exchanges(form, cp, tp, near):
    assert ranks_with_heads(form, cp, tp, MODEL.num_heads, 8) == near


def test_a_form_that_cannot_divide_the_heads_says_why():
    mesh = Mesh(pp=1, dp=1, cp=64, tp=1, context_form=ALL_TO_ALL)
    inside = replace(mesh, cp=2, context_form=TWO_LEVEL)

    assert illegal_context(mesh, MODEL, CLUSTER) == "cp 64 does not divide the 32 heads of a rank"
    assert illegal_context(inside, MODEL, CLUSTER) == (
        "cp 2 has no part inside a node that divides the 32 heads"
    )
    uneven = replace(MODEL, num_heads=24, num_kv_heads=12)
    assert illegal_context(replace(mesh, cp=8), uneven, CLUSTER) == (
        "8 ranks cannot have equal parts of the 12 heads of keys of a rank"
    )
    assert illegal_context(replace(mesh, context_form=RING), MODEL, CLUSTER) is None


def test_the_images_of_a_tower_are_not_divided():
    seen = load_model("qwen2-vl-7b").spec
    mesh = Mesh(pp=1, dp=1, tp=1, cp=2, context_form=RING)

    assert illegal_context(mesh, seen, CLUSTER) == (
        "context parallelism does not divide the images of the vision tower"
    )
    assert illegal_context(mesh, text_alone(seen), CLUSTER) is None
    assert illegal_context(replace(mesh, cp=1, context_form=None), seen, CLUSTER) is None
