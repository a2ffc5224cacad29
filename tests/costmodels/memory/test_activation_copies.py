"""Prices of activations on the host: bytes by operator, copies under compute, and useful lists."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest

from parplan.costmodels.layers.recompute import (
    Recompute,
    host_bytes_by_operator,
    saved_bytes,
    saved_tensors,
)
from parplan.costmodels.memory.activation_copies import copied_bytes, exposed_copies
from parplan.costmodels.memory.rank_memory import layer_activations, rank_activations, rank_layers
from parplan.costmodels.operators.sharding import Sharding
from parplan.costmodels.price_cache import PriceCache
from parplan.costmodels.step import price_step
from parplan.costmodels.strategy import Strategy
from parplan.planner.host_options.activation_options import (
    host_options,
    named_operators,
    with_offloaded_activations,
)
from parplan.planner.plan.plan_file import read_plan, write_plan
from parplan.planner.plan.reprice import reprice
from parplan.profiles.errors import ConfigError, InfeasibleError
from parplan.profiles.machines.machine_catalog import load_cluster, with_gpus
from parplan.profiles.machines.shipped_profiles import machine_for
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.operator_graph import LayerKind
from parplan.profiles.models.spec import TrainingSpec
from parplan.profiles.provenance import Kind
from parplan.profiles.stack import NEUTRAL
from tests.helpers.planning import estimate_plan
from tests.helpers.uniform_strategies import A100, TINY, frame_of, uniform

TRAINING = TrainingSpec(global_batch_size=64, seq_length=128, stack=NEUTRAL)
FRAME = frame_of(m=4)
BLOCK = LayerKind.BLOCK


def book_of(model=TINY, cluster=A100, training=TRAINING) -> PriceCache:
    return PriceCache(model, training, machine_for(cluster))


def slow_book(rate: float) -> PriceCache:
    """One whose PCIe moves `rate` bytes a second."""
    return book_of(cluster=replace(A100, pcie_bytes_per_s=rate, pcie_node_bytes_per_s=None))


@pytest.mark.parametrize("recompute", [(), ("norm1", "activation"), ("attention",)])
def test_what_the_operators_send_is_what_the_block_keeps_tensor_by_tensor(recompute):
    layer = book_of().kept_layer(BLOCK, 2)

    sent = host_bytes_by_operator(layer, Sharding(), recompute)

    assert (
        sum(sent.values())
        == sum(tensor.num_bytes for tensor in saved_tensors(layer, recompute))
        == saved_bytes(layer, Sharding(), recompute)
    )
    for name, n_bytes in sent.items():
        assert (
            saved_bytes(layer, Sharding(), recompute, on_host=(name,))
            == saved_bytes(layer, Sharding(), recompute) - n_bytes
        )


def test_a_tensor_that_two_operators_keep_goes_with_the_first():
    """Flash attention saves its output before the projection does, unless it is recomputed."""
    layer = book_of().kept_layer(BLOCK, 1)
    tensors = {tensor.name: tensor.num_bytes for tensor in saved_tensors(layer, ())}

    plain = host_bytes_by_operator(layer, Sharding(), ())
    recomputed = host_bytes_by_operator(layer, Sharding(), ("attention",))

    assert (
        plain["attention"] == tensors["qkv"] + tensors["context"] + tensors["attention_logsumexp"]
    )
    assert (plain["attention_out"], recomputed["attention"], recomputed["attention_out"]) == (
        0,
        tensors["qkv"],
        tensors["context"],
    )


def test_the_input_of_a_block_that_runs_again_as_a_whole_is_sent_once():
    layer = book_of().kept_layer(BLOCK, 1)
    every = tuple(operator.name for operator in layer.operators)

    sent = host_bytes_by_operator(layer, Sharding(), every)

    assert {name: n_bytes for name, n_bytes in sent.items() if n_bytes} == {
        "norm1": 128 * TINY.hidden_size * 2
    }


@pytest.mark.parametrize("share", [0.5, 2.0, 8.0])
def test_copies_wait_for_what_their_blocks_passes_do_not_hide(share):
    """Three blocks, two with copies, which take `share` of a forward pass each way."""
    names, plain = ("norm1", "fc2"), book_of()
    n_bytes = plain.activations(BLOCK, 1, Sharding(), (), names).host
    time = plain.layer_time(BLOCK, 1, Sharding())
    price_cache, copy_s = slow_book(n_bytes / (share * time.forward_s)), share * time.forward_s
    first, middle, second = (
        choice for choice in rank_layers(uniform(FRAME, 3), 0) if choice.kind is BLOCK
    )
    chunk = (replace(first, on_host=names), middle, replace(second, on_host=names))

    out, back = exposed_copies(chunk, FRAME, price_cache)

    assert out.value_s == pytest.approx(2 * max(0.0, copy_s - time.forward_s), rel=1e-9)
    assert back.value_s == pytest.approx(max(0.0, copy_s - time.backward_s) + copy_s, rel=1e-9)
    assert {out.kind, back.kind} <= {Kind.ANALYTIC, Kind.MEASURED}


def test_where_the_device_is_the_host_every_copy_is_waited_for():
    price_cache = book_of(
        cluster=with_gpus(load_cluster("cpu"), 1), training=replace(TRAINING, precision="fp32")
    )
    strategy = with_offloaded_activations(uniform(FRAME, 8), ("fc1",))

    out, back = exposed_copies(strategy.stages[0], FRAME, price_cache)

    copy_s = 8 * price_cache.host_copy(BLOCK, 1, Sharding(), (), ("fc1",), to_host=True).value_s
    assert (out.value_s, back.value_s) == pytest.approx((copy_s, copy_s), rel=1e-9)


def test_a_device_holds_what_two_blocks_send_and_its_host_all_of_it():
    strategy, price_cache = uniform(FRAME, 8), book_of()
    moved = with_offloaded_activations(strategy, ("attention", "fc1"))
    sent = price_cache.activations(BLOCK, 1, Sharding(), (), ("attention", "fc1")).host
    plain = price_step(strategy, price_cache).memory[0]
    less = price_step(moved, price_cache).memory[0]

    assert less.host == 8 * sent == copied_bytes(moved, 0, price_cache) // FRAME.num_micro_batches
    assert less.activations == plain.activations - 8 * sent
    sizes = rank_activations(moved, 0, price_cache)
    more = {
        choice.kind: size.workspace - layer_activations(choice, FRAME, price_cache).workspace
        for choice, size in sizes.items()
    }
    assert more == dict.fromkeys(LayerKind, sent)
    alone = Strategy(
        layout=FRAME,
        stages=(
            tuple(
                replace(choice, on_host=()) if choice.kind is BLOCK and index > 1 else choice
                for index, choice in enumerate(moved.stages[0])
            ),
        ),
    )
    assert {
        choice.on_host: size.workspace - layer_activations(choice, FRAME, price_cache).workspace
        for choice, size in rank_activations(alone, 0, price_cache).items()
        if choice.kind is BLOCK
    } == {("attention", "fc1"): 0, (): sent}


@pytest.mark.parametrize(
    "level", [Recompute.NONE, Recompute.SELECTIVE, ("norm1", "fc1"), Recompute.FULL], ids=str
)
@pytest.mark.parametrize("rate", [1e7, 1e9, 1e12])
def test_the_lists_have_nothing_all_and_the_most_that_is_hidden(rate, level):
    price_cache = slow_book(rate)
    kept = {
        name: size
        for name, size in host_bytes_by_operator(
            price_cache.kept_layer(BLOCK, 2),
            Sharding(),
            price_cache.recompute_operators(BLOCK, level),
        ).items()
        if size
    }
    time = price_cache.layer_time(BLOCK, 2, Sharding(), level)
    hidden_bytes = rate * min(time.forward_s, time.backward_s + time.recompute_s)
    under = (
        sum(kept[name] for name in names)
        for count in range(len(kept) + 1)
        for names in combinations(kept, count)
    )

    options = host_options(2, Sharding(), level, price_cache)

    assert (options[0].on_host, options[-1].on_host) == ((), tuple(kept))
    sizes = [option.host_bytes for option in options]
    assert sizes == sorted(set(sizes))
    assert max(size for size in under if size <= hidden_bytes) == max(
        o.host_bytes for o in options if not o.waited_s
    )
    for option in options:
        assert option.host_bytes == sum(kept[name] for name in option.on_host)
        assert option.saved_bytes == options[0].saved_bytes - option.host_bytes
        assert option.copied_s == pytest.approx(2 * option.host_bytes / rate, rel=1e-9)


def test_a_list_in_a_plan_file_is_priced_again_as_it_was(tmp_path):
    entry = load_model("gpt-1.5b")
    training = TrainingSpec(global_batch_size=16, seq_length=entry.seq_length, stack=NEUTRAL)
    plan = estimate_plan(
        entry.spec,
        A100,
        training,
        frame_of(dp=8, m=2),
        zero=1,
        recompute=Recompute.SELECTIVE,
        keep_on_host=("fc2", "attention", "norm1"),
    )
    names = next(
        layer_plan.keep_on_host
        for layer_plan in plan.layer_plans.values()
        if layer_plan.layer is BLOCK
    )
    write_plan(plan, tmp_path / "plan.yaml")

    assert set(names) < {"norm1", "attention", "fc2"}
    assert reprice(read_plan(tmp_path / "plan.yaml")).plan == plan


def test_names_that_no_operator_has_are_refused_and_all_is_all_that_is_kept():
    price_cache = book_of()

    assert named_operators(["all"], Recompute.FULL, price_cache) == ("norm1",)
    with pytest.raises(ConfigError, match="unknown operator 'fc3'"):
        named_operators(["fc3"], Recompute.NONE, price_cache)


def test_a_host_that_is_too_small_for_the_activations_is_refused():
    small = replace(A100, host_memory_bytes=2**20)

    with pytest.raises(
        InfeasibleError, match=r"the hosts need .* GiB a node for what is offloaded, they have 0\.0"
    ):
        estimate_plan(TINY, small, TRAINING, frame_of(dp=8, m=8), keep_on_host=("all",))
