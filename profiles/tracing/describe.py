"""Program -> TracedModel: what each torch call computes, reads, gives and keeps, as operators of profiles/model.py.

Products and attention have their dims and model FLOPs, a backward pass twice the forward's (EQUATIONS K2, K4); all else is priced by
its bytes. What autograd keeps was observed while recording; two tensors of the same memory have the name of the first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from profiles import model
from profiles.errors import ConfigError
from profiles.model import Dim, Operator, OperatorKind, Parameter
from profiles.traced import BATCH, TracedModel, TracedOperator
from profiles.tracing.record import PARAMETER, Program


def describe(program: Program, other: Program) -> TracedModel:
    """The operators of `program`; a dim is the batch's where `other`, recorded with another micro-batch size, has it in proportion."""
    if [node.target for node in program.calls] != [node.target for node in other.calls]:
        raise ConfigError(f"module: {program.workload.name} calls other functions for another micro-batch size")
    describer = _Describer(program, other)
    operators = tuple(describer.traced(node, again) for node, again in zip(program.calls, other.calls, strict=True))
    inputs = tuple(
        describer.tensor(node.name, node.meta["val"], again.meta["val"])
        for node, again in zip(_placeholders(program), _placeholders(other), strict=True))
    return TracedModel(
        name=program.workload.name, source=program.workload.source, unit=program.workload.unit,
        micro_batch_size=program.micro_batch_size, inputs=inputs, operators=operators, shared=program.shared)


def _placeholders(program: Program) -> list[fx.Node]:
    return [node for node in program.graph.nodes if node.op == "placeholder"]


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
