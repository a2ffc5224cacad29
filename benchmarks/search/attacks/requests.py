"""The requests whose plans are attacked.

Some had plans that were beaten once; ordinary ones are drawn with a fixed seed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from functools import cached_property

from benchmarks.search.attacks.allowed import layouts
from parplan.commands.options.target_options import TargetOptions
from parplan.commands.requests.requests import request_of
from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.schedules.schedule import Schedule
from parplan.planner.objective import Objective
from parplan.planner.request import Constraints, SearchOptions
from parplan.planner.request import Request as PlanningRequest
from parplan.profiles.models.transformer import build_graph
from parplan.profiles.units import GIB, gib

MODELS = (
    "gpt-1.5b",
    "gpt-2.5b",
    "gpt-7.5b",
    "gpt-8.3b",
    "gpt-20b",
    "llama2-7b",
    "llama2-13b",
    "llama3-8b",
    "llama3-70b",
)
CLUSTERS = ("a100-40gb", "a100-80gb", "h100-80gb", "v100-32gb")
GPUS = (4, 8, 16, 24, 32, 64)
STACKS = (None, None, "parplan", "nemo", "torchtitan")  # the default twice as often
STATE_BYTES = 18  # of one parameter in mixed precision
# The share of memory that states may fill in a drawn request: a larger model has no plan, or one
# with host offload alone.
FILLED = 0.7
PINS = (
    Constraints(),
    Constraints(),
    Constraints(),
    Constraints(),
    Constraints(pp=(1,), tp=(1,)),
    Constraints(pp=(2, 4, 8)),
    Constraints(tp=(2, 4)),
    Constraints(zero=(1, 2)),
    Constraints(recompute=(Recompute.NONE, Recompute.FULL)),
    Constraints(schedule=(Schedule.ONE_F_ONE_B,)),
    Constraints(micro_batch_size=(1, 2)),
    Constraints(megatron_sharding=True),
)


@dataclass(frozen=True)
class Request:
    """A question to the planner with its pins and search options."""

    arguments: TargetOptions
    pins: Constraints = field(default_factory=Constraints)
    options: SearchOptions = field(default_factory=SearchOptions)
    objective: Objective = Objective.THROUGHPUT

    @cached_property
    def question(self) -> PlanningRequest:
        return request_of(self.arguments)

    def __str__(self) -> str:
        """Return the request as on the command line, without `plan`."""
        words = [
            _words(name.name, getattr(self.arguments, name.name)) for name in fields(TargetOptions)
        ]
        words += [_words(name.name, getattr(self.pins, name.name)) for name in fields(Constraints)]
        if self.options.memory_limit_bytes:
            words.append(f"--memory-limit {gib(self.options.memory_limit_bytes):g}GiB")
        if self.objective is not Objective.THROUGHPUT:
            words.append(f"--objective {self.objective}")
        return " ".join(word for word in words if word)


def _words(name: str, value: object) -> str:
    if value is None or value is False or value == ():
        return ""
    return option_text(name, value)


def option_text(name: str, value: object) -> str:
    """Return an option with its value as on the command line."""
    flag = f"--{name.replace('_', '-')}"
    if isinstance(value, bool):
        return flag if value else flag.replace("--", "--no-", 1)
    return f"{flag} {','.join(map(str, value)) if isinstance(value, tuple) else value}"


def _asked(model: str, gpus: int, gpu: str = "a100-80gb", **flags: object) -> TargetOptions:
    return TargetOptions(model=model, gpus=gpus, gpu=gpu, **flags)  # type: ignore[arg-type]


NAMED = (
    Request(
        _asked("llama3-8b", 16, "h100-80gb", gpus_per_node=1),
        Constraints(pp=(1,), tp=(1,), recompute=(Recompute.NONE,)),
    ),
    Request(_asked("llama3-8b", 16, "h100-80gb")),
    Request(_asked("llama3-8b", 32)),
    Request(_asked("llama3-8b", 16, stack="parplan")),
    Request(_asked("llama3-8b", 24)),
    Request(_asked("gpt-7.5b", 32), Constraints(pp=(8,))),
    Request(
        _asked("gpt-1.5b", 2, "v100-32gb", stack="parplan", global_batch_size=2),
        options=SearchOptions(memory_limit_bytes=int(13.5 * GIB)),
    ),
    Request(_asked("llama3-8b", 4, stack="parplan", global_batch_size=4)),
    Request(_asked("llama3-8b", 8, global_batch_size=4), Constraints(pp=(8,))),
    Request(_asked("gpt-1.5b", 8, "a100-40gb", global_batch_size=64)),
)
# For a test: few GPUs and micro-batches, one for each kind of change that once beat a plan.
SMALL = (
    Request(
        _asked("llama3-8b", 16, "h100-80gb", gpus_per_node=1, global_batch_size=64),
        Constraints(pp=(1,), tp=(1,), recompute=(Recompute.NONE,)),
    ),
    Request(
        _asked("gpt-1.5b", 2, "v100-32gb", stack="parplan", global_batch_size=2),
        options=SearchOptions(memory_limit_bytes=int(13.5 * GIB)),
    ),
    Request(_asked("llama3-8b", 8, global_batch_size=4), Constraints(pp=(8,))),
    Request(
        _asked("llama3-8b", 4, stack="parplan", global_batch_size=4),
        Constraints(tp=(2,), micro_batch_size=(2,)),
    ),
    Request(
        _asked("gpt-1.5b", 8, "v100-32gb", stack="parplan", global_batch_size=16),
        Constraints(pp=(8,), micro_batch_size=(1,)),
    ),
    Request(_asked("gpt-7.5b", 16, global_batch_size=64), Constraints(pp=(4,), tp=(1,))),
)


def drawn(seed: int) -> Iterator[Request]:
    """Yield ordinary requests without end, equal for equal seeds.

    A request has a model whose states have room, a batch, a stack and sometimes legal pins.
    """
    chance = random.Random(seed)
    while True:
        model = chance.choice(MODELS)
        gpus = chance.choice(GPUS)
        gpu = chance.choice(CLUSTERS)
        stack = chance.choice(STACKS)
        pins = chance.choice(PINS)
        batch = chance.choice((None, None, 64, 128))
        per_node = 1 if chance.random() < 0.1 else None
        arguments = _asked(
            model, gpus, gpu, stack=stack, global_batch_size=batch, gpus_per_node=per_node
        )
        request = Request(arguments, pins)
        if _has_room(request) and any(layouts(request.question, request.pins)):
            yield request


def _has_room(request: Request) -> bool:
    problem = request.question
    needed = STATE_BYTES * build_graph(problem.model, problem.training, 1).num_parameters
    return needed <= FILLED * problem.cluster.num_gpus * problem.cluster.device.memory_bytes


def requests(number: int, seed: int) -> Iterator[Request]:
    """Yield the named requests and drawn ones, `number` in all, each once."""
    seen, more = list(NAMED[:number]), drawn(seed)
    while len(seen) < number:
        request = next(more)
        if request not in seen:
            seen.append(request)
    yield from seen


def memory_requests(number: int, seed: int) -> Iterator[Request]:
    """Yield as many other requests under the memory objective."""
    more = drawn(seed + 1)
    yield from (replace(next(more), objective=Objective.MEMORY) for _ in range(number))
