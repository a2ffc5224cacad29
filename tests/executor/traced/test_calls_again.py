"""Recompute lists of traced modules free the bytes that they say, and change no gradient."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, fx
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from parplan.costmodels.layers.recompute import saved_tensors
from parplan.costmodels.operators.sharding import Sharding
from parplan.executor.traced.calls_again import calls_again
from parplan.executor.traced.program_cut import cut_program
from parplan.executor.traced.shard_module import ShardModule
from parplan.executor.traced.traced_trainer import open_plan_module
from parplan.planner.layer_options.recompute_lists import recompute_lists
from parplan.planner.plan.pipeline_plan import LayerRange
from parplan.planner.plan.traced_plan import ShardStage
from parplan.planner.traced.assemble_traced import shard_plans
from parplan.planner.traced.shard_price_cache import ShardPriceCache
from parplan.planner.traced.shards import shard
from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.machine_catalog import load_cluster
from parplan.profiles.machines.shipped_profiles import machine_for
from parplan.profiles.tracing.record import record
from parplan.profiles.tracing.trace import trace
from tests.helpers.cases import mostly_slow
from tests.helpers.traced_modules import HUGGING_FACE
from tests.helpers.traced_plans import hand_plan

MODULES = {
    "t5": HUGGING_FACE["t5"],
    "vit": HUGGING_FACE["vit"],
    "bert": {**HUGGING_FACE["bert"], "attention_probs_dropout_prob": 0.5},
}
CPU = torch.device("cpu")


class Made(TorchDispatchMode):
    """Remembers the memory that operators make; views of `given` tensors make none."""

    def __init__(self, given: Iterable[Tensor]) -> None:
        super().__init__()
        self.given = {tensor.untyped_storage()._cdata for tensor in given}
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for each in tree_leaves(out):
            if isinstance(each, Tensor):
                storage = each.untyped_storage()
                if storage._cdata not in self.given:
                    self.made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return out

    def living_bytes(self) -> int:
        gc.collect()
        return sum(size for reference, size in self.made.values() if not reference.expired())


class Runs:
    """A traced module on one stage, with its shards, their prices and their values."""

    def __init__(self, name: str) -> None:
        plan = hand_plan(MODULES[name], num_micro_batches=1)
        opened = open_plan_module(plan, 0)
        self.program = record(opened.workload, 1)
        training = plan.training
        model = trace(
            plan.module,
            seq_length=training.seq_length,
            precision=training.precision,
            on_cpu=True,
        )
        sharded = shard(model)
        self.prices = ShardPriceCache(sharded, training, machine_for(load_cluster("a100-80gb")))
        self.given = {tensor.name for tensor in model.inputs} | set(sharded.values.constants)
        shards = shard_plans(sharded, self.prices.classes.of)
        stage = ShardStage(rank=0, layers=(LayerRange(first=0, last=len(shards) - 1),), zero=0)
        self.plan = replace(plan, shards=shards, stages=(stage,))
        (self.cut,) = cut_program(self.plan, self.program)
        parameters = {
            name: opened.value(name) for name, _ in opened.workload.module.named_parameters()
        }
        self.values: dict[str, Tensor] = {
            **self.program.constants,
            **dict(opened.workload.module.named_buffers()),
            **parameters,
        }
        self.known = self._known(opened.workload.batch(1))

    def _known(self, batch: Mapping[str, Tensor]) -> dict[fx.Node, Tensor]:
        """Runs the module once and returns the values that shards read and give."""
        known = {
            node: batch[node.target]
            for node in self.program.graph.nodes
            if node.op == "placeholder"
        }
        for part in (self.cut.constants, *self.cut.shards):
            made = ShardModule(part, self.values, CPU)(*(known[node] for node in part.reads))
            known.update(zip(part.gives, made, strict=True))
        return known

    def run(
        self, number: int, places: Sequence[int], *, ahead: bool = False
    ) -> tuple[int, list[Tensor | None]]:
        """Runs a shard with a recompute list: the bytes between its passes, and the gradients."""
        part = self.cut.shards[number]
        again = calls_again(self.program, self.plan.shards[number], places)
        module = ShardModule(part, self.values, CPU, None, again)
        given = [self.known[node].detach() for node in part.reads]
        leaves = [
            value.requires_grad_(self.known[node].requires_grad)
            for node, value in zip(part.reads, given, strict=True)
        ]
        torch.manual_seed(1)
        weights = [torch.randn_like(self.known[node]) for node in part.gives]
        with ExitStack() as stack:
            reruns = stack.enter_context(module.ahead.collected()) if ahead else []
            made = stack.enter_context(Made((*leaves, *weights, *self.values.values())))
            # autograd holds leaves, but not what is made of them
            outputs = module(*(leaf.clone() if leaf.requires_grad else leaf for leaf in leaves))
            losses = (out * weight for out, weight in zip(outputs, weights, strict=True))
            loss = torch.stack([each.sum() for each in losses]).sum()
        del outputs, losses
        saved = made.living_bytes() - loss.nbytes
        for rerun in reruns:
            rerun()
        learned = [*leaves, *(parameter for _, parameter in module.named())]
        learned = [each for each in learned if each.requires_grad]
        return saved, list(torch.autograd.grad(loss, learned, allow_unused=True))

    def saved_bytes(self, number: int, places: Sequence[int]) -> int:
        """The bytes that the price says, of all that depends on parameters."""
        key = replace(self.prices.key(number, number), outside=frozenset())
        operators = self.prices.operators_at(number, places)
        tensors = saved_tensors(self.prices.layer(key, 1), operators)
        names = self.prices.classes.names[number].tensors
        return sum(
            tensor.num_bytes
            for tensor in tensors
            if not tensor.name.isdigit() or names[int(tensor.name)] not in self.given
        )

    def lists(self, number: int) -> list[tuple[int, ...]]:
        """Returns the lists that the search chooses from, and all operators that may run again."""
        key = self.prices.key(number, number)
        found = recompute_lists(key, 1, Sharding(), self.prices)
        every = [
            place
            for place in self.prices.classes.places(number)
            if self.program.is_repeatable(
                self.program.calls[self.plan.shards[number].first + place]
            )
        ]
        return [*(self.prices.places_of(number, names) for names in found), tuple(every)]


@cache
def runs(name: str) -> Runs:
    return Runs(name)


@pytest.fixture
def _heap_of_before() -> None:
    """Other tests leave a heap, which every run would walk: 20 of the 21 seconds of this test."""
    gc.collect()
    gc.freeze()


@pytest.mark.slow
@pytest.mark.usefixtures("_heap_of_before")
@pytest.mark.parametrize("name", mostly_slow(MODULES, {"bert"}))
def test_lists_free_the_bytes_that_they_say_and_change_no_gradient(name):
    module = runs(name)
    freed = 0
    for number in module.prices.classes.firsts:
        saved, expected = module.run(number, ())
        for places in module.lists(number):
            less, gradients = module.run(number, places)

            assert less == module.saved_bytes(number, places), module.plan.shards[number].name
            assert saved - less == module.saved_bytes(number, ()) - module.saved_bytes(
                number, places
            )
            assert len(gradients) == len(expected)
            for gradient, plain in zip(gradients, expected, strict=True):
                torch.testing.assert_close(gradient, plain, rtol=0, atol=0)
            freed = max(freed, saved - less)
    assert freed > 0


def test_a_call_that_cannot_run_again_by_itself_is_refused():
    plan = hand_plan("tests.helpers.traced_modules:in_place", shards_a_stage=1)
    program = record(open_plan_module(plan, 0).workload, 1)
    places = [k for k, node in enumerate(program.calls) if node.meta["written"]]

    with pytest.raises(ConfigError, match="cannot run again by itself"):
        calls_again(program, plan.shards[0], places)
