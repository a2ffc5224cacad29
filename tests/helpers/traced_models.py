"""Traced models made by hand: built-in descriptions, small chains, forks and U shapes."""

from __future__ import annotations

from dataclasses import replace

from parplan.profiles.models.module_source import ModuleSource
from parplan.profiles.models.operator_graph import (
    Dim,
    LayerClass,
    Operator,
    OperatorKind,
    Parameter,
    Tensor,
)
from parplan.profiles.models.spec import ModelSpec, TrainingSpec
from parplan.profiles.models.traced_model import TracedModel, TracedOperator
from parplan.profiles.models.transformer import build_graph

SOURCE = ModuleSource(factory="tests.helpers.external_modules:decoder")
_PARTS = {
    "norm1": "ln_1",
    "qkv": "attn.qkv",
    "rotary": "attn",
    "attention": "attn",
    "attention_out": "attn.out",
    "residual1": "",
    "norm2": "ln_2",
    "fc1": "mlp.fc1",
    "activation": "mlp",
    "fc2": "mlp.fc2",
    "residual2": "",
}


def traced_spec(spec: ModelSpec, training: TrainingSpec, micro_batch_size: int = 1) -> TracedModel:
    """The operators of a built-in model as a trace would have them.

    A tied head names the token table.
    """
    graph = build_graph(spec, training, micro_batch_size)
    operators = list(_named(graph.embedding, "wte", "stream_0", {}))
    for number in range(spec.num_layers):
        operators += _named(
            graph.block, f"h.{number}", f"stream_{number + 1}", {"block_input": f"stream_{number}"}
        )
    operators += _named(graph.head, "head", "loss", {"head_input": f"stream_{spec.num_layers}"})
    return TracedModel(
        name=spec.name,
        source=SOURCE,
        unit="tokens",
        micro_batch_size=micro_batch_size,
        inputs=(),
        operators=tuple(operators),
    )


def _named(layer: LayerClass, path: str, out: str, names: dict[str, str]) -> list[TracedOperator]:
    """A layer whose tensors and parameters have names of their own; its last output is `out`."""
    names = {**names, layer.operators[-1].outputs[0].name: out}

    def tensor(actual: Tensor) -> Tensor:
        return replace(actual, name=names.get(actual.name, f"{path}.{actual.name}"))

    def parameter(actual: Parameter, operator: Operator) -> Parameter:
        name = "wte.tokens.weight" if actual.tied else f"{path}.{operator.name}.{actual.name}"
        return replace(actual, name=name, tied=False)

    traced = []
    for operator in layer.operators:
        inputs = tuple(map(tensor, operator.inputs))
        outputs = tuple(map(tensor, operator.outputs))
        saved = tuple(map(tensor, operator.saved))
        part = _PARTS.get(operator.name, operator.name)
        traced.append(
            TracedOperator(
                path=f"{path}.{part}".rstrip("."),
                line="model.py:1",
                operator=replace(
                    operator,
                    name=f"{path}.{operator.name}",
                    inputs=inputs,
                    outputs=outputs,
                    saved=saved,
                    parameters=tuple(parameter(weight, operator) for weight in operator.parameters),
                ),
            )
        )
    return traced


BATCH, WIDTH = Dim("batch", 2), 8


def value(name: str, width: int = WIDTH) -> Tensor:
    """A [2, width] activation in fp32."""
    return Tensor(name=name, dims=(BATCH, Dim("features", width)), element_bytes=4)


def linear(
    path: str, x: Tensor, out: str, width: int = WIDTH, *, weight: str | None = None
) -> TracedOperator:
    """Returns the operator out = x W."""
    made, contracted = value(out, width), Dim("contracted", x.dims[-1].size)
    parameter = Parameter(
        name=weight or f"{path}.weight", dims=(Dim("features", width), contracted)
    )
    flops = 2 * x.num_elements * width
    return TracedOperator(
        path=path,
        line="net.py:1",
        operator=Operator(
            name=f"{path}_linear",
            kind=OperatorKind.MATMUL,
            dims=(*made.dims, contracted),
            inputs=(x,),
            outputs=(made,),
            saved=(x,),
            parameters=(parameter,),
            contracted="contracted",
            flops_forward=flops,
            flops_backward=2 * flops,
        ),
    )


def join(
    path: str, inputs: tuple[Tensor, ...], out: str, width: int | None = None, **marks: bool
) -> TracedOperator:
    """Returns an element-wise operator of `inputs`, as wide as the first unless given.

    `marks` are in_place, view and constant.
    """
    made = value(out, width or inputs[0].dims[-1].size)
    return TracedOperator(
        path=path,
        line="net.py:2",
        **marks,
        operator=Operator(
            name=f"{path}_{out}",
            kind=OperatorKind.ELEMENTWISE,
            dims=made.dims,
            inputs=inputs,
            outputs=(made,),
            saved=(),
        ),
    )


def activation(path: str, x: Tensor, out: str) -> TracedOperator:
    """relu, which keeps what it gives."""
    made = value(out, x.dims[-1].size)
    return TracedOperator(
        path=path,
        line="net.py:3",
        operator=Operator(
            name=f"{path}_relu",
            kind=OperatorKind.ELEMENTWISE,
            dims=made.dims,
            inputs=(x,),
            outputs=(made,),
            saved=(made,),
        ),
    )


def model_of(
    *operators: TracedOperator, inputs: tuple[Tensor, ...] = (value("batch_x"),)
) -> TracedModel:
    """The model of those operators for micro-batches of 2."""
    return TracedModel(
        name="net",
        source=SOURCE,
        unit="samples",
        micro_batch_size=2,
        inputs=inputs,
        operators=operators,
    )
