"""Megatron's optimum equals an independent enumeration; each baseline keeps its system's rules."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest

from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.price_cache import PriceCache
from parplan.costmodels.schedules.schedule import Schedule
from parplan.costmodels.step import StepPrice, price_step
from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.baselines.systems import (
    ALL,
    Baseline,
    baseline_names,
    baseline_strategies,
    price_baseline,
)
from parplan.planner.infeasible.shortfall import limit_bytes
from parplan.planner.request import SearchOptions
from parplan.planner.search.estimate import uniform_strategy
from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.hardware import Cluster
from parplan.profiles.machines.machine_catalog import load_cluster, with_gpus
from parplan.profiles.machines.shipped_profiles import machine_for
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.operator_graph import LayerKind
from parplan.profiles.models.spec import ModelSpec, TrainingSpec
from parplan.profiles.stack import NEUTRAL
from parplan.profiles.units import GIB
from tests.helpers.cases import named


@dataclass(frozen=True)
class Request:
    """A request; `slow_nic` is the share of the network's bandwidth that is left."""

    model: str
    gpus: int
    batch: int
    gpu: str = "a100-80gb"
    limit_gib: float | None = None
    slow_nic: float = 1.0

    def parts(self) -> tuple[ModelSpec, Cluster, TrainingSpec]:
        entry = load_model(self.model)
        cluster = with_gpus(load_cluster(self.gpu), self.gpus)
        cluster = replace(
            cluster, nic=replace(cluster.nic, bytes_per_s=cluster.nic.bytes_per_s * self.slow_nic)
        )
        return (
            entry.spec,
            cluster,
            TrainingSpec(global_batch_size=self.batch, seq_length=entry.seq_length, stack=NEUTRAL),
        )

    def price_cache(self) -> PriceCache:
        model, cluster, training = self.parts()
        return PriceCache(model, training, machine_for(cluster))

    def limit_bytes(self) -> float:
        _, cluster, training = self.parts()
        size = None if self.limit_gib is None else round(self.limit_gib * GIB)
        return limit_bytes(cluster, training.stack, SearchOptions(memory_limit_bytes=size))

    def baseline(self, name: str) -> Baseline:
        return price_baseline(name, self.price_cache(), self.limit_bytes())


SMALL = Request("gpt-1.5b", 8, 16)
TOWER = Request("gemma-3-4b", 8, 8)
# with fewer sequences than GPUs, Megatron-LM would also divide them, as the enumeration does not
BINDING = Request("llama2-7b", 16, 16, limit_gib=24.0, slow_nic=0.1)


