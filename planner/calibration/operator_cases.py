"""Cases to measure for an operator on one rank: its kernels with a curve, at their priced sizes.

The kernels are those of prices (costmodels/operators/kernels.py). Work that a profiler cannot
measure alone makes no case, and its price stays that of its class: casts to fp8 and fp8 products,
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

TIME = "time"  # name of the only pass of a case
Sizes = dict[str, int]


def operator_cases(
    operator: Operator, sharding: Sharding, model: ModelSpec, training: TrainingSpec
) -> tuple[Case, ...]:
    """Returns the cases of one rank's share of an operator, in no order of importance."""
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
    """Returns the kernels that each case of an operator measures, and kernels without a case."""
    runs = operator_kernels(_one_branch(operator), sharding, training)
    kernels = (*runs.forward, *runs.backward)
    measured = {
        case: _measured_by(case, kernels)
        for case in operator_cases(operator, sharding, model, training)
    }
    covered = {kernel for case_kernels in measured.values() for kernel in case_kernels}
    return measured, tuple(kernel for kernel in kernels if kernel not in covered)


def _measured_by(case: Case, kernels: Sequence[Kernel]) -> tuple[Kernel, ...]:
    points = {(each.curve, each.sizes) for each in case.passes}
    return tuple(kernel for kernel in kernels if (kernel.curve, kernel_sizes(kernel)) in points)


def kernels_of_update(case: Case, training: TrainingSpec) -> tuple[Kernel, ...]:
    """Returns the kernels that a case of `update_cases` measures."""
    return _measured_by(case, update_kernels(case.size("parameters"), training))


def update_cases(num_parameters: int, training: TrainingSpec) -> tuple[Case, ...]:
    """Returns the cases of Adam and of the gradient norm over a rank's parameters."""
    sizes = {"parameters": num_parameters}
    works = zip(("adamw", "gradient_norm"), update_kernels(num_parameters, training), strict=True)
    return tuple(
        _case(work, sizes, training.precision.value, (_pass(TIME, kernel),))
        for work, kernel in works
    )


def _case(work: str, sizes: Sizes, precision: str, passes: tuple[CasePass, ...]) -> Case:
    return Case(work=work, sizes=tuple(sizes.items()), precision=precision, passes=passes)


def _pass(name: str, kernel: Kernel) -> CasePass:
    return CasePass(name=name, curve=kernel.curve, sizes=kernel_sizes(kernel))


def kernel_sizes(kernel: Kernel) -> tuple[int, ...]:
    """Returns the kernel's point on its curve."""
    return tuple(map(round, kernel.sizes))


def _both_ways(kernels: OperatorKernels) -> tuple[CasePass, ...]:
    (forward,), (backward,) = kernels.forward, kernels.backward
    return _pass("forward", forward), _pass("backward", backward)


def _one_branch(operator: Operator) -> Operator:
    """Reduces a residual addition of two branches to one branch, whose curve prices both."""
    if operator.kind is OperatorKind.ELEMENTWISE:
        return replace(operator, inputs=operator.inputs[:2])
    return operator


def _linear(operator: Operator, kernels: OperatorKernels, precision: str) -> Iterator[Case]:
    products = [
        kernel
        for kernel in (*kernels.forward, *kernels.backward)
        if isinstance(kernel, ProductKernel)
    ]
    m, n, k = products[0].sizes
    if not any(product.peak for product in products):
        sizes = {"m": m, "n": n, "k": k, "bias": int(len(operator.parameters) > 1)}
        passes = tuple(_pass(product.curve, product) for product in products)
        yield _case("linear", sizes, precision, passes)
    for kernel in kernels.weights:
        if not isinstance(kernel, StreamKernel):
            continue
        only = (_pass(TIME, kernel),)
        if kernel.name == "bias_gradient":
            yield _case("bias_gradient", {"tokens": m, "width": n}, precision, only)
        if kernel.name == "accumulation":
            yield _case("accumulation", {"elements": n * k}, precision, only)


def _attention(
    operator: Operator, sharding: Sharding, kernels: OperatorKernels, precision: str
) -> Iterator[Case]:
    batch, heads, seq, keys, head_dim = _local(operator, sharding)
    if isinstance(kernels.forward[0], FusedKernel):
        group = next(dim.unit for dim in operator.dims if dim.name == "heads")
        sizes = {
            "batch": batch,
            "heads": heads,
            "kv_heads": heads // group,
            "seq": seq,
            "head_dim": head_dim,
            "dropout": int(kernels.forward[0].dropped),
        }
        yield _case("attention", sizes, precision, _both_ways(kernels))
        return
    streams = {
        "softmax": {"batch": batch, "heads": heads, "seq": seq},
        "dropout": {"elements": batch * heads * seq * keys},
    }
    for kernel in kernels.forward:
        if isinstance(kernel, StreamKernel):
            work = kernel.name
            sizes = streams[work]
        else:
            work = "batched"
            sizes = dict(zip(("batch", "m", "n", "k"), kernel_sizes(kernel), strict=True))
        back = next(backward for backward in kernels.backward if _alike(kernel, backward))
        yield _case(work, sizes, precision, (_pass("forward", kernel), _pass("backward", back)))


def _alike(forward: Kernel, backward: Kernel) -> bool:
    """True if two kernels of un-fused attention are the passes of one operation."""
    if isinstance(forward, StreamKernel) and isinstance(backward, StreamKernel):
        return forward.name == backward.name
    return type(forward) is type(backward) and forward.sizes == backward.sizes


def _local(operator: Operator, sharding: Sharding) -> tuple[int, ...]:
    return tuple(sharding.dim_size(operator, dim.name) for dim in operator.dims)


def _tokens(*names: str) -> Callable[[Operator, Sharding, ModelSpec], Sizes]:
    """Returns the sizes of an operation on [tokens, ...], whose last dims have `names`."""

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
