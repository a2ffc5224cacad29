"""Traced models cut into shards: the partitioner on hand-made graphs, and shards of stages."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product

import pytest

from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.operators.sharding import Sharding
from parplan.planner.traced.repeated_blocks import repeated_blocks
from parplan.planner.traced.shard_classes import ShardClasses
from parplan.planner.traced.shard_flow import Flow
from parplan.planner.traced.shard_price_cache import ShardPriceCache
from parplan.planner.traced.shards import Cutting, shard
from parplan.planner.traced.stage_rules import StageRule, StageRuleKind, parse_stages, ranges
from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.machine_catalog import load_cluster
from parplan.profiles.machines.shipped_profiles import machine_for
from parplan.profiles.models.spec import ModelSpec, TrainingSpec
from parplan.profiles.stack import NEUTRAL
from tests.helpers.traced_models import activation, join, linear, model_of, traced_spec, value

GPT = ModelSpec(
    name="gpt",
    num_layers=4,
    hidden_size=64,
    num_heads=4,
    num_kv_heads=4,
    head_dim=16,
    ffn_hidden_size=256,
    vocab_size=512,
    max_seq_length=64,
)
TRAINING = TrainingSpec(global_batch_size=8, seq_length=32, stack=NEUTRAL)


def chain(size: int) -> list:
    """Returns `size` linears with a relu behind each, in modules l0, l1, ..."""
    operators = []
    for number in range(size):
        x = value(f"y{number - 1}") if number else value("batch_x")
        operators += [
            linear(f"l{number}", x, f"h{number}"),
            activation(f"l{number}", value(f"h{number}"), f"y{number}"),
        ]
    return operators


def cuts(sharded) -> list[list[str]]:
    """Returns the names that each cut hands on."""
    return [[name for name, _ in cut] for cut in sharded.cuts[1:]]


def test_the_blocks_of_a_gpt_are_found_and_each_is_two_shards_between_its_embedding_and_its_head():
    sharded = shard(traced_spec(GPT, TRAINING))

    assert len(sharded.blocks) == 4
    assert [shard_.name for shard_ in sharded.shards] == [
        "wte",
        *(f"h.{k} ({part})" for k in range(4) for part in ("ln_1, attn", "ln_2, mlp")),
        "head",
    ]
    assert sharded.shards[0].apart
    inside = (
        [f"h.{k}.residual1"] if half == 0 else [f"stream_{k + 1}"]
        for k, half in product(range(4), (0, 1))
    )
    assert cuts(sharded) == [["stream_0"], *inside]


def test_shards_cover_all_operators_once_and_hold_all_parameters():
    model = traced_spec(GPT, TRAINING)
    sharded = shard(model)

    assert sharded.shards[0].first == 0
    assert all(first.end == second.first for first, second in pairwise(sharded.shards))
    assert sharded.shards[-1].end == len(model.operators)
    tied = 512 * 64  # the token table, which embedding and head hold
    assert sum(shard_.parameters for shard_ in sharded.shards) == model.num_parameters + tied
    assert [(name, shards) for name, _, shards in sharded.shared] == [("wte.tokens.weight", (0, 9))]


def test_a_module_that_is_called_again_and_again_is_a_block_each_time():
    operators, x = [], value("batch_x")
    for time in range(3):
        operators += [
            linear("inner.a", x, f"a{time}", 16, weight="a.weight"),
            linear("inner.b", value(f"a{time}", 16), f"b{time}", weight="b.weight"),
        ]
        x = value(f"b{time}")

    assert [(block.first, block.end) for block in repeated_blocks(model_of(*operators))] == [
        (0, 2),
        (2, 4),
        (4, 6),
    ]


def test_alike_linears_in_one_module_are_no_blocks():
    x = value("batch_x")
    operators = [linear(f"attention.{name}", x, name) for name in "qkv"]

    assert (
        repeated_blocks(model_of(*operators, join("", (value("q"), value("k"), value("v")), "out")))
        == ()
    )


def test_a_skip_connection_is_never_crossed_unless_it_is_asked_for():
    operators = [
        *chain(4),
        join("out", (value("y3"), value("y0")), "sum"),
        linear("last", value("sum"), "loss"),
    ]
    model = model_of(*operators)

    held = shard(model)
    crossed = shard(model, Cutting(cross_skips=True))

    assert [shard_.name for shard_ in held.shards] == ["l0", "l1 to l3", "last"]
    assert cuts(held) == [["y0"], ["sum"]]
    assert ["y0", "y2"] in cuts(crossed)
    assert len(crossed.shards) > len(held.shards)


def test_skips_of_a_u_shape_hold_their_inside_together():
    down = [
        linear("down.0", value("batch_x"), "d0"),
        linear("down.1", value("d0"), "d1"),
        linear("middle", value("d1"), "m"),
    ]
    up = [
        join("up.0", (value("m"), value("d1")), "u0"),
        linear("up.0", value("u0"), "v0"),
        join("up.1", (value("v0"), value("d0")), "u1"),
        linear("up.1", value("u1"), "v1"),
        linear("head", value("v1"), "loss"),
    ]

    sharded = shard(model_of(*down, *up))

    assert cuts(sharded) == [["d0"], ["u1"], ["v1"]]


def test_a_value_that_several_later_units_read_is_handed_on():
    encoder = [
        linear("encoder.0", value("batch_x"), "e0"),
        linear("encoder.1", value("e0"), "memory"),
    ]
    operators, x = [*encoder, linear("start", value("batch_x"), "s")], value("s")
    for number in range(3):
        operators += [
            linear(f"decoder.{number}.q", x, f"q{number}"),
            join(f"decoder.{number}", (value(f"q{number}"), value("memory")), f"o{number}"),
        ]
        x = value(f"o{number}")

    handed = cuts(shard(model_of(*operators, linear("head", x, "loss"))))

    assert ["memory", "s"] in handed
    assert ["memory", "o0"] in handed
    assert ["o2"] in handed


def test_an_operator_in_place_stays_with_what_it_writes():
    operators = chain(4)
    operators[3] = join("l1", (value("h1"),), "y1", in_place=True)
    model = model_of(*operators)

    firsts = {shard_.first for shard_ in shard(model).shards}

    assert 3 not in firsts
    assert 4 in firsts


def test_a_view_is_no_value_of_its_own():
    operators = [
        linear("a", value("batch_x"), "y"),
        join("b", (value("y"),), "y", view=True),
        linear("b", value("y"), "z"),
        join("b", (value("z"), value("y")), "sum"),
        linear("c", value("sum"), "loss"),
    ]

    assert cuts(shard(model_of(*operators))) == [["y"], ["sum"]]


def test_constants_belong_to_no_shard_and_are_not_handed_on():
    mask = join("mask", (value("batch_x"),), "mask", constant=True)
    operators = [
        mask,
        *chain(2),
        join("l1", (value("y1"), value("mask")), "masked"),
        linear("head", value("masked"), "loss"),
    ]
    sharded = shard(model_of(*operators))

    flow = Flow(ShardClasses(sharded))

    assert all("mask" not in cut for cut in cuts(sharded))
    assert flow.needed_constants == {0: (sharded.shard_of[5],)}


def test_a_shard_of_few_parameters_goes_to_the_neighbour_with_which_it_shares_more():
    wide, narrow = 64, 8
    operators = [
        linear("a", value("batch_x", wide), "a", wide),
        linear("b", value("a", wide), "b", narrow),
        linear("s", value("b", narrow), "s", narrow),
        linear("c", value("s", narrow), "c", wide),
        linear("d", value("c", wide), "d", wide),
    ]

    sharded = shard(model_of(*operators, inputs=(value("batch_x", wide),)))

    assert "s" not in [shard_.name for shard_ in sharded.shards]
    assert sum(shard_.parameters for shard_ in sharded.shards) == 64 * 64 * 2 + 64 * 8 * 2 + 64


def test_of_cuts_with_as_many_parameters_the_one_that_hands_on_least_is_taken():
    pool = join("pool", (value("a", 64),), "pooled", 16)
    operators = [
        linear("a", value("batch_x", 64), "a", 64),
        pool,
        join("pool", (value("pooled", 16),), "again", 32),
        linear("b", value("again", 32), "b", 64),
        linear("c", value("b", 64), "loss", 64),
    ]

    assert cuts(shard(model_of(*operators))) == [["pooled"], ["b"]]


def test_shards_that_are_alike_are_one_class():
    classes = ShardClasses(shard(traced_spec(GPT, TRAINING)))

    assert classes.of == [0, 1, 2, 1, 2, 1, 2, 1, 2, 3]


def test_what_a_stage_keeps_is_the_union_of_what_its_shards_keep():
    """An output that its maker and the next shard both save counts once, whatever the range."""
    sharded = shard(model_of(*chain(5), linear("head", value("y4"), "loss")))
    prices = ShardPriceCache(
        sharded, replace(TRAINING, global_batch_size=2), machine_for(load_cluster("a100-80gb"))
    )
    flow, size = Flow(ShardClasses(sharded)), len(sharded.shards)
    saved = [
        {
            tensor.name: tensor.num_bytes
            for traced in sharded.model.operators[shard_.first : shard_.end]
            for tensor in traced.operator.saved
        }
        for shard_ in sharded.shards
    ]
    saved_alone = [
        prices.activations(prices.key(k, k), 2, Sharding(), Recompute.NONE).saved
        for k in range(size)
    ]

    besides = flow.besides(2)

    for first, end in ((i, j) for i in range(size) for j in range(i + 1, size + 1)):
        union: dict[str, int] = {}
        for tensors in saved[first:end]:
            union.update(
                {name: num_bytes for name, num_bytes in tensors.items() if name != "batch_x"}
            )
        batch = saved[0].get("batch_x", 0) if first == 0 else 0
        assert sum(saved_alone[first:end]) + besides[first, end] == sum(union.values()) + batch


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("uniform", StageRule(rule=StageRuleKind.UNIFORM)),
        ("ilp", StageRule()),
        ("2,3,5", StageRule(rule=StageRuleKind.CUSTOM, counts=(2, 3, 5))),
    ],
)
def test_what_stages_says(text, expected):
    assert parse_stages(text) == expected


@pytest.mark.parametrize("text", ["h 1", "0,4", "1,,2", "-1", "h.1,", "h.1,2"])
def test_what_stages_cannot_say(text):
    with pytest.raises(ConfigError, match="--stages"):
        parse_stages(text)


def test_shards_are_given_to_stages_by_number_by_parameters_and_by_counts():
    sharded = shard(traced_spec(GPT, TRAINING))
    sizes = [shard_.parameters for shard_ in sharded.shards]

    assert ranges(StageRule(rule=StageRuleKind.UNIFORM), sharded, 4) == (
        (0, 3),
        (3, 6),
        (6, 8),
        (8, 10),
    )
    assert ranges(parse_stages("1,4,4,1"), sharded, 4) == ((0, 1), (1, 5), (5, 9), (9, 10))
    by_parameters = ranges(StageRule(rule=StageRuleKind.PARAMETERS), sharded, 3)
    largest = max(sum(sizes[first:end]) for first, end in by_parameters)
    assert largest == min(
        max(sum(sizes[:a]), sum(sizes[a:b]), sum(sizes[b:]))
        for a in range(1, 9)
        for b in range(a + 1, 10)
    )
    with pytest.raises(ConfigError, match="has 10"):
        ranges(parse_stages("1,4"), sharded, 2)
