"""One operator on one rank -> the cases to measure for it: those of its kernels that have a curve,
at exactly the sizes of their prices.

The kernels are those that prices add up (costmodels/operators/kernels.py). What a profiler cannot
measure alone makes no case and keeps the price of its class: casts to fp8 and products in it,
grouped products of experts and their exchanges, gradients that another kernel adds up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from parplan.costmodels.operators.kernels import (
    FusedKernel,
    Kernel,
    ProductKernel,
    StreamKernel,
    update_kernels,
)
from parplan.costmodels.operators.operator_kernels import OperatorKernels, operator_kernels
from parplan.costmodels.operators.sharding import Sharding
from parplan.profiles.machines.measurements import Case, CasePass
from parplan.profiles.models.operator_graph import Operator, OperatorKind
from parplan.profiles.models.spec import ModelSpec, TrainingSpec

TIME = "time"  # of a case with one part
Sizes = dict[str, int]


def operator_cases(
    operator: Operator, sharding: Sharding, model: ModelSpec, training: TrainingSpec
) -> tuple[Case, ...]:
    """The cases of one rank's share of an operator, in no order of importance."""
    kernels = operator_kernels(_one_branch(operator), sharding, training)
    precision = training.precision.value
    if operator.kind is OperatorKind.MATMUL:
        return tuple(_linear(operator, kernels, precision))
    if operator.kind is OperatorKind.ATTENTION:
        return tuple(_attention(operator, sharding, kernels, precision))
    work = next((kernel.name for kernel in kernels.forward if isinstance(kernel, StreamKernel)), "")
    if work not in _SIZES:
        return ()
    return (_case(work, _SIZES[work](operator, sharding, model), precision, _both_ways(kernels)),)


def kernels_by_case(
    operator: Operator,
    sharding: Sharding,
    model: ModelSpec,
    training: TrainingSpec,
) -> tuple[dict[Case, tuple[Kernel, ...]], tuple[Kernel, ...]]:
    """The kernels that each case of an operator measures, and those that none does."""
    runs = operator_kernels(_one_branch(operator), sharding, training)
    kernels = (*runs.forward, *runs.backward)
    found = {
        case: _measured_by(case, kernels)
        for case in operator_cases(operator, sharding, model, training)
    }
    covered = {kernel for measured in found.values() for kernel in measured}
    return found, tuple(kernel for kernel in kernels if kernel not in covered)


def _measured_by(case: Case, kernels: Sequence[Kernel]) -> tuple[Kernel, ...]:
    points = {(one.curve, one.sizes) for one in case.passes}
    return tuple(kernel for kernel in kernels if (kernel.curve, kernel_sizes(kernel)) in points)


def kernels_of_update(case: Case, training: TrainingSpec) -> tuple[Kernel, ...]:
    """The kernels that a case of `update_cases` measures."""
    return _measured_by(case, update_kernels(case.size("parameters"), training))


def update_cases(num_parameters: int, training: TrainingSpec) -> tuple[Case, ...]:
    """Adam over so many parameters of a rank, and the norm of their gradients."""
    works = ("adamw", "gradient_norm")
    return tuple(
        _case(
            work, {"parameters": num_parameters}, training.precision.value, (_pass(TIME, kernel),)
        )
        for work, kernel in zip(works, update_kernels(num_parameters, training), strict=True)
    )


def _case(work: str, sizes: Sizes, precision: str, passes: tuple[CasePass, ...]) -> Case:
    return Case(work=work, sizes=tuple(sizes.items()), precision=precision, passes=passes)


def _pass(name: str, kernel: Kernel) -> CasePass:
    return CasePass(name=name, curve=kernel.curve, sizes=kernel_sizes(kernel))


def kernel_sizes(kernel: Kernel) -> tuple[int, ...]:
    """Where the kernel is on its curve."""
    return tuple(map(round, kernel.sizes))


def _both_ways(kernels: OperatorKernels) -> tuple[CasePass, ...]:
    (forward,), (backward,) = kernels.forward, kernels.backward
    return _pass("forward", forward), _pass("backward", backward)


def _one_branch(operator: Operator) -> Operator:
    """A residual addition of two branches is measured as one of one branch: the price of the other
    sizes is between points.
    """
    return (
        replace(operator, inputs=operator.inputs[:2])
        if operator.kind is OperatorKind.ELEMENTWISE
        else operator
    )