def every_megatron_price(
    request: Request,
    keep: Callable[[ParallelLayout, int, Recompute], bool] = lambda *_: True,
) -> Iterator[tuple[ParallelLayout, int, Recompute, StepPrice]]:
    """Yields each strategy of Megatron-LM's space by its own rules, with its whole price."""
    model, cluster, _ = request.parts()
    price_cache = request.price_cache()
    gpus = request.gpus
    layers = model.num_layers
    for tp, pp in itertools.product(range(1, cluster.gpus_per_node + 1), range(1, layers + 3)):
        splits = (
            cluster.gpus_per_node,
            model.num_heads,
            model.num_kv_heads,
            model.ffn_hidden_size,
            model.padded_vocab_size,
        )
        if gpus % (tp * pp) or any(size % tp for size in splits):
            continue
        dp = gpus // tp // pp
        ends = ((0, 0), (0, 1), (1, 0), (1, 1)) if pp > 1 else ((0, 0),)
        for b, v, (embedding, loss) in itertools.product(
            range(1, request.batch + 1), range(1, layers + 3), ends
        ):
            counted = layers + embedding + loss
            if request.batch % (dp * b) or counted % (pp * v):
                continue
            m = request.batch // (dp * b)
            if v > 1 and (pp == 1 or m % pp):
                continue
            blocks = [counted // pp] * pp
            blocks[0] -= embedding
            blocks[-1] -= loss
            for sequence_parallel in {False, tp > 1}:
                layout = ParallelLayout(
                    mesh=Mesh(pp=pp, dp=dp, tp=tp),
                    schedule=Schedule.INTERLEAVED if v > 1 else Schedule.ONE_F_ONE_B,
                    virtual_stages=v,
                    micro_batch_size=b,
                    num_micro_batches=m,
                    sequence_parallel=sequence_parallel,
                )
                for zero, level in itertools.product((0, 1), Recompute):
                    if keep(layout, zero, level):
                        strategy = uniform_strategy(
                            layout, blocks, zero=zero, recompute=level, price_cache=price_cache
                        )
                        yield layout, zero, level, price_step(strategy, price_cache)


def peak_bytes(price: StepPrice) -> float:
    return max(memory.total for memory in price.memory)


@pytest.mark.slow
@pytest.mark.parametrize(
    "request_",
    [
        pytest.param(SMALL, id="gpt-1.5b-on-one-node"),
        pytest.param(
            Request("gpt-2.5b", 8, 8, gpu="a10g-24gb", limit_gib=14.0),
            id="gpt-2.5b-on-small-devices",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            Request("gpt-1.5b", 16, 16, slow_nic=0.01),
            id="gpt-1.5b-on-two-nodes-with-a-slow-network",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            BINDING, id="llama2-7b-on-two-nodes-where-memory-binds", marks=pytest.mark.slow
        ),
    ],
)
def test_the_megatron_optimum_equals_an_independent_enumeration(request_):
    everything = list(every_megatron_price(request_))
    limit = request_.limit_bytes()
    fitting_s = min(price.step_s for *_, price in everything if peak_bytes(price) <= limit)

    baseline = request_.baseline("megatron")
    optimum = baseline.optimum

    assert optimum is not None
    assert optimum.price.step_s == pytest.approx(fitting_s, rel=1e-12)
    assert peak_bytes(optimum.price) <= limit
    assert baseline.candidates == sum(
        zero == 0 or layout.mesh.dp > 1 for layout, zero, _, _ in everything
    )


@pytest.mark.slow
def test_memory_binds_in_the_request_that_says_so():
    unlimited = replace(BINDING, limit_gib=None).baseline("megatron").optimum
    limited = BINDING.baseline("megatron").optimum

    assert unlimited is not None
    assert limited is not None
    assert unlimited.price.step_s < limited.price.step_s
    assert peak_bytes(unlimited.price) > BINDING.limit_bytes()


@pytest.mark.slow
def test_the_leanest_of_what_does_not_fit_is_the_least_peak_of_the_enumeration():
    tight = Request("gpt-1.5b", 4, 4, limit_gib=2.0)

    baseline = tight.baseline("megatron")

    assert baseline.optimum is None
    assert baseline.leanest is not None
    assert baseline.leanest.peak_bytes == pytest.approx(
        min(peak_bytes(price) for *_, price in every_megatron_price(tight)), rel=1e-12
    )


def test_the_defaults_have_none_of_the_flags_and_as_little_model_parallelism_as_fits():
    request = Request("llama2-7b", 16, 32)
    optimum = request.baseline("megatron-defaults").optimum
    assert optimum is not None
    layout = optimum.strategy.layout

    def is_plain(f: ParallelLayout, zero: int, level: Recompute) -> bool:
        return (zero, level, f.sequence_parallel, f.virtual_stages, f.micro_batch_size) == (
            0,
            Recompute.NONE,
            False,
            1,
            1,
        )

    layers = request.parts()[0].num_layers
    whole = (
        (f, price)
        for f, _, _, price in every_megatron_price(request, is_plain)
        if layers % f.mesh.pp == 0
    )
    plain = {(f.mesh.tp, f.mesh.pp): peak_bytes(price) for f, price in whole}
    fitting = [degrees for degrees, peak in plain.items() if peak <= request.limit_bytes()]

    assert {choice.zero for stage in optimum.strategy.stages for choice in stage} == {0}
    assert math.prod((layout.mesh.tp, layout.mesh.pp)) == min(map(math.prod, fitting))
    assert (layout.mesh.tp, layout.mesh.pp) in fitting
    assert (layout.micro_batch_size, layout.virtual_stages, layout.sequence_parallel) == (
        1,
        1,
        False,
    )


@pytest.mark.parametrize(
    ("model", "limit_gib", "degrees"),
    [
        pytest.param("gpt-2.5b", None, (1, 1), id="data-parallelism-where-it-fits"),
        pytest.param("llama2-7b", None, (2, 1), id="then-tensor-parallelism"),
        pytest.param("llama2-7b", 12.0, (8, 2), id="then-pipeline-parallelism-at-the-whole-node"),
    ],
)
def test_the_guide_goes_from_data_to_tensor_to_pipeline_parallelism(model, limit_gib, degrees):
    optimum = Request(model, 16, 32, limit_gib=limit_gib).baseline("megatron-guide").optimum

    assert optimum is not None
    mesh = optimum.strategy.layout.mesh
    assert (mesh.tp, mesh.pp) == degrees
    assert optimum.strategy.layout.sequence_parallel == (mesh.tp > 1)


@pytest.mark.parametrize(
    ("name", "zero"), [("zero-1", 1), ("zero-2", 2), ("zero-3", 3), ("fsdp", 3)]
)
def test_the_zero_baselines_are_data_parallel_at_their_stage(name, zero):
    optimum = SMALL.baseline(name).optimum

    assert optimum is not None
    assert optimum.strategy.layout.mesh == Mesh(pp=1, dp=8, tp=1)
    assert {choice.zero for stage in optimum.strategy.stages for choice in stage} == {zero}


def test_no_baseline_of_the_megatron_family_beats_its_optimum():
    best = SMALL.baseline("megatron").optimum
    assert best is not None
    for name in ("megatron-defaults", "megatron-guide", "zero-1"):
        optimum = SMALL.baseline(name).optimum
        assert optimum is not None
        assert best.price.step_s <= optimum.price.step_s * (1 + 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(
    "request_",
    named(
        {
            "free": Request("gpt-1.5b", 4, 8),
            "memory-binds": Request("gpt-1.5b", 4, 8, limit_gib=14.0),
        },
        {"memory-binds"},
    ),
)
def test_megatron_is_the_faster_of_itself_with_and_without_interleaving(request_):
    parts = [request_.baseline(name) for name in ("megatron-1f1b", "megatron-interleaved")]
    whole, fitting = request_.baseline("megatron"), [part.optimum for part in parts if part.optimum]

    assert whole.candidates == sum(part.candidates for part in parts)
    assert whole.optimum is not None
    assert whole.optimum.price.step_s == min(optimum.price.step_s for optimum in fitting)
    for part, interleaves in zip(parts, (False, True), strict=True):
        if part.optimum:
            assert (part.optimum.strategy.layout.virtual_stages > 1) is interleaves


def every_deepspeed_price(request: Request) -> Iterator[tuple[ParallelLayout, StepPrice]]:
    """Enumerates DeepSpeed's space, whose stages have equal blocks (`type:transformer`)."""
    model, cluster, _ = request.parts()
    price_cache = request.price_cache()
    for tp, pp in itertools.product(
        range(1, cluster.gpus_per_node + 1), range(1, request.gpus + 1)
    ):
        if request.gpus % (tp * pp) or any(
            size % tp for size in (cluster.gpus_per_node, model.num_heads, model.padded_vocab_size)
        ):
            continue
        dp = request.gpus // tp // pp
        for b in (size for size in range(1, request.batch + 1) if request.batch % (dp * size) == 0):
            layout = ParallelLayout(
                mesh=Mesh(pp=pp, dp=dp, tp=tp),
                schedule=Schedule.ONE_F_ONE_B,
                virtual_stages=1,
                micro_batch_size=b,
                num_micro_batches=request.batch // dp // b,
                sequence_parallel=False,
            )
            blocks = [model.num_layers // pp + (rank < model.num_layers % pp) for rank in range(pp)]
            zeros = (0, 1) if pp > 1 else (0, 1, 2, 3)
            for zero, level in itertools.product(
                zeros if dp > 1 else (0,), (Recompute.NONE, Recompute.FULL)
            ):
                yield (
                    layout,
                    price_step(
                        uniform_strategy(
                            layout, blocks, zero=zero, recompute=level, price_cache=price_cache
                        ),
                        price_cache,
                    ),
                )


@pytest.mark.slow
@pytest.mark.parametrize(
    "request_",
    [
        pytest.param(Request("gpt-1.5b", 4, 8), id="free"),
        pytest.param(
            Request("gpt-2.5b", 8, 8, gpu="a10g-24gb", limit_gib=14.0),
            id="memory-binds",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_deepspeed_is_no_slower_than_its_stages_of_equal_blocks_and_has_no_sequence_parallelism(
    request_,
):
    optimum = request_.baseline("deepspeed-3d").optimum
    equal = [
        price
        for _, price in every_deepspeed_price(request_)
        if peak_bytes(price) <= request_.limit_bytes()
    ]

    assert optimum is not None
    assert optimum.price.step_s <= min(price.step_s for price in equal) * (1 + 1e-12)
    assert peak_bytes(optimum.price) <= request_.limit_bytes()
    assert not optimum.strategy.layout.sequence_parallel
    zeros = {choice.zero for stage in optimum.strategy.stages for choice in stage}
    assert optimum.strategy.layout.mesh.pp == 1 or zeros <= {0, 1}
    if [len(stage) for stage in optimum.strategy.stages] == [
        len(stage) for stage in uniform_blocks(request_, optimum.strategy.layout)
    ]:
        assert optimum.price.step_s == pytest.approx(
            min(price.step_s for price in equal), rel=1e-12
        )


def uniform_blocks(request: Request, layout: ParallelLayout):
    layers, pp = request.parts()[0].num_layers, layout.mesh.pp
    blocks = [layers // pp + (rank < layers % pp) for rank in range(pp)]
    return uniform_strategy(
        layout, blocks, zero=0, recompute=Recompute.NONE, price_cache=request.price_cache()
    ).stages


def test_merak_is_no_slower_than_1f1b_of_whole_layers_and_within_memory():
    tight = Request("gpt-1.5b", 4, 8, gpu="a10g-24gb", limit_gib=12.0)
    optimum = tight.baseline("merak").optimum
    plain = every_megatron_price(
        tight, lambda f, _, level: f.virtual_stages == 1 and level is Recompute.NONE
    )
    fitting = [price.step_s for *_, price in plain if peak_bytes(price) <= tight.limit_bytes()]

    assert optimum is not None
    assert optimum.price.step_s <= min(fitting) * (1 + 1e-12)
    assert peak_bytes(optimum.price) <= tight.limit_bytes()


@pytest.mark.slow
def test_the_embedding_and_the_loss_may_count_as_layers_where_the_layers_alone_do_not_divide():
    uneven = Request(
        "llama3-405b", 512, 256, gpu="h100-80gb"
    )  # 126 layers: of powers of two only 2 divides them

    optimum = uneven.baseline("megatron").optimum

    assert optimum is not None
    assert optimum.strategy.layout.mesh.pp > 2
    lengths = [
        sum(choice.kind is LayerKind.BLOCK for choice in stage) for stage in optimum.strategy.stages
    ]
    assert sum(lengths) == 126
    assert lengths[0] == lengths[-1] == lengths[1] - 1
    assert uneven.baseline("megatron-defaults").optimum is None


def test_a_batch_that_the_gpus_do_not_divide_leaves_data_parallelism_no_strategy():
    baseline = Request("gpt-1.5b", 16, 8).baseline("zero-3")

    assert (baseline.candidates, baseline.optimum, baseline.leanest) == (0, None, None)


def test_megatron_brings_its_companions_and_all_is_all_each_once():
    family = ("megatron", "megatron-defaults", "megatron-guide")

    assert baseline_names(["megatron"]) == family
    assert baseline_names(["zero-3", "megatron", "megatron-guide"]) == ("zero-3", *family)
    assert set(baseline_names([ALL])) == {
        *family,
        "deepspeed-3d",
        "torchtitan",
        "merak",
        "zero-1",
        "zero-2",
        "zero-3",
        "fsdp",
    }
    assert baseline_names(["3d"]) == (
        "megatron-1f1b",
        "megatron-interleaved",
        "deepspeed-3d",
        "merak",
    )


def test_an_unknown_baseline_is_refused_with_the_nearest_name():
    with pytest.raises(ConfigError, match="unknown baseline 'megatrom'") as error:
        baseline_names(["megatrom"])

    assert error.value.hint == "did you mean 'megatron'?"


@pytest.mark.parametrize("name", ["megatron", "torchtitan", "deepspeed-3d"])
def test_stages_divide_the_blocks_of_the_language_model_and_the_first_has_the_tower(
    name: str,
) -> None:
    """34 blocks are divided by 2; with the 29 layers of the tower they would not be."""
    price_cache = TOWER.price_cache()
    tower = price_cache.model.num_blocks - price_cache.model.num_layers
    every = baseline_strategies(name, price_cache, TOWER.limit_bytes())
    pipelines = [strategy for strategy in every if len(strategy.stages) == 2]
    assert tower == 29
    assert pipelines
    for strategy in pipelines:
        assert sum(map(len, strategy.stages)) == price_cache.num_layers
        assert all(str(choice.kind).startswith("vision") for choice in strategy.stages[0][1:30])
        first = len(strategy.stages[0]) - 1 - tower
        assert first == 17 or (name == "deepspeed-3d" and first < 17)  # cut by parameters
