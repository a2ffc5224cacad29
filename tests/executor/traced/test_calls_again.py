"""Recompute lists of traced modules free the bytes that they say, and change no gradient."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from parplan.costmodels.layers.recompute import saved_tensors
from parplan.costmodels.operators.sharding import Sharding
from parplan.executor.traced.calls_again import calls_again
from parplan.executor.traced.program_cut import StageCut, cut_program
from parplan.executor.traced.shard_module import ShardModule
from parplan.executor.traced.stage_values import OpenedModule
from parplan.executor.traced.traced_trainer import open_plan_module
from parplan.planner.layer_options.recompute_lists import recompute_lists
from parplan.planner.plan.traced_plan import ShardStage, TracedPlan
from parplan.planner.traced.assemble_traced import shard_plans
from parplan.planner.traced.shard_price_cache import ShardPriceCache
from parplan.planner.traced.shards import shard
from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.machine_catalog import load_cluster
from parplan.profiles.machines.shipped_profiles import machine_for
from parplan.profiles.tracing.program import Program
from parplan.profiles.tracing.record import record
from parplan.profiles.tracing.trace import trace
from tests.helpers.traced_modules import HUGGING_FACE
from tests.helpers.traced_plans import hand_plan

MODULES = {"gpt2": HUGGING_FACE["bert"], "t5": HUGGING_FACE["t5"]}
CPU = torch.device("cpu")


class _Made(TorchDispatchMode):
    """Remembers the memory that operators make."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for each in torch.utils._pytree.tree_leaves(out):
            if isinstance(each, Tensor):
                storage = each.untyped_storage()
                self.made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return out

    def living_bytes(self) -> int:
        gc.collect()
        return sum(size for reference, size in self.made.values() if not reference.expired())


class _Module:
    """A traced module on one stage, with its shards, their prices and their values."""

    def __init__(self, name: str) -> None:
        plan = hand_plan(MODULES[name], num_micro_batches=1)
        self.opened: OpenedModule = open_plan_module(plan, 0)
        self.program: Program = record(self.opened.workload, 1)
        training = plan.training
        model = trace(plan.module, seq_length=training.seq_length, on_cpu=True)
        sharded = shard(model)
        machine = machine_for(load_cluster("a100-80gb"))
        self.prices = ShardPriceCache(sharded, training, machine)
        shards = shard_plans(sharded, self.prices.classes.of)
        self.plan: TracedPlan = replace(
            plan, shards=shards, stages=(ShardStage(rank=0, first=0, end=len(shards), zero=0),)
        )
        (self.cut,) = cut_program(self.plan, self.program)

    def values(self) -> Mapping[str, Tensor]:
        module = self.opened.workload.module
        names = [name for name, _ in module.named_parameters()]
        return {
            **self.program.constants,
            **dict(module.named_buffers()),
            **{name: self.opened.value(name) for name in names},
        }
