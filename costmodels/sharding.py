"""How tensor and sequence parallelism divide the operators of a layer (Megatron's strategy, EQUATIONS S and M3)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from profiles.model import Operator, Parameter, Tensor

PARALLEL_DIMS = ("heads", "ffn", "vocab")


@dataclass(frozen=True, slots=True)
class Sharding:
    """Tensor parallel degree `tp`; with `sequence_parallel` what tensor parallelism cannot split is split by token."""

    tp: int = 1
    sequence_parallel: bool = False

    def tensor_degree(self, tensor: Tensor) -> int:
        """Into how many parts a stored activation is divided over the tensor-parallel axis."""
        if any(tensor.has(dim) for dim in PARALLEL_DIMS):
            return self.tp
        return self.tp if self.sequence_parallel and tensor.has("sequence") else 1

    def tensor_bytes(self, tensor: Tensor) -> int:
        """Bytes of `tensor` that one rank stores."""
        return -(-tensor.num_bytes // self.tensor_degree(tensor))

    def dim_size(self, operator: Operator, dim_name: str) -> int:
        """The extent of one of the operator's dims on one rank; matmuls and attention see every token of the sequence."""
        if dim_name == operator.parallel_dim:
            return -(-operator.size(dim_name) // self.tp)
        if dim_name == "sequence" and operator.parallel_dim is None and self.sequence_parallel:
            return -(-operator.size(dim_name) // self.tp)
        return operator.size(dim_name)

    def parameter_shape(self, operator: Operator, parameter: Parameter) -> tuple[int, ...]:
        """The shape of a parameter on one rank: split along the operator's parallel dim where it has that dim."""
        split = parameter.tensor_dim(operator.parallel_dim)
        return tuple(-(-size // self.tp) if i == split else size for i, size in enumerate(parameter.shape))

    def parameter_elements(self, operator: Operator) -> int:
        """Elements of the operator's parameters on one rank."""
        return sum(math.prod(self.parameter_shape(operator, parameter)) for parameter in operator.parameters)

    def gathers_input(self, operator: Operator) -> bool:
        """Column-parallel: the operator is split along a dim its input lacks, so it reads the whole input.

        Forward: an all-gather of tokens under sequence parallelism, else nothing. Backward: the input gradients of the
        ranks are partial sums, ended by a reduce-scatter or an all-reduce.
        """
        split = operator.parallel_dim
        return self.tp > 1 and split is not None and bool(operator.inputs) and not any(t.has(split) for t in operator.inputs)

    def reduces_output(self, operator: Operator) -> bool:
        """Row-parallel: the operator sums over the dim it is split along, so the outputs of the ranks are partial sums.

        Forward: a reduce-scatter over tokens under sequence parallelism, else an all-reduce. Backward: an all-gather of
        the output gradient under sequence parallelism, else nothing.
        """
        return self.tp > 1 and operator.parallel_dim is not None and operator.contracted == operator.parallel_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class Placements:
    """DTensor placements over the tensor-parallel axis, as `Shard(0)@tp`; an empty tuple is Replicate."""

    parameters: dict[str, tuple[str, ...]]
    input: tuple[str, ...]
    output: tuple[str, ...]


def placements(operator: Operator, sharding: Sharding) -> Placements:
    """The placements that `sharding` gives an operator's parameters, input and output, derived from its dims.

    Activations are [batch, sequence, feature]: `Shard(2)@tp` splits features, `Shard(1)@tp` tokens.
    """
    split = operator.parallel_dim

    def activation(tensors: tuple[Tensor, ...], *, whole: bool) -> tuple[str, ...]:
        if split is not None and any(tensor.has(split) for tensor in tensors):
            return (f"Shard({len(tensors[0].dims) - 1})@tp",)
        return () if whole or not sharding.sequence_parallel else ("Shard(1)@tp",)

    def parameter(found: Parameter) -> tuple[str, ...]:
        dim = found.tensor_dim(split)
        return () if dim is None else (f"Shard({dim})@tp",)

    return Placements(
        parameters={found.name: parameter(found) for found in operator.parameters},
        input=activation(operator.inputs, whole=split is not None),
        output=activation(operator.outputs, whole=not operator.outputs or not operator.outputs[0].has("hidden")))