def _linear(operator: Operator, kernels: OperatorKernels, precision: str) -> Iterator[Case]:
    products = [
        kernel
        for kernel in (*kernels.forward, *kernels.backward)
        if isinstance(kernel, ProductKernel)
    ]
    m, n, k = products[0].sizes
    if not any(product.fp8 for product in products):
        sizes = {"m": m, "n": n, "k": k, "bias": int(len(operator.parameters) > 1)}
        yield _case(
            "linear", sizes, precision, tuple(_pass(product.curve, product) for product in products)
        )
    for kernel in kernels.weights:
        if isinstance(kernel, StreamKernel) and kernel.name == "bias_gradient":
            yield _case(
                "bias_gradient", {"tokens": m, "width": n}, precision, (_pass(TIME, kernel),)
            )
        if isinstance(kernel, StreamKernel) and kernel.name == "accumulation":
            yield _case("accumulation", {"elements": n * k}, precision, (_pass(TIME, kernel),))


def _attention(
    operator: Operator, sharding: Sharding, kernels: OperatorKernels, precision: str
) -> Iterator[Case]:
    batch, heads, seq, keys, head_dim = (
        sharding.dim_size(operator, dim.name) for dim in operator.dims
    )
    if isinstance(kernels.forward[0], FusedKernel):
        group = next(dim.unit for dim in operator.dims if dim.name == "heads")
        sizes = {
            "batch": batch,
            "heads": heads,
            "kv_heads": heads // group,
            "seq": seq,
            "head_dim": head_dim,
        }
        yield _case(
            "attention", {**sizes, "dropout": int(operator.dropped)}, precision, _both_ways(kernels)
        )
        return
    streams = {
        "softmax": {"batch": batch, "heads": heads, "seq": seq},
        "dropout": {"elements": batch * heads * seq * keys},
    }
    for kernel in kernels.forward:
        if isinstance(kernel, StreamKernel):
            work, sizes = kernel.name, streams[kernel.name]
        else:
            work, sizes = (
                "batched",
                dict(zip(("batch", "m", "n", "k"), kernel_sizes(kernel), strict=True)),
            )
        back = next(other for other in kernels.backward if _alike(kernel, other))
        yield _case(work, sizes, precision, (_pass("forward", kernel), _pass("backward", back)))


def _alike(kernel: Kernel, other: Kernel) -> bool:
    """Whether two kernels of un-fused attention are the two passes of one operation: streams by
    name, products by shape.
    """
    if isinstance(kernel, StreamKernel) and isinstance(other, StreamKernel):
        return kernel.name == other.name
    return type(kernel) is type(other) and kernel.sizes == other.sizes


def _local(operator: Operator, sharding: Sharding) -> tuple[int, ...]:
    return tuple(sharding.dim_size(operator, dim.name) for dim in operator.dims)


def _tokens(*names: str) -> Callable[[Operator, Sharding, ModelSpec], Sizes]:
    """Sizes of an operation on [tokens, ...]: all of its leading dims, and the last ones by
    `names`.
    """

    def sizes(operator: Operator, sharding: Sharding, model: ModelSpec) -> Sizes:
        local = _local(operator, sharding)
        return {
            "tokens": math.prod(local[: -len(names)]),
            **dict(zip(names, local[-len(names) :], strict=True)),
        }

    return sizes


def _sequences(operator: Operator, sharding: Sharding, model: ModelSpec) -> Sizes:
    return dict(zip(("batch", "seq", "hidden"), _local(operator, sharding), strict=True))


def _rotary(operator: Operator, sharding: Sharding, model: ModelSpec) -> Sizes:
    batch, seq, _ = _local(operator, sharding)
    parts = sharding.parts(operator, "heads")
    return {
        "batch": batch,
        "seq": seq,
        "heads": model.num_heads // parts,
        "kv_heads": model.num_kv_heads // parts,
        "head_dim": model.head_dim,
    }


_SIZES: dict[str, Callable[[Operator, Sharding, ModelSpec], Sizes]] = {
    "layer_norm": _tokens("hidden"),
    "rms_norm": _tokens("hidden"),
    "gelu": _tokens("width"),
    "swiglu": _tokens("width"),
    "residual": _tokens("hidden"),
    "dropped_residual": _tokens("hidden"),
    "cross_entropy": _tokens("vocab"),
    "embedding": _tokens("hidden", "vocab"),
    "rotary": _rotary,
    "positions": _sequences,
    "dropped_positions": _sequences,
}
