"""A traced model: every operator that a user's module ran, in order, from inputs to loss.

`profiles/tracing/` makes it of any module without the memory of its weights; the partitioner
(planner/traced/) cuts it into shards. Sizes are those of one micro-batch; the operators are those
of a built-in description (profiles/models/operator_graph.py), so that prices and search treat both
alike. Tensors that share memory, such as a view and its base, have one name, that of the first; the
first input of a view or of an operator in place is the tensor that it views or writes.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import cached_property

from parplan.profiles.models.module_source import ModuleSource
from parplan.profiles.models.operator_graph import Dim, Operator, Tensor
from parplan.profiles.models.tp_rules import TpRules

BATCH = (
    "batch"  # the name of every dim whose size is a multiple of the micro-batch, and of no other
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedOperator:
    """One call of the module.

    operator  its computation and tensors; its name is the calling module's, the function and a
              number
    path      the module that called it, '' for the outermost
    line      file:line of the call in the user's code
    in_place  True if its output is written into the memory of its first input
    view      True if its output is the memory of an input, and nothing is computed
    constant  True if it depends on the batch alone, on no parameter: any stage that needs its
              output computes it itself
    detached  the names of its outputs that have no gradient: a stage cannot send them on
    counts    the names of the buffers it reads or writes that some call writes: all calls with such
              a buffer are in one stage
    """

    operator: Operator
    path: str
    line: str
    in_place: bool = False
    view: bool = False
    constant: bool = False
    detached: tuple[str, ...] = ()
    counts: tuple[str, ...] = ()

    @property
    def signature(self) -> Hashable:
        """The operator without names, and without its division over ranks."""
        operator = self.operator
        return (
            operator.function,
            operator.kind,
            _sizes(operator.dims),
            *(_shapes(tensors) for tensors in (operator.inputs, operator.outputs, operator.saved)),
            tuple((parameter.shape, parameter.trained) for parameter in operator.parameters),
            operator.flops_forward,
            operator.flops_backward,
            operator.attention,
            operator.gradient,
            self.in_place,
            self.view,
            self.constant,
        )


@dataclass(frozen=True, kw_only=True)
class TracedModel:
    """The operators of `source` for one micro-batch, in execution order; the last gives the loss.

    unit: the word for the items of a batch: tokens, which `seq_length` multiplies, or samples
    inputs: the tensors of the batch
    shared: for each parameter that several modules hold, all its names; operators name it by the
        first
    tp_rules: what the user says of its tensor parallelism, which the operators obey
    """

    name: str
    source: ModuleSource
    unit: str
    micro_batch_size: int
    inputs: tuple[Tensor, ...]
    operators: tuple[TracedOperator, ...]
    shared: tuple[tuple[str, ...], ...] = ()
    tp_rules: TpRules | None = None

    @cached_property
    def num_parameters(self) -> int:
        """Parameters of the model, each counted once."""
        parameters = (p for traced in self.operators for p in traced.operator.parameters)
        return sum({p.name: p.num_elements for p in parameters}.values())

    @cached_property
    def counted(self) -> tuple[str, ...]:
        """The buffers that a forward pass writes."""
        names = (name for traced in self.operators for name in traced.counts)
        return tuple(dict.fromkeys(names))

    @cached_property
    def model_flops(self) -> int:
        """Forward and backward FLOPs, without recompute."""
        return sum(
            traced.operator.flops_forward + traced.operator.flops_backward
            for traced in self.operators
        )

    def scaled(self, micro_batch_size: int) -> TracedModel:
        """Returns the model for another micro-batch size.

        Every dim called `batch` and all FLOPs change in proportion.
        """
        if micro_batch_size == self.micro_batch_size:
            return self
        share = micro_batch_size, self.micro_batch_size
        operators = tuple(
            replace(traced, operator=_scaled(traced.operator, share)) for traced in self.operators
        )
        inputs = _scaled_tensors(self.inputs, share)
        return replace(self, micro_batch_size=micro_batch_size, inputs=inputs, operators=operators)


def _shapes(tensors: tuple[Tensor, ...]) -> Hashable:
    return tuple((_sizes(tensor.dims), tensor.element_bytes) for tensor in tensors)


def _sizes(dims: tuple[Dim, ...]) -> Hashable:
    return tuple((dim.size, dim.name == BATCH) for dim in dims)


_Share = tuple[int, int]


def _scaled(operator: Operator, share: _Share) -> Operator:
    return replace(
        operator,
        dims=_scaled_dims(operator.dims, share),
        inputs=_scaled_tensors(operator.inputs, share),
        outputs=_scaled_tensors(operator.outputs, share),
        saved=_scaled_tensors(operator.saved, share),
        flops_forward=operator.flops_forward * share[0] // share[1],
        flops_backward=operator.flops_backward * share[0] // share[1],
    )


def _scaled_tensors(tensors: tuple[Tensor, ...], share: _Share) -> tuple[Tensor, ...]:
    return tuple(replace(tensor, dims=_scaled_dims(tensor.dims, share)) for tensor in tensors)


def _scaled_dims(dims: tuple[Dim, ...], share: _Share) -> tuple[Dim, ...]:
    return tuple(
        replace(dim, size=dim.size * share[0] // share[1]) if dim.name == BATCH else dim
        for dim in dims
    )
