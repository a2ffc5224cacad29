"""Program -> TracedModel: what each torch call computes, reads, gives and keeps, as operators of profiles/model.py.

Products and attention have their dims and model FLOPs, a backward pass twice the forward's where both operands have gradients
(EQUATIONS K2, K4); all else is priced by its bytes. What autograd keeps was observed while recording; tensors that share memory are
kept once, under the name of the one that was made first.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, fx

from profiles import model
from profiles.errors import ConfigError
from profiles.model import Dim, Operator, OperatorKind, Parameter
from profiles.traced import BATCH, TracedModel, TracedOperator
from profiles.tracing.functions import Computation, argument, computation, masks
from profiles.tracing.record import PARAMETER, Program

_MASK_BYTES, _FP32_BYTES = 1, 4


def describe(program: Program, other: Program, *, plain_dropout: bool = False) -> TracedModel:
    """The operators of `program`; a dim is the batch's where `other`, of another micro-batch size, has it in proportion.

    plain_dropout: dropout is no fused kernel (on a CPU): it keeps what was observed, attention that drops out its scores
    Raises ConfigError for a module that calls other functions for another micro-batch size, or whose sizes are not in proportion.
    """
    if [node.target for node in program.calls] != [node.target for node in other.calls]:
        raise ConfigError(f"module: {program.workload.name} calls other functions in a larger micro-batch",
                          hint="let the module do the same for every micro-batch size")
    describer = _Describer(program, other, plain_dropout)
    return TracedModel(
        name=program.workload.name, source=program.workload.source, unit=program.workload.unit,
        micro_batch_size=program.micro_batch_size, inputs=describer.inputs(),
        operators=tuple(describer.traced(node) for node in program.calls), shared=program.shared)


class _Describer:
    """Names and dims of the tensors of a program, beside one of another micro-batch size."""

    def __init__(self, program: Program, other: Program, plain_dropout: bool) -> None:
        self.sizes = program.micro_batch_size, other.micro_batch_size
        self.plain_dropout = plain_dropout
        nodes = [node for node in program.graph.nodes if node.op != "output"]
        self.again = dict(zip(nodes, (node for node in other.graph.nodes if node.op != "output"), strict=True))
        self.first: dict[int, fx.Node] = {}  # by memory: the node that made it
        for node in nodes:
            if isinstance(node.meta.get("val"), Tensor):
                self.first.setdefault(_memory(node.meta["val"]), node)
        self.writers: dict[int, fx.Node] = {}  # by memory: the last call that wrote into it

    def inputs(self) -> tuple[model.Tensor, ...]:
        return tuple(self._tensor(node) for node in self.again if node.op == "placeholder")

    def traced(self, node: fx.Node) -> TracedOperator:
        outputs, written = tuple(_outputs(node)), bool(node.meta["written"])
        aliased = not written and all(_memory(out.meta["val"]) in {_memory(val) for val in _values(node.meta["aliases"])} for out in outputs)
        found = Computation(kind=OperatorKind.VIEW, dims=self._dims(outputs[0])) if aliased else computation(node, self._dims)
        traced = TracedOperator(
            operator=self._operator(node, found, outputs), path=node.meta["path"], line=node.meta["line"], in_place=written, view=aliased,
            constant=not node.meta["depends"], gradient=any(out.meta["val"].requires_grad for out in outputs))
        self.writers |= {_memory(val): node for val in _values(node.meta["written"])}
        return traced

    def _operator(self, node: fx.Node, found: Computation, outputs: tuple[fx.Node, ...]) -> Operator:
        read = list(dict.fromkeys(self._read(node)))
        parameters = dict.fromkeys(root for each in node.all_input_nodes if (root := self._parameter(each)) is not None)
        operands = sum(each.meta["val"].requires_grad for each in node.all_input_nodes[:2]) if found.products == 1 else 2
        return Operator(
            name=node.meta["name"], kind=found.kind, dims=found.dims, inputs=tuple(self._tensor(each) for each in read),
            outputs=tuple(self._tensor(each) for each in outputs), contracted=found.contracted,
            parameters=tuple(_described(each) for each in parameters), saved=tuple(self._saved(node, found)),
            flops_forward=found.flops, flops_backward=found.flops * min(operands, 2) if any(
                out.meta["val"].requires_grad for out in outputs) else 0, causal=found.causal, dropped=found.dropped)

    def _read(self, node: fx.Node) -> Iterator[fx.Node]:
        """The activations that a call reads, and the call that last wrote into their memory."""
        for each in node.all_input_nodes:
            if each.op != "get_attr":
                yield each
                writer = self.writers.get(_memory(each.meta["val"]))
                if writer is not None and isinstance(writer.meta["val"], Tensor):
                    yield writer

    def _parameter(self, node: fx.Node) -> fx.Node | None:
        """The parameter that a node is, or is a view of."""
        root = self.first.get(_memory(node.meta["val"]))
        return root if root is not None and root.meta.get("origin") == PARAMETER else None

    def _saved(self, node: fx.Node, found: Computation) -> Iterator[model.Tensor]:
        """What autograd keeps, but for parameters, buffers, constants and the batch. Fused kernels as they run on GPUs."""
        if not self.plain_dropout and found.kind is OperatorKind.ATTENTION:
            tensors = [argument(node, place, name).meta["val"] for place, name in enumerate(("query", "key", "value"))]
            yield from self._kept(node, [*tensors, node.meta["val"]], None)
            yield model.Tensor(name=f"{node.meta['name']}:logsumexp", dims=found.dims[:3], element_bytes=_FP32_BYTES)
        elif not self.plain_dropout and masks(node) and node.meta["saved"]:
            yield model.Tensor(name=f"{node.meta['name']}:mask", dims=self._dims(node), element_bytes=_MASK_BYTES)
        else:
            yield from self._kept(node, list(node.meta["saved"]), list(self.again[node].meta["saved"]))

    def _kept(self, node: fx.Node, tensors: list[Tensor], again: list[Tensor] | None) -> Iterator[model.Tensor]:
        seen: set[int] = set()
        for place, tensor in enumerate(tensors):
            memory = _memory(tensor)
            maker = self.first.get(memory)
            if memory in seen or (maker is not None and maker.op != "call_function"):
                continue
            seen.add(memory)
            if maker is not None:
                yield self._whole(str(maker.meta["name"]), maker.meta["val"], self.again[maker].meta["val"])
            elif again is not None:
                yield self._whole(f"{node.meta['name']}:kept{place}", tensor, again[place])

    def _whole(self, name: str, tensor: Tensor, again: Tensor) -> model.Tensor:
        """All of the memory that a tensor is of."""
        element = tensor.element_size()
        whole = [each.untyped_storage().nbytes() // element for each in (tensor, again)]
        if whole[0] == tensor.numel():
            return model.Tensor(name=name, dims=self._scaled(tensor.shape, again.shape, name), element_bytes=element)
        return model.Tensor(name=name, dims=self._scaled(whole[:1], whole[1:], name), element_bytes=element)

    def _tensor(self, node: fx.Node) -> model.Tensor:
        name = str(node.meta.get("name", node.name))
        return model.Tensor(name=name, dims=self._dims(node), element_bytes=node.meta["val"].element_size())

    def _dims(self, node: Any) -> tuple[Dim, ...]:
        value = node.meta["val"]
        if not isinstance(value, Tensor):  # of a call with several outputs, the first
            node = next(_outputs(node))
            value = node.meta["val"]
        return self._scaled(value.shape, self.again[node].meta["val"].shape, str(node.meta.get("name", node.name)))

    def _scaled(self, shape: Any, again: Any, name: str) -> tuple[Dim, ...]:
        own, others = self.sizes
        if len(shape) == len(again) and all(n == m or n * others == m * own for n, m in zip(shape, again, strict=True)):
            return tuple(Dim(f"dim{i}" if n == m else BATCH, n) for i, (n, m) in enumerate(zip(shape, again, strict=True)))
        raise ConfigError(
            f"module: {name} is {list(shape)} for {own} samples and {list(again)} for {others}, its sizes must be in proportion",
            hint="let the module treat the samples of a batch one by one")


def _outputs(node: fx.Node) -> Iterator[fx.Node]:
    """The nodes of the tensors that a call gives: itself, or those that pick from it."""
    if isinstance(node.meta["val"], Tensor):
        yield node
        return
    for user in node.users:
        if "name" in user.meta and user.meta["name"].startswith(f"{node.meta['name']}["):
            yield from _outputs(user)


def _values(nodes: tuple[fx.Node, ...]) -> list[Tensor]:
    return [node.meta["val"] for node in nodes]


def _described(node: fx.Node) -> Parameter:
    return Parameter(name=str(node.target), dims=tuple(Dim(f"dim{i}", size) for i, size in enumerate(node.meta["val"].shape)))


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
