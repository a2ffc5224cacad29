"""Names for the indices of a program, and the ones that tensor parallelism divides.

Tensor parallelism divides an index that a matrix makes as its columns (the features of a linear
layer, the heads of queries, keys and values, the vocabulary), if every call on its way can compute
on a part of it. The next matrix sums over it (its rows), so that nothing is sent in between. Each
call takes part in one such index, the first in the order of the calls: of three matrices in a row,
the second ends the index of the first, and the third is whole (Shoeybi et al. 2019, arXiv
1909.08053, section 3).

Names say the role of an index: `heads`, `ffn`, `vocab`, and of those that are not divided
`sequence` and `hidden`, the index that at least three matrices share. Indices that meet in one call
have different names; indices of equal blocks have equal ones. All other indices have no name, and
no call is divided by them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cached_property

from torch import Tensor, fx

from parplan.profiles.errors import ConfigError, did_you_mean
from parplan.profiles.models.operator_graph import Dim
from parplan.profiles.models.tp_rules import OPTION, POINTWISE, TpRole, TpRules
from parplan.profiles.models.traced_model import BATCH
from parplan.profiles.tracing.factors import Axes, Axis
from parplan.profiles.tracing.index_rules import ProgramIndices
from parplan.profiles.tracing.program import PARAMETER, Program, memory_of
from parplan.profiles.tracing.torch_functions import UNNAMED

_MATRICES = {"linear", "addmm", "matmul", "mm", "rmatmul"}
_SHARED = 3  # matrices that read or make an index that is called hidden
_ATTENTION = "scaled_dot_product_attention"
_LOOKUP, _LOSS = "embedding", "cross_entropy"


class Divisible:
    """The indices of `program` with names, and the index by which each call is divided.

    parallel  by call that computes, the factor that tensor parallelism divides
    rules     what a user says of some calls, before the others are derived

    Raises ConfigError for a rule that names nothing, or a division that a call cannot have.
    """

    def __init__(self, program: Program, rules: TpRules | None = None) -> None:
        self.program = program
        self._indices = ProgramIndices(program, rules)
        self._factors = self._indices.factors
        self._axes = {
            node: tuple(map(self._factors.leaves, axes))
            for node, axes in self._indices.axes.items()
        }
        self._parameters = {
            memory_of(node.meta["val"]): str(node.target)
            for node in program.graph.nodes
            if node.meta.get("origin") == PARAMETER
        }
        self._roles_of_rules = {} if rules is None else self._ruled(rules)
        self._require_calls(() if rules is None else rules.pointwise)
        self._met = {node: self._factors_of(node) for node in program.calls}
        self._calls: dict[int, list[fx.Node]] = {}  # by factor, the calls on its way
        for node, met in self._met.items():
            for factor in met:
                self._calls.setdefault(factor, []).append(node)
        self.parallel: dict[fx.Node, int] = {}
        self._rejected: dict[int, str] = {}  # by index that a matrix makes, why it is whole
        for node, (role, pattern) in self._roles_of_rules.items():
            self._divide_as_ruled(node, role, pattern)
        for factor in dict.fromkeys(self._columns()):
            self._divide(factor)
        self._divided = set(self.parallel.values())
        self._names = self._named()

    def axes(self, node: fx.Node) -> Axes:
        """The factors of every axis of a tensor."""
        return self._axes[node]

    def factor(self, node: fx.Node, name: str) -> int | None:
        """The factor of that name by which a call can be divided, or None."""
        return next((each for each in self._met[node] if self._names.get(each) == name), None)

    def __contains__(self, node: fx.Node) -> bool:
        """Tells whether a node is a tensor, which has axes."""
        return node in self._axes

    def size(self, factor: int) -> int:
        return self._factors.size(factor)

    def dims(self, node: fx.Node) -> tuple[Dim, ...]:
        """The dims of a tensor, with the size of the batch like any other."""
        return tuple(
            self._dim(place, axis, size)
            for place, (axis, size) in enumerate(
                zip(self.axes(node), node.meta["val"].shape, strict=True)
            )
        )

    def divided_factor(self, axis: Axis) -> int:
        """The factor of an axis that a division of the axis divides, which gives it its name."""
        return next((factor for factor in axis if factor in self._divided), axis[0])

    def parallel_dim(self, node: fx.Node) -> str | None:
        """The name of the index by which tensor parallelism divides a call."""
        factor = self.parallel.get(node)
        return None if factor is None else self._names[factor]

    def undivided(self, node: fx.Node) -> tuple[tuple[str, str], ...]:
        """The names of the indices that a call needs whole, each with the reason."""
        reasons = self.whole(node)
        found = {BATCH: "data parallelism divides the samples"}
        for axis in (axis for each in self._tensors(node) for axis in self.axes(each) if axis):
            factor = self.divided_factor(axis)
            if factor in reasons and factor in self._names:
                found.setdefault(self._names[factor], reasons[factor])
        return tuple(found.items())

    def without_name(self, node: fx.Node) -> str:
        """The reason why a call is not divided by an index that has no name."""
        reasons = (self._rejected[each] for each in self._met[node] if each in self._rejected)
        unnamed = next(reasons, "no matrix makes it for another")
        return self._indices.unruled.get(node, unnamed)

    @cached_property
    def names(self) -> frozenset[str]:
        """The names of all indices that a call may be divided by."""
        return frozenset(self._names.values())

    def whole(self, node: fx.Node) -> dict[int, str]:
        """The factors that a call needs whole, each with the reason."""
        return self._whole[node]

    @cached_property
    def _whole(self) -> dict[fx.Node, dict[int, str]]:
        reasons: dict[fx.Node, dict[int, str]] = {}
        samples = {
            factor
            for node in self.program.graph.nodes
            if node.op == "placeholder"
            for factor in self.axes(node)[0]
        }
        for node in self.program.calls:
            found = reasons[node] = {}
            if self._roles_of_rules.get(node, ("",))[0] == TpRole.REPLICATED:
                for axis in (axis for each in self._tensors(node) for axis in self.axes(each)):
                    found.update(dict.fromkeys(axis, "a rule leaves it whole"))
            for axis, reason in self._indices.whole.get(node, ()):
                for factor in self._factors.leaves(axis):
                    found.setdefault(factor, reason)
            for each in self._tensors(node):
                factors = [factor for axis in self.axes(each) for factor in axis]
                if not self.is_view(node):
                    mixed = (axis for axis in self.axes(each) if samples & {*axis})
                    for factor in (factor for axis in mixed for factor in axis):
                        found.setdefault(factor, "it is one dim with the samples")
                for factor in factors:
                    if factors.count(factor) > 1:
                        found.setdefault(factor, "two dims of a tensor are this index")
        return reasons

    def _dim(self, place: int, axis: Axis, size: int) -> Dim:
        factor = self.divided_factor(axis) if axis else None
        if factor not in self._names:
            return Dim(f"{UNNAMED}{place}", size)
        return Dim(self._names[factor], size, size // self.size(factor))

    def _tensors(self, node: fx.Node) -> Iterator[fx.Node]:
        """Yields the tensors that a call reads and makes."""
        yield from (each for each in node.all_input_nodes if each in self._axes)
        yield from outputs_of(node)

    def _factors_of(self, node: fx.Node) -> Axis:
        """The factors of all tensors that a call reads and makes."""
        axes = (axis for each in self._tensors(node) for axis in self.axes(each))
        return tuple(dict.fromkeys(factor for axis in axes for factor in axis))

    def _columns(self) -> Iterator[int]:
        """Yields the indices that matrices and tables make, in the order of the calls."""
        for node in self.program.calls:
            if self._is_matrix(node):
                yield from self._features(node)
            elif node.meta["function"] == _LOOKUP:
                ids, table = node.all_input_nodes[:2]
                if ids in self._of_batch:
                    yield from self.axes(table)[0]
                yield from self._features(node)

    def _ruled(self, rules: TpRules) -> dict[fx.Node, tuple[TpRole, str]]:
        """Returns the calls with a role, in order. Raises ConfigError for a pattern without any."""
        found: dict[fx.Node, tuple[TpRole, str]] = {}
        able: dict[str, None] = {}
        for node in self.program.calls:
            read = (memory_of(each.meta["val"]) for each in self._tensors_read(node))
            names = [self._parameters[each] for each in read if each in self._parameters]
            matrix = self._is_matrix(node)
            if matrix or node.meta["function"] == _LOOKUP:
                able |= dict.fromkeys((node.meta["path"], *names))
            role = rules.role(node.meta["path"], names)
            if role is not None and (role[0] is TpRole.REPLICATED or self._may_have(node, role[0])):
                found[node] = role
        for role in rules.all_patterns():
            if role not in found.values():
                raise ConfigError(
                    f"{OPTION}: {role[0]} {role[1]} names no matrix or table of "
                    f"{self.program.workload.name} that no earlier rule names",
                    hint=did_you_mean(role[1], able) or f"such names are {', '.join([*able][:6])}",
                )
        return found

    def _require_calls(self, pointwise: Iterable[str]) -> None:
        for pattern in pointwise:
            if pattern not in self._indices.pointwise:
                paths = {node.meta["path"]: None for node in self._indices.unruled}
                raise ConfigError(
                    f"{OPTION}: {POINTWISE} {pattern} names no call that has no rule",
                    hint=did_you_mean(pattern, filter(None, paths)) or "take that pattern out",
                )

    def _may_have(self, node: fx.Node, role: TpRole) -> bool:
        if node.meta["function"] == _LOOKUP:
            return role is TpRole.VOCABULARY
        return self._is_matrix(node)

    def _tensors_read(self, node: fx.Node) -> Iterator[fx.Node]:
        return (each for each in node.all_input_nodes if each in self._axes)

    def _divide_as_ruled(self, node: fx.Node, role: TpRole, pattern: str) -> None:
        """Divides the index that a rule names. Raises ConfigError where a call needs it whole."""
        if role is TpRole.REPLICATED:
            return
        read = node.all_input_nodes
        if role is TpRole.ROW:
            factors = self._features(read[0])
        elif node.meta["function"] == _LOOKUP:
            factors = self.axes(read[1])[0]
        else:
            factors = self._features(node)
        for factor in factors:
            if node not in self.parallel:
                self._divide(factor)
        if self.parallel.get(node) not in factors:
            reasons = [self._rejected[each] for each in factors if each in self._rejected]
            raise ConfigError(
                f"{OPTION}: {role} {pattern}: {node.meta['name']} at {node.meta['line']} cannot be "
                f"divided so: {reasons[0] if reasons else 'another rule divides it'}",
                hint="take that rule out",
            )

    def _features(self, node: fx.Node) -> Axis:
        """The factors of the last axis of a tensor."""
        return tuple(factor for axis in self.axes(node)[-1:] for factor in axis)

    def _is_matrix(self, node: fx.Node) -> bool:
        """Tells whether a call multiplies by a parameter."""
        return str(node.meta["function"]).strip("_") in _MATRICES and any(
            memory_of(each.meta["val"]) in self._parameters for each in node.all_input_nodes
        )

    @cached_property
    def _of_batch(self) -> set[fx.Node]:
        """The values that come from the batch, as token ids do and positions do not."""
        found: set[fx.Node] = set()
        for node in self.program.graph.nodes:
            if node.op == "placeholder" or any(each in found for each in node.all_input_nodes):
                found.add(node)
        return found

    def _divide(self, factor: int) -> None:
        """Divides every call on the way of an index, if all of them can be."""
        calls = [node for node in self._calls.get(factor, ()) if node.meta["depends"]]
        needs = next((node for node in calls if factor in self.whole(node)), None)
        if needs is not None:
            self._rejected[factor] = self.whole(needs)[factor]
            return
        computing = [node for node in calls if not self.is_view(node)]
        if any(node in self.parallel for node in computing):
            self._rejected[factor] = "a matrix on its way is divided by another dim"
        else:
            self.parallel.update(dict.fromkeys(computing, factor))

    def is_view(self, node: fx.Node) -> bool:
        """Tells whether a call only gives its input another shape."""
        return node in self._views

    @cached_property
    def _views(self) -> frozenset[fx.Node]:
        return frozenset(filter(_is_view, self.program.calls))

    def _named(self) -> dict[int, str]:
        """Names the factors that have a role; those that meet in a call get different names."""
        roles = dict(self._roles())
        meets: dict[int, set[int]] = {}
        for node in self.program.calls:
            met = roles.keys() & {*self._met[node]}
            for factor in met:
                meets.setdefault(factor, set()).update(met)
        names: dict[int, str] = {}
        for axes in self._axes.values():
            for factor in (factor for axis in axes for factor in axis):
                if factor in roles and factor not in names:
                    taken = {names.get(each) for each in meets.get(factor, ())}
                    names[factor] = _free(roles[factor], taken)
        return names

    def _roles(self) -> Iterator[tuple[int, str]]:
        """Yields indices with their roles; a later role of an index wins."""
        matrices = Counter(
            factor
            for node in self.program.calls
            if self._is_matrix(node)
            for factor in {*self._features(node), *self._features(node.all_input_nodes[0])}
        )
        yield from ((factor, "hidden") for factor, count in matrices.items() if count >= _SHARED)
        for node in self.program.graph.nodes:
            if node.meta.get("origin") == PARAMETER:
                for axis in self.axes(node):
                    role = "ffn" if len(axis) == 1 else "heads"
                    yield from ((factor, role) for factor in axis if factor in self._divided)
        for node in self.program.calls:
            yield from self._roles_of(node)

    def _roles_of(self, node: fx.Node) -> Iterator[tuple[int, str]]:
        """Yields the roles that attention, a table or a loss gives to its indices."""
        function = node.meta["function"]
        if function == _ATTENTION and node.meta["val"].ndim > 2:
            *_, heads, sequence, _ = self.axes(node)
            yield from ((factor, "sequence") for factor in sequence)
            yield from ((factor, "heads") for factor in heads if factor in self._divided)
        elif function in (_LOSS, _LOOKUP):
            read = self.axes(node.all_input_nodes[function == _LOOKUP])
            classes = read[0] if function == _LOOKUP else read[-1]
            yield from ((factor, "vocab") for factor in classes if factor in self._divided)


def _is_view(node: fx.Node) -> bool:
    given = {memory_of(each.meta["val"]) for each in node.meta["aliases"]}
    made = list(outputs_of(node))
    alias = bool(made) and all(memory_of(each.meta["val"]) in given for each in made)
    return alias and not node.meta["written"] and not node.meta["random"]


def outputs_of(node: fx.Node) -> Iterator[fx.Node]:
    """Yields the nodes of the tensors that a call returns: the call, or nodes that pick from it."""
    if isinstance(node.meta["val"], Tensor):
        yield node
        return
    for user in node.users:
        if "name" in user.meta and user.meta["name"].startswith(f"{node.meta['name']}["):
            yield from outputs_of(user)


def _free(role: str, taken: Iterable[str | None]) -> str:
    """Returns the first of role, role2, role3 ... that is not taken."""
    number = 1
    while (name := role if number == 1 else f"{role}{number}") in set(taken):
        number += 1
    return name
