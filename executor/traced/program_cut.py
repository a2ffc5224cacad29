"""Cuts a recorded program into the stages and shards of a plan.

The cut says which calls each shard makes, which values it reads and gives, and which values stages
send to each other. Three kinds of calls are treated differently:

    constants    calls that depend on the batch and on no parameter; every stage repeats the
                 constants that it needs before its shards run
    views        views of a value of another stage; the receiving stage makes them again, so that
                 each piece of memory is sent once; every shard makes its views of parameters, whose
                 gathered memory ends with the shard
    the rest     calls made only by the shard that the plan names; a value that a later stage reads
                 passes through all stages in between

Only values with gradients are sent, because the gradient of each comes back the same way.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from parplan.planner.plan.traced_plan import ShardPlan, TracedPlan
from parplan.profiles.errors import ConfigError
from parplan.profiles.tracing.program import BUFFER, PARAMETER, Program

Nodes = tuple[fx.Node, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardCut:
    """One shard: its calls in order, the values or batch tensors it reads, the values it gives."""

    name: str
    calls: Nodes
    reads: Nodes
    gives: Nodes

    @property
    def attributes(self) -> Nodes:
        """The parameters, buffers and constants that the shard reads."""
        return tuple(
            dict.fromkeys(
                node
                for call in self.calls
                for node in call.all_input_nodes
                if node.op == "get_attr"
            )
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCut:
    """One (virtual) stage; `constants` runs before its shards. The last stage gives the loss."""

    constants: ShardCut
    shards: tuple[ShardCut, ...]
    receives: Nodes
    sends: Nodes

    @property
    def batch_keys(self) -> frozenset[str]:
        """The keys of the batch that its operators read."""
        parts = (self.constants, *self.shards)
        return frozenset(
            str(node.target) for part in parts for node in part.reads if node.op == "placeholder"
        )

    @property
    def parameters(self) -> tuple[str, ...]:
        """The full names of the parameters that its shards read."""
        return tuple(
            dict.fromkeys(
                node.target
                for shard in self.shards
                for node in shard.attributes
                if node.meta["origin"] == PARAMETER
            )
        )


def cut_program(plan: TracedPlan, program: Program) -> tuple[StageCut, ...]:
    """Returns the stages of `plan`.

    Raises ConfigError for a plan of another program, and for a cut that the program does not allow.
    """
    _check_same(plan, program)
    places = _Places(plan, program)
    _check_counting(places)
    return tuple(_cut_stage(places, stage) for stage in range(len(plan.stages)))


def _check_same(plan: TracedPlan, program: Program) -> None:
    calls, last = program.calls, 0
    for index, shard in enumerate(plan.shards):
        actual = calls[shard.first].meta["name"] if shard.first < len(calls) else "nothing"
        if shard.first != last or shard.end < shard.first or shard.starts != actual:
            raise ConfigError(
                f"shards.{index}: operator {shard.first} is {actual} in this trace, the plan has "
                f"{shard.starts} from {last} on",
                hint="make the plan again: the module, or torch, has changed",
            )
        last = shard.end
    if last != len(calls):
        raise ConfigError(
            f"shards: they end at operator {last}, this trace has {len(calls)}",
            hint="make the plan again",
        )
    ends = [0, *(stage.end for stage in plan.stages)]
    if any(stage.first != end for stage, end in zip(plan.stages, ends, strict=False)) or ends[
        -1
    ] != len(plan.shards):
        raise ConfigError(
            "stages: they do not hold every shard once, in order", hint="make the plan again"
        )


class _Places:
    """Assigns every call of the program to a stage of the plan.

    shard, stage   the shard and the stage of each call that is made once
    constants      the calls that any stage may make, in order
    """

    def __init__(self, plan: TracedPlan, program: Program) -> None:
        self.program = program
        self.plan = plan
        self.nodes = tuple(node for node in program.graph.nodes if node.op == "call_function")
        self.loss = next(node for node in program.graph.nodes if node.op == "output").args[0]
        stage_of = {
            shard: k
            for k, stage in enumerate(plan.stages)
            for shard in range(stage.first, stage.end)
        }
        self.shard: dict[fx.Node, int] = {}
        for index, shard in enumerate(plan.shards):
            self.shard |= dict.fromkeys(program.calls[shard.first : shard.end], index)
        for node in self.nodes:
            if node.target is operator.getitem:
                self.shard[node] = self.shard[node.args[0]]  # type: ignore[index]
        self.constants: dict[fx.Node, None] = {}
        for node in self.nodes:
            if self._is_constant(node):
                self.constants[node] = None
        self.stage = {
            node: stage_of[shard]
            for node, shard in self.shard.items()
            if node not in self.constants
        }
        self.last = self._last_readers()

    def _is_constant(self, node: fx.Node) -> bool:
        if node.meta["depends"]:
            return False
        if any(written.op == "get_attr" for written in node.meta.get("written", ())):
            return False  # it updates a buffer, so it must be made once
        return all(_is_leaf(each) or each in self.constants for each in node.all_input_nodes)

    def calls(self, stage: int) -> Iterator[fx.Node]:
        """Yields the calls that only stage `stage` makes."""
        return (node for node, place in self.stage.items() if place == stage)

    def _last_readers(self) -> dict[fx.Node, int]:
        """Returns the last stage that needs each value, directly or through a view of it."""
        last: dict[fx.Node, int] = {}
        for stage in range(len(self.plan.stages)):
            for node in self.external(stage):
                last[node] = stage
        return last

    def external(self, stage: int) -> Nodes:
        """The values of earlier stages that `stage` receives."""
        return self._needed_of(stage)[0]

    def views(self, stage: int) -> Nodes:
        """The views of values of earlier stages that `stage` makes again, in order."""
        return self._needed_of(stage)[1]

    def _needed_of(self, stage: int) -> tuple[Nodes, Nodes]:
        pending = list(
            dict.fromkeys(
                node
                for call in self.calls(stage)
                for node in call.all_input_nodes
                if self.stage.get(node, stage) != stage
            )
        )
        values: dict[fx.Node, None] = {}
        views: dict[fx.Node, None] = {}
        while pending:
            node = pending.pop()
            if _is_view(node):
                views[node] = None
                pending += [
                    each
                    for each in node.all_input_nodes
                    if self.stage.get(each, stage) != stage and each not in views
                ]
            elif not _is_leaf(node) and node not in self.constants:
                values[node] = None
        return tuple(sorted(values)), tuple(sorted(views))


def _cut_stage(places: _Places, stage: int) -> StageCut:
    plan = places.plan
    receives = tuple(
        sorted(node for node, last in places.last.items() if places.stage[node] < stage <= last)
    )
    sends = tuple(
        sorted(node for node, last in places.last.items() if places.stage[node] <= stage < last)
    )
    _check_travel(sends)
    planned = plan.stages[stage]
    calls: dict[int, list[fx.Node]] = {index: [] for index in range(planned.first, planned.end)}
    for node in places.calls(stage):
        calls[places.shard[node]].append(node)
    _add_views(places.views(stage), calls)
    outputs = {*sends, places.loss}
    _repeat_views_of_parameters(calls)
    _drop_unread_views(calls, outputs)
    _check_writes(places, stage)
    constants = _constants_of(places, [node for each in calls.values() for node in each])
    parts = [
        ("constants", constants),
        *((plan.shards[index].name, tuple(sorted(each))) for index, each in calls.items()),
    ]
    cuts = [
        _shard(name, each, [later for _, later in parts[i + 1 :]], outputs)
        for i, (name, each) in enumerate(parts)
    ]
    return StageCut(constants=cuts[0], shards=tuple(cuts[1:]), receives=receives, sends=sends)


def _shard(name: str, calls: Nodes, later: Sequence[Nodes], outputs: set[fx.Node]) -> ShardCut:
    made = set(calls)
    reads = dict.fromkeys(
        node
        for call in calls
        for node in call.all_input_nodes
        if node not in made and node.op != "get_attr"
    )
    read_later = {
        node
        for each in map(dict.fromkeys, later)
        for call in each
        for node in call.all_input_nodes
        if node not in each
    }
    gives = tuple(
        node
        for node in calls
        if (node in read_later or node in outputs) and isinstance(node.meta["val"], Tensor)
    )
    return ShardCut(name=name, calls=calls, reads=tuple(reads), gives=gives)


def _add_views(views: Nodes, calls: dict[int, list[fx.Node]]) -> None:
    """Adds each view to the first shard that reads it, or a view of it."""
    for view in reversed(views):
        readers = (
            index
            for index, each in calls.items()
            if any(view in call.all_input_nodes for call in each)
        )
        calls[next(readers)].append(view)


def _repeat_views_of_parameters(calls: dict[int, list[fx.Node]]) -> None:
    """Gives each shard the views of parameters that its calls read, and no others."""
    of_parameters: set[fx.Node] = set()
    for node in sorted(node for each in calls.values() for node in each):
        before = node.all_input_nodes
        if (
            _is_view(node)
            and before
            and all(
                each in of_parameters or each.meta.get("origin") == PARAMETER for each in before
            )
        ):
            of_parameters.add(node)
    for index, each in calls.items():
        kept = [node for node in each if node not in of_parameters]
        pending = [before for node in kept for before in node.all_input_nodes]
        own: set[fx.Node] = set()
        while pending:
            node = pending.pop()
            if node in of_parameters and node not in own:
                own.add(node)
                pending += node.all_input_nodes
        calls[index] = [*kept, *own]


def _drop_unread_views(calls: dict[int, list[fx.Node]], outputs: set[fx.Node]) -> None:
    """Drops views that only later stages read, which make them again.

    A parameter that only such a view reads is then not held by this stage.
    """
    read = {node: 0 for each in calls.values() for node in each}
    for node in read:
        for before in node.all_input_nodes:
            if before in read:
                read[before] += 1
    for index, each in reversed(calls.items()):
        for node in sorted(each, reverse=True):
            if not read[node] and node not in outputs and _is_view(node):
                calls[index].remove(node)
                for before in node.all_input_nodes:
                    if before in read:
                        read[before] -= 1


def _constants_of(places: _Places, calls: Sequence[fx.Node]) -> Nodes:
    """Returns the constants that `calls` read and the calls that write into them, in order."""
    needed = {node for call in calls for node in call.all_input_nodes if node in places.constants}
    if places.loss in places.constants:
        needed.add(places.loss)
    memory: set[int] = set()
    constants = []
    for node in reversed(places.constants):
        if node in needed or memory & {
            each for written in node.meta.get("written", ()) for each in _memory(written)
        }:
            constants.append(node)
            needed |= {each for each in node.all_input_nodes if not _is_leaf(each)}
            memory |= _memory(node)
    return tuple(reversed(constants))


def _check_travel(values: Nodes) -> None:
    for node in values:
        value = node.meta["val"]
        if not isinstance(value, Tensor) or not value.requires_grad:
            raise ConfigError(
                f"stages: {where(node)} gives a value without gradient, which a later stage reads",
                hint="make the plan again: no stage may end between the two",
            )


def _check_writes(places: _Places, stage: int) -> None:
    """Refuses a write into a received value: other stages hold copies that would not change."""
    received = {each for node in places.external(stage) for each in _memory(node)}
    for node in places.calls(stage):
        if any(received & _memory(written) for written in node.meta.get("written", ())):
            raise ConfigError(
                f"stages: {where(node)} writes into a value of an earlier stage",
                hint="make the plan again",
            )


def _check_counting(places: _Places) -> None:
    """Raises ConfigError for a buffer that one stage writes and another uses.

    Each stage would hold a separate copy of it.
    """
    written = {
        each
        for node in places.stage
        for each in node.meta.get("written", ())
        if each.op == "get_attr"
    }
    held: dict[fx.Node, int] = {}
    for node, stage in places.stage.items():
        for each in node.all_input_nodes:
            if each in written and held.setdefault(each, stage) != stage:
                raise ConfigError(
                    f"stages: {where(node)} reads or writes buffer {each.target}, which another "
                    "stage counts in",
                    hint="make the plan again: no stage may end between the two",
                )


def check_recompute(shard: ShardCut, plan: ShardPlan) -> None:
    """Raises ConfigError for a shard that writes into its input, which cannot be recomputed."""
    read = {each for node in shard.reads for each in _memory(node)}
    for node in shard.calls:
        if any(read & _memory(written) for written in node.meta.get("written", ())):
            raise ConfigError(
                f"shards: {plan.name} writes into its input at {where(node)}, so it cannot run "
                "again",
                hint="take it out of recompute",
            )


def written_buffers(shard: ShardCut) -> Nodes:
    """The buffers that the shard writes into, for example in batch norms."""
    attributes = (
        node
        for call in shard.calls
        for node in call.meta.get("written", ())
        if node.op == "get_attr"
    )
    return tuple(dict.fromkeys(node for node in attributes if node.meta["origin"] == BUFFER))


def where(node: fx.Node) -> str:
    """Returns the line of a call, and the module that makes it."""
    return f"{node.meta.get('line', node.name)} ({node.meta.get('path') or 'the module itself'})"


def _is_leaf(node: fx.Node) -> bool:
    return node.op in ("placeholder", "get_attr")


def _is_parameter(node: fx.Node) -> bool:
    return bool(node.meta.get("origin") == PARAMETER)


def _is_view(node: fx.Node) -> bool:
    """Tells whether a call's value, or the item picked from it, shares memory with inputs."""
    if node.op != "call_function" or node.meta.get("random") or node.meta.get("written"):
        return False
    sources = {each for before in node.all_input_nodes for each in _memory(before)}
    memory = _memory(node)
    if node.target is operator.getitem:
        return _is_view(node.args[0])  # type: ignore[arg-type]
    return bool(memory) and memory <= sources


def _memory(node: fx.Node) -> frozenset[int]:
    """The identity of the storage of a node's value; fake tensors live as long as the program."""
    return frozenset(
        leaf.untyped_storage()._cdata
        for leaf in tree_leaves(node.meta.get("val"))
        if isinstance(leaf, Tensor)
    )
