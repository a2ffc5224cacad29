"""The states and the passes of each optimizer, one row of a table each (EQUATIONS M7).

An optimizer keeps moments of every parameter beside its fp32 values. The values are the master copy
of a 16-bit parameter, or the parameter itself in fp32; the table has the moments alone.

    optimizer       moments of a matrix (r x c)              of tables and vectors
    adam            8 r c                                    the same
    adam-8bit       2 r c + 8 r ceil(c / 256)                tables the same, vectors 8
    muon            4 r c                                    8, by Adam
    adafactor       4 (r + c)                                tables the same, vectors 4
    sgd             0                                        0
    sgd-momentum    4 r c                                    4

Tables are the matrices of embedding and head. Below 4,096 elements adam-8bit has 8 bytes too.
Sources: torch 2.13 for the states of AdamW, Muon, Adafactor and SGD; Dettmers et al. 2022, arXiv
2110.02861, for blocks of 256 moments with an fp32 scale each, here of one row; bitsandbytes
(`min_8bit_size` 4096) for the tensors that stay in fp32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import MappingProxyType

from parplan.profiles.models.spec import Optimizer

FP32_BYTES = 4
BLOCK_ELEMENTS = 256  # 8-bit moments of a row with one scale
LEAST_8BIT_ELEMENTS = 4096  # a smaller tensor keeps its moments in fp32
NEWTON_SCHULZ_STEPS = 5  # of torch.optim.Muon


@dataclass(frozen=True, slots=True)
class WholeTensor:
    """A tensor that an optimizer updates, before it is divided over ranks.

    num_elements    decides whether moments have 8 bits, so that no division changes it
    table           a matrix of embedding or head
    matrix          the shape of the matrix, or of each of several in one tensor; empty for a vector
    """

    num_elements: int
    table: bool = False
    matrix: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Moments:
    """The moments of one tensor.

    whole       moments of every element
    in_8_bits   in 8 bits with scales, of a matrix that is not small
    factored    a matrix has one for each row and each column instead
    """

    whole: int = 0
    in_8_bits: bool = False
    factored: bool = False

    def num_bytes(self, shape: tuple[int, ...], tensor: WholeTensor, moment_bytes: int = 4) -> int:
        """Bytes of the moments of a part of `shape` of a tensor.

        moment_bytes: bytes of a moment that has no 8 bits
        """
        elements = math.prod(shape)
        if self.factored and tensor.matrix:
            return moment_bytes * (elements // shape[-1] + shape[-1])
        if self.in_8_bits and tensor.matrix and tensor.num_elements >= LEAST_8BIT_ELEMENTS:
            scales = elements // shape[-1] * -(-shape[-1] // BLOCK_ELEMENTS)
            return self.whole * (elements + FP32_BYTES * scales)
        return self.whole * moment_bytes * elements


@dataclass(frozen=True, slots=True, kw_only=True)
class Updates:
    """One optimizer.

    moments         of tables and vectors
    of_matrices     of other matrices
    further_bytes   bytes of an element of a matrix that its update moves beside the gradient, which
                    is read, the 16-bit parameter, which is written, and the values and the moments,
                    which are both
    orthogonal      its step makes the momentum of a whole matrix orthogonal
    """

    moments: Moments
    of_matrices: Moments
    further_bytes: int = 0
    orthogonal: bool = False

    def moments_of(self, tensor: WholeTensor) -> Moments:
        """Returns the moments that a tensor has."""
        return self.of_matrices if tensor.matrix and not tensor.table else self.moments

    @property
    def least_moments(self) -> float:
        """Bytes of moments that every element of every tensor has at least."""
        return min(_least(self.moments), _least(self.of_matrices))


def _least(moments: Moments) -> float:
    if moments.factored:
        return 0.0
    return float(moments.whole * (1 if moments.in_8_bits else FP32_BYTES))


def _alike(moments: Moments, further_bytes: int = 0) -> Updates:
    return Updates(moments=moments, of_matrices=moments, further_bytes=further_bytes)


_ADAM = Moments(whole=2)
OPTIMIZERS = MappingProxyType(
    {
        Optimizer.ADAM: _alike(_ADAM),
        Optimizer.ADAM_8BIT: _alike(Moments(whole=2, in_8_bits=True)),
        # The momentum is written in bf16 for the products, and their result is read.
        Optimizer.MUON: Updates(
            moments=_ADAM, of_matrices=Moments(whole=1), further_bytes=4, orthogonal=True
        ),
        # The gradient is read for the factors, for the norm of the update and for the update; the
        # values are read for their norm too.
        Optimizer.ADAFACTOR: _alike(Moments(whole=1, factored=True), further_bytes=12),
        Optimizer.SGD: _alike(Moments()),
        Optimizer.SGD_MOMENTUM: _alike(Moments(whole=1)),
    }
)

# with the same moments for each parameter of any tensor
PLAIN_OPTIMIZERS = (Optimizer.ADAM, Optimizer.SGD, Optimizer.SGD_MOMENTUM)


def moments_bytes(
    optimizer: Optimizer, shape: tuple[int, ...], tensor: WholeTensor, moment_bytes: int = 4
) -> int:
    """Bytes of the moments of a part of `shape` of a tensor (EQUATIONS M7)."""
    return OPTIMIZERS[optimizer].moments_of(tensor).num_bytes(shape, tensor, moment_bytes)
