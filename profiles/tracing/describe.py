"""Describes a Program as a TracedModel: the operators of its torch calls.

Products and attention have dims and model FLOPs, a backward pass twice the forward's where both
operands have gradients (EQUATIONS K2, K4); other operators are priced by their bytes. Dims that run
over the same index have the same name, and `parallel_dim` is the one by which tensor parallelism
divides an operator (profiles/tracing/divisible.py). The tensors that autograd saves were observed
while recording; tensors that share memory are saved once, under the name of the first one made.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, fx

from parplan.profiles.errors import ConfigError
from parplan.profiles.models import operator_graph as model
from parplan.profiles.models.operator_graph import Dim, Operator, OperatorKind, Parameter
from parplan.profiles.models.tp_rules import TpRules
from parplan.profiles.models.traced_model import BATCH, TracedModel, TracedOperator
from parplan.profiles.tracing.divisible import Divisible, outputs_of
from parplan.profiles.tracing.program import (
    PARAMETER,
    Program,
    is_constant,
    memory_of,
    writes_buffer,
)
from parplan.profiles.tracing.torch_functions import UNNAMED, Computation, computation, fused_kernel

_MASK_BYTES, _FP32_BYTES = 1, 4


def describe(
    program: Program, second: Program, *, on_cpu: bool = False, rules: TpRules | None = None
) -> TracedModel:
    """Returns the operators of `program`.

    A dim is the batch's if it is proportional to the micro-batch size, which differs in `second`.
    With `on_cpu` operators save the observed tensors, else dropout, attention and norms save
    those of their GPU kernels. `rules` override the derived tensor parallelism. Raises ConfigError
    for a module that calls other functions for another micro-batch size, or whose sizes are not
    proportional, and for rules that it cannot have.
    """
    if [node.target for node in program.calls] != [node.target for node in second.calls]:
        raise ConfigError(
            f"module: {program.workload.name} calls other functions in a larger micro-batch",
            hint="let the module do the same for every micro-batch size",
        )
    describer = _Describer(program, second, on_cpu, rules)
    return TracedModel(
        name=program.workload.name,
        source=program.workload.source,
        unit=program.workload.unit,
        micro_batch_size=program.micro_batch_size,
        inputs=describer.inputs(),
        operators=tuple(describer.traced(node) for node in program.calls),
        shared=program.shared,
        tp_rules=rules,
    )


class _Describer:
    """Names and dims of a program's tensors, by comparison with another micro-batch size."""

    def __init__(
        self, program: Program, second: Program, on_cpu: bool, rules: TpRules | None
    ) -> None:
        self.sizes = program.micro_batch_size, second.micro_batch_size
        self.program, self.on_cpu = program, on_cpu
        self.divisible = Divisible(program, rules)
        nodes = [node for node in program.graph.nodes if node.op != "output"]
        self.counterparts = dict(
            zip(nodes, (node for node in second.graph.nodes if node.op != "output"), strict=True)
        )
        self.counted = {
            each for node in program.calls for each in node.meta["written"] if each.op == "get_attr"
        }
        self.known_dims: dict[fx.Node, tuple[Dim, ...]] = {}
        self.first: dict[int, fx.Node] = {}  # by memory, the node that made it
        for node in nodes:
            if isinstance(node.meta.get("val"), Tensor):
                self.first.setdefault(memory_of(node.meta["val"]), node)

    def inputs(self) -> tuple[model.Tensor, ...]:
        return tuple(self._tensor(node) for node in self.counterparts if node.op == "placeholder")

    def traced(self, node: fx.Node) -> TracedOperator:
        outputs = tuple(outputs_of(node))
        view = self.divisible.is_view(node)
        computed = (
            Computation(kind=OperatorKind.VIEW, dims=self._dims(outputs[0]))
            if view
            else computation(node, self._dims)
        )
        if computed.products and sum(dim.name == BATCH for dim in computed.dims) > 1:
            raise ConfigError(
                f"module: {node.meta['line']} multiplies samples by samples ({node.meta['name']}), "
                "its FLOPs are not in proportion to them",
                hint="let the module treat the samples of a batch one by one",
            )
        return TracedOperator(
            operator=self._operator(node, computed, outputs),
            path=node.meta["path"],
            line=node.meta["line"],
            view=view,
            in_place=bool(node.meta["written"]) and not writes_buffer(node),
            constant=is_constant(node),
            detached=tuple(
                self._tensor(each).name for each in outputs if not each.meta["val"].requires_grad
            ),
            counts=tuple(str(each.target) for each in node.all_input_nodes if each in self.counted),
        )

    def _operator(
        self, node: fx.Node, computed: Computation, outputs: tuple[fx.Node, ...]
    ) -> Operator:
        # The call that computes with a view owns the parameter, not the view.
        read = () if computed.kind is OperatorKind.VIEW else node.all_input_nodes
        roots = (self._parameter(each) for each in read)
        parameters = dict.fromkeys(root for root in roots if root is not None)
        gradient = any(out.meta["val"].requires_grad for out in outputs)
        operands = (
            sum(each.meta["val"].requires_grad for each in node.all_input_nodes[:2])
            if computed.products == 1
            else 2
        )
        return Operator(
            name=node.meta["name"],
            kind=computed.kind,
            dims=computed.dims,
            inputs=self._inputs_of(node),
            outputs=tuple(self._tensor(each) for each in outputs),
            contracted=computed.contracted,
            parallel_dim=self._parallel_dim(node, computed),
            undivided=self._undivided(node, computed),
            parameters=tuple(self._described(each) for each in parameters),
            saved=tuple(self._saved(node, computed)),
            flops_forward=computed.flops,
            flops_backward=computed.flops * operands if gradient else 0,
            attention=computed.attention,
            gradient=gradient,
            repeatable=self.program.is_repeatable(node),
        )

    def _parallel_dim(self, node: fx.Node, computed: Computation) -> str | None:
        name = self.divisible.parallel_dim(node)
        return name if any(dim.name == name for dim in computed.dims) else None

    def _undivided(self, node: fx.Node, computed: Computation) -> tuple[tuple[str, str], ...]:
        """The dims that no axis may divide: those that the call needs whole, and without a name."""
        known = dict(self.divisible.undivided(node))
        if computed.kind is OperatorKind.ATTENTION:
            known |= {dim.name: "attention needs all of it" for dim in computed.dims[2:]}
        for dim in computed.dims:
            if dim.name not in self.divisible.names:
                known.setdefault(dim.name, self.divisible.without_name(node))
        return tuple(known.items())

    def _inputs_of(self, node: fx.Node) -> tuple[model.Tensor, ...]:
        """The activations that a call reads, first those whose memory it writes or returns."""
        first = (*node.meta["written"], *node.meta["aliases"])
        read = sorted(node.all_input_nodes, key=lambda each: each not in first)
        return tuple(
            self._tensor(each)
            for each in read
            if each.op != "get_attr" and self._parameter(each) is None
        )

    def _parameter(self, node: fx.Node) -> fx.Node | None:
        """The parameter that a node is, or is a view of."""
        root = self.first.get(memory_of(node.meta["val"]))
        return root if root is not None and root.meta.get("origin") == PARAMETER else None

    def _described(self, node: fx.Node) -> Parameter:
        return Parameter(
            name=str(node.target),
            # ranks hold a scalar in a tensor of one element, of which one may have all
            dims=self.divisible.dims(node) or (Dim(name="element", size=1),),
            trained=node.meta["val"].requires_grad,
        )

    def _saved(self, node: fx.Node, computed: Computation) -> Iterator[model.Tensor]:
        """Yields saved tensors without parameters, buffers, constants and the batch.

        Fused kernels save what they save on GPUs.
        """
        fused = None if self.on_cpu or not node.meta["saved"] else fused_kernel(node)
        if fused is None:
            yield from self._saved_tensors(
                node, list(node.meta["saved"]), list(self.counterparts[node].meta["saved"])
            )
            return
        yield from self._saved_tensors(node, [each.meta["val"] for each in fused.saved], None)
        if fused.rows:
            dims = (
                computed.dims[:3]
                if computed.kind is OperatorKind.ATTENTION
                else self._dims(node)[: -fused.normalized]
            )
            yield model.Tensor(
                name=f"{node.meta['name']}:statistics",
                dims=(*dims, Dim("statistics", fused.rows)),
                element_bytes=_FP32_BYTES,
            )
        if fused.mask:
            yield model.Tensor(
                name=f"{node.meta['name']}:mask", dims=self._dims(node), element_bytes=_MASK_BYTES
            )

    def _saved_tensors(
        self, node: fx.Node, tensors: list[Tensor], counterpart: list[Tensor] | None
    ) -> Iterator[model.Tensor]:
        seen: set[int] = set()
        for place, tensor in enumerate(tensors):
            memory = memory_of(tensor)
            maker = self.first.get(memory)
            if memory in seen or (maker is not None and maker.op != "call_function"):
                continue
            seen.add(memory)
            if maker is not None:
                name, like = str(maker.meta["name"]), self.counterparts[maker].meta["val"]
                yield self._whole(name, maker, maker.meta["val"], like)
            elif counterpart is not None:
                name = f"{node.meta['name']}:kept{place}"
                yield self._whole(name, node, tensor, counterpart[place])

    def _whole(self, name: str, like: fx.Node, tensor: Tensor, counterpart: Tensor) -> model.Tensor:
        """The whole memory that holds a tensor; `like` names its dims if it has the same shape."""
        element = tensor.element_size()
        whole = [each.untyped_storage().nbytes() // element for each in (tensor, counterpart)]
        if whole[0] != tensor.numel():
            dims = self._scaled(whole[:1], whole[1:], name)
        elif isinstance(like.meta["val"], Tensor) and like.meta["val"].shape == tensor.shape:
            dims = self._dims(like)
        else:
            dims = self._scaled(tensor.shape, counterpart.shape, name)
        return model.Tensor(name=name, dims=dims, element_bytes=element)

    def _tensor(self, node: fx.Node) -> model.Tensor:
        """The value of a node, under the name of its memory."""
        value = node.meta["val"]
        first = self.first[memory_of(value)]
        return model.Tensor(
            name=str(first.meta.get("name", first.name)),
            dims=self._dims(node),
            element_bytes=value.element_size(),
        )

    def _dims(self, node: fx.Node) -> tuple[Dim, ...]:
        if node not in self.known_dims:
            self.known_dims[node] = self._dims_of(node)
        return self.known_dims[node]

    def _dims_of(self, node: fx.Node) -> tuple[Dim, ...]:
        value = node.meta["val"]
        if not isinstance(value, Tensor):  # the first used output of a call with several
            node = next(outputs_of(node))
            value = node.meta["val"]
        counterpart = self.counterparts[node].meta["val"]
        scaled = self._scaled(value.shape, counterpart.shape, str(node.meta.get("name", node.name)))
        named = self.divisible.dims(node)
        return tuple(
            each if each.name == BATCH else dim for each, dim in zip(scaled, named, strict=True)
        )

    def _scaled(self, shape: Any, counterpart: Any, name: str) -> tuple[Dim, ...]:
        size, other_size = self.sizes
        if len(shape) == len(counterpart):
            pairs = list(zip(shape, counterpart, strict=True))
            if all(n == m or n * other_size == m * size for n, m in pairs):
                return tuple(
                    Dim(f"{UNNAMED}{i}" if n == m else BATCH, n) for i, (n, m) in enumerate(pairs)
                )
        raise ConfigError(
            f"module: {name} is {list(shape)} for {size} samples and {list(counterpart)} for "
            f"{other_size}, its sizes must be in proportion",
            hint="let the module treat the samples of a batch one by one",
        )
