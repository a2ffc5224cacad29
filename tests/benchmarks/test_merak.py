"""Shares multiply to the whole, and every baseline has only what it had in 2022."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from benchmarks.papers import merak
from benchmarks.papers.merak_shares import (
    BASELINES,
    PLAIN,
    Link,
    chain,
    plain_layouts,
    same_layout_chains,
    setting_of,
    whole,
)
from parplan.costmodels.layers.recompute import Recompute
from parplan.planner.baselines.systems import baseline_strategies
from parplan.profiles.models.operator_graph import LayerKind

TECHNIQUES = ["+ shifted critical path", "+ stage-aware recompute", "+ sub-pipelining"]


@pytest.fixture(scope="module")
def setting():
    """A small cluster with a model that tensor parallelism can divide."""
    return setting_of("gpt-2.5b", 8, 16)


@pytest.fixture(scope="module")
def document():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merak, "GPUS", 8)
        result = CliRunner().invoke(
            merak.main,
            ["--models", "gpt-2.5b", "--global-batch-size", "16", "--json"],
            catch_exceptions=False,
        )
    return json.loads(result.stdout)


def rows_of(document, comparison):
    return [row for row in document["rows"] if row["comparison"] == comparison]


@pytest.mark.slow
def test_every_baseline_and_technique_has_a_row(document):
    best, *same = (rows_of(document, name) for name in document["summaries"][0]["speedup"])

    assert [row["system"] for row in best] == [*BASELINES, PLAIN, *TECHNIQUES]
    for rows in same:
        assert [row["system"] for row in rows] == ["1F1B, all layers recomputed", *TECHNIQUES]
        assert "recompute full 54" in rows[0]["plan"]
    assert document["kind"] == "analytic"


def test_the_product_of_the_shares_is_the_whole(document):
    (summary,) = document["summaries"]

    for comparison, speedup in summary["speedup"].items():
        rows = rows_of(document, comparison)
        shares = [row["share"] for row in rows if row["share"]]
        start = min(row["step_s"] for row in rows if not row["share"])

        assert math.prod(shares) == pytest.approx(speedup, rel=1e-12)
        assert start / rows[-1]["step_s"] == pytest.approx(speedup, rel=1e-12)


def test_shares_by_hand(setting):
    """A start of twice the last step has a speed-up of two, whatever the links between."""
    layouts = plain_layouts(setting)
    fastest = chain(_start(setting), setting, layouts, plain=True)[-1]
    start = SimpleNamespace(name="twice", step_s=2 * fastest.step_s, share=None)

    links = chain(start, setting, layouts, plain=True)

    assert whole(links) == pytest.approx(2.0)
    assert [link.share for link in links[1:]] == [
        pytest.approx(before.step_s / after.step_s) for before, after in pairwise(links)
    ]


def _start(setting):
    space = baseline_strategies("deepspeed-3d", setting.price_cache, setting.limit_bytes)
    optimum = setting.fastest(space)
    assert optimum is not None
    return Link(name="DeepSpeed 3D", optimum=optimum)


def test_a_technique_never_makes_the_step_longer(setting):
    chains = same_layout_chains(setting)

    assert chains
    for links in chains:
        assert all(link.share is None or link.share >= 1 for link in links)
        assert len({(link.optimum.strategy.layout.mesh, _size(link)) for link in links}) == 1


def _size(link):
    return link.optimum.strategy.layout.micro_batch_size


def test_the_best_baseline_is_the_one_with_the_least_speed_up_over_it(document):
    (summary,) = document["summaries"]

    assert min(summary["over"].values()) == pytest.approx(summary["speedup"][merak.BEST])


def test_stages_of_megatron_in_2021_have_equally_many_blocks(setting):
    for name in ("megatron-1f1b-2021", "megatron-interleaved-2021"):
        for strategy in baseline_strategies(name, setting.price_cache, setting.limit_bytes):
            counts = [
                sum(choice.kind is LayerKind.BLOCK for choice in stage) for stage in strategy.stages
            ]
            assert len(set(counts)) == 1


@pytest.mark.parametrize("name", BASELINES.values())
def test_baselines_have_what_they_had_in_2022(setting, name):
    space = baseline_strategies(name, setting.price_cache, setting.limit_bytes)

    assert space
    for strategy in space:
        layout = strategy.layout
        blocks = {choice for choice in _choices(strategy) if choice.kind is LayerKind.BLOCK}
        zeros = {choice.zero for choice in _choices(strategy)}
        assert layout.mesh.tp <= 4  # GPUs of a node
        assert not layout.sequence_parallel
        assert not layout.tp_overlap
        assert {choice.recompute for choice in blocks} in ({Recompute.NONE}, {Recompute.FULL})
        assert len(zeros) == 1
        assert max(zeros) <= _most_zero(name, layout.mesh.pp)


def _choices(strategy):
    return [choice for stage in strategy.stages for choice in stage]


def _most_zero(name, pp):
    """DeepSpeed has ZeRO 1 in a pipeline and 3 without; Megatron-LM v2.5 has none."""
    if name != "deepspeed-3d":
        return 0
    return 1 if pp > 1 else 3


def test_pins_hold_for_every_system(setting):
    pinned = replace(setting, tp=4, micro_batch_size=2)
    optimum = pinned.fastest(
        baseline_strategies("megatron-1f1b-2021", pinned.price_cache, pinned.limit_bytes)
    )

    assert optimum is not None
    assert (optimum.strategy.layout.mesh.tp, optimum.strategy.layout.micro_batch_size) == (4, 2)


def test_a_slower_link_makes_tensor_parallel_steps_longer(setting):
    slower = setting_of("gpt-2.5b", 8, 16, link_share=0.5)
    ends = [
        min(links[-1].step_s for links in same_layout_chains(case)) for case in (setting, slower)
    ]

    assert ends[0] < ends[1]
