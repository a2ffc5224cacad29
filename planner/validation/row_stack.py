"""The software of a measured row: its stack, precision, recompute and open choices."""

from __future__ import annotations

import functools
import re
from dataclasses import replace

from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.layers.recompute import Recompute
from parplan.planner.validation.expert_recipes import recomputes_little, with_recipe
from parplan.planner.validation.frameworks import (
    FP8_DTYPES,
    FUSED_LOSS_LOGIT_BYTES,
    INTERLEAVING_STACKS,
    KERNELS,
    NARROW_GRADIENTS,
    NO_OVERLAP,
    OPEN_MICRO_BATCHES,
    PRECISIONS,
    RECOMPUTE,
    RELEASE_TEST_UNFUSED,
    SELECTIVE_OF,
    STACKS,
    UNKNOWN_STACK,
)
from parplan.planner.validation.row_cells import Row, UnpricedError, whole
from parplan.profiles.machines.machine_catalog import load_stack
from parplan.profiles.machines.stack_terms import Terms
from parplan.profiles.models.spec import Precision, TrainingSpec
from parplan.profiles.stack import AttentionKernel, AvailableKernel, FlashKernel, Stack


@functools.cache
def stack_facts(name: str) -> Stack:
    """Loads a packaged stack without fitted terms."""
    return load_stack(name, Terms())


def stack_name(row: Row) -> str:
    """Names the stack of the row's framework, by default one of plain PyTorch parts."""
    return described_stack(row) or UNKNOWN_STACK


def described_stack(row: Row) -> str | None:
    return next((stack for pattern, stack in STACKS if re.search(pattern, row["framework"])), None)


def stack_of(row: Row, stack: Stack) -> Stack:
    """Returns the stack with the changes in the row's notes, such as `attention=flash1`."""
    notes = row["notes"]
    stack = with_recipe(row, stack)
    fused_loss = re.search(r"fused cross entropy|cross-entropy fusion on", notes)
    if fused_loss or "cross_entropy_loss_fusion" in row["id"]:
        stack = replace(stack, logit_bytes=FUSED_LOSS_LOGIT_BYTES)
    if NO_OVERLAP.search(notes):
        stack = replace(stack, overlap_tensor_parallel=False, overlap_transfers=False)
    if "asyncTP" in row["id"]:
        stack = replace(stack, overlap_tensor_parallel=True)
    unfused = re.search(r"attention-backend unfused|TE impl local", notes)
    stale = RELEASE_TEST_UNFUSED.search(row["id"]) and whole(row, "cp", 1) == 1
    if unfused or stale:
        return replace(stack, attention=AttentionKernel.UNFUSED)
    noted = re.search(r"\battention=(\w+)", notes)
    if noted is None:
        return stack
    kernel = KERNELS.get(noted[1], noted[1])
    if kernel == AttentionKernel.UNFUSED:
        return replace(stack, attention=AttentionKernel.UNFUSED)
    if kernel not in list(FlashKernel):
        raise UnpricedError(f"no attention kernel {noted[1]!r}")
    return replace(
        stack,
        attention=AttentionKernel.FLASH,
        flash_kernels=(AvailableKernel(kernel=FlashKernel(kernel)),),
    )


def precision_of(row: Row) -> tuple[Precision, bool]:
    """Returns the precision of weights, and whether products run in fp8. Raises UnpricedError."""
    dtype = row["dtype"].lower()
    if not dtype:
        raise UnpricedError("dtype is not stated")
    fp8 = dtype in FP8_DTYPES
    if dtype not in PRECISIONS and not fp8:
        raise UnpricedError(f"precision {row['dtype']!r}")
    return Precision.BF16 if fp8 else PRECISIONS[dtype], fp8


def training_of(row: Row, stack: Stack) -> TrainingSpec:
    precision, fp8 = precision_of(row)
    # Megatron-LM has a flag for it that is off by default
    overlap = stack.overlap_grad_reduce and "Megatron-LM" not in row["framework"]
    if NO_OVERLAP.search(row["notes"]):
        overlap = False
    elif "overlap=grad" in row["notes"]:
        overlap = True
    return TrainingSpec(
        global_batch_size=whole(row, "global_batch"),
        seq_length=whole(row, "seq_len"),
        precision=precision,
        gradient_precision=_gradient_precision(row, precision),
        attention=stack.attention,
        fp8_matmuls=fp8,
        overlap_grad_reduce=overlap,
        stack=stack,
    )


def _gradient_precision(row: Row, precision: Precision) -> Precision:
    """Returns fp32 for bf16 weights, else the precision of the weights.

    InternEvo and the runs of `NARROW_GRADIENTS` keep bf16.
    """
    narrow = "InternEvo" in row["framework"] or NARROW_GRADIENTS.match(row["id"])
    return Precision.FP32 if precision is Precision.BF16 and not narrow else precision


def micro_batches_of(row: Row, mesh: Mesh) -> tuple[int, ...]:
    if row["micro_batch"]:
        return (whole(row, "micro_batch"),)
    per_rank = whole(row, "global_batch") // mesh.dp
    return tuple(
        size for size in OPEN_MICRO_BATCHES if size <= per_rank and per_rank % size == 0
    ) or (1,)


def virtual_stages_of(row: Row, mesh: Mesh, stack: Stack) -> tuple[int, ...]:
    """Returns open choices only if the framework interleaves and the row states no micro-batch."""
    if row["vpp"] or mesh.pp == 1 or row["micro_batch"] or stack.name not in INTERLEAVING_STACKS:
        return (max(1, whole(row, "vpp", 1)),)  # some write 0 for no interleaving
    per_rank = whole(row, "layers") // mesh.pp
    return tuple(count for count in range(1, per_rank + 1) if per_rank % count == 0)


def recompute_of(row: Row, stack: Stack) -> tuple[tuple[Recompute, ...], ...]:
    if not row["recompute"] and recomputes_little(row):
        return ((Recompute.NONE,),)
    if not row["recompute"]:
        return tuple((level,) for level in Recompute)
    cell = row["recompute"]
    if cell == Recompute.SELECTIVE:
        cell = SELECTIVE_OF.get(stack.name, cell)
    if cell not in RECOMPUTE:
        raise UnpricedError(f"recompute {cell!r}")
    return (RECOMPUTE[cell],)
