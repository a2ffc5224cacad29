"""The software of a measured row: its stack, precision, recompute and open choices."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, replace

from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.layers.recompute import Recompute
from parplan.planner.validation.block_modules import OFFLOADED, named_modules
from parplan.planner.validation.expert_recipes import recomputes_little, with_recipe
from parplan.planner.validation.fine_tuned_rows import fine_tuning_of
from parplan.planner.validation.frameworks import (
    ASYNC_TENSOR_PARALLEL,
    COMPILED,
    COMPILED_LOSS_LOGIT_BYTES,
    COMPILING_STACK,
    CURRENT_SCALING,
    DEFERRED_HEAD_GRADIENTS,
    EAGER,
    FUSED_LOSS_LOGIT_BYTES,
    IN_BACKWARD,
    INTERLEAVING_STACKS,
    KERNELS,
    LOGIT_BYTES,
    NARROW_GRADIENTS,
    NARROW_WEIGHTS,
    NO_OVERLAP,
    OFFLOADS,
    OPEN_MICRO_BATCHES,
    OPTIMIZERS,
    PRECISIONS,
    PRODUCT_FORMATS,
    PURE,
    RECOMPUTE,
    RELEASE_TEST_IMBALANCE,
    RELEASE_TEST_UNFUSED,
    SELECTIVE_OF,
    STACK_OF_LOG,
    STACKS,
    UNKNOWN_STACK,
)
from parplan.planner.validation.packed_rows import documents_of_row
from parplan.planner.validation.row_cells import Row, UnpricedError, choice, is_true, whole
from parplan.planner.validation.uneven_divisions import laid_out
from parplan.profiles.machines.hardware import Device
from parplan.profiles.machines.machine_catalog import load_stack
from parplan.profiles.machines.stack_terms import Terms
from parplan.profiles.models.spec import Optimizer, Precision, TrainingSpec
from parplan.profiles.product_formats import ProductFormat, is_before_blackwell
from parplan.profiles.stack import (
    EVERY_PLAIN_KERNEL,
    AttentionKernel,
    AvailableKernel,
    FlashKernel,
    Stack,
)
from parplan.profiles.state_precision import StatePrecision
from parplan.profiles.units import MIB

_STACK_OF_LOG = re.compile(re.escape(STACK_OF_LOG).replace(r"\{\}", r"([\w.-]+)"))
_HOPPER = 9.0  # compute capability


@dataclass(frozen=True, slots=True)
class Modules:
    """Modules of the blocks, as Megatron-LM names them, that are recomputed or offloaded."""

    recomputed: tuple[str, ...] = ()
    offloaded: tuple[str, ...] = ()


NO_MODULES = Modules()


@functools.cache
def stack_facts(name: str) -> Stack:
    """Loads a packaged stack without fitted terms."""
    return load_stack(name, Terms())


def stack_name(row: Row) -> str:
    """Names the stack of the row's framework, by default one of plain PyTorch parts."""
    return described_stack(row) or UNKNOWN_STACK


def described_stack(row: Row) -> str | None:
    named = _STACK_OF_LOG.search(row["framework"])
    if named:
        return named[1]
    return next((stack for pattern, stack in STACKS if re.search(pattern, row["framework"])), None)


def stack_of(row: Row, stack: Stack) -> Stack:
    """Returns the stack with the changes in the row's notes, such as `attention=flash1`."""
    notes = row["notes"]
    stack = with_recipe(row, stack)
    fused_loss = re.search(r"fused cross entropy|cross-entropy fusion on", notes)
    if fused_loss or "cross_entropy_loss_fusion" in row["id"]:
        stack = replace(stack, logit_bytes=FUSED_LOSS_LOGIT_BYTES)
    of_loss = next((size for pattern, size in LOGIT_BYTES if re.match(pattern, row["id"])), None)
    if of_loss is not None:
        stack = replace(stack, logit_bytes=of_loss)
    elif stack.name == COMPILING_STACK and COMPILED.search(notes):
        stack = replace(stack, logit_bytes=COMPILED_LOSS_LOGIT_BYTES)
    if ASYNC_TENSOR_PARALLEL.search(notes):
        stack = replace(stack, async_reduce_scatter=True)
    if EAGER.match(row["id"]):
        stack = replace(stack, plain_kernels=EVERY_PLAIN_KERNEL)
    if NO_OVERLAP.search(notes):
        stack = replace(stack, overlap_tensor_parallel=False, overlap_transfers=False)
    if "asyncTP" in row["id"]:
        stack = replace(stack, overlap_tensor_parallel=True)
    if PURE.match(row["dtype"].lower()):
        stack = stack.keeping(StatePrecision.BF16)
    elif row.get("moments") == "bf16":
        stack = stack.keeping(StatePrecision.BF16_MOMENTS)
    if "defer_embedding_wgrad_compute" in row["id"]:
        stack = replace(stack, deferred_head_gradients=DEFERRED_HEAD_GRADIENTS)
    if IN_BACKWARD.match(row["id"]):
        stack = replace(stack, frees_gradients=True, updates_in_backward=True)
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


def on_device(row: Row, stack: Stack, device: Device) -> Stack:
    """Returns the stack with the facts that depend on device and flags.

    Those of memory are tens of MiB, so that they count in the small models of Megatron-LM's tests
    alone; a stack has those of a Hopper device. cuBLAS has a workspace for the forward and one for
    the backward thread, of 32 MiB from Hopper on and in deterministic mode, else of 8 MiB.
    Transformer Engine has one of 32 MiB from Hopper on and of 4 MiB before, and four more for
    grouped products (transformer_engine/pytorch/module/base.py: get_multi_stream_cublas_workspace).
    FlashAttention 2 has the batch before the sequence, and its output is saved again in Megatron's
    order; it runs before Hopper, and in deterministic mode on Blackwell, where cuDNN's attention
    with dropout is not deterministic (NVIDIA/TransformerEngine pull request 2584). Tests without
    Transformer Engine keep the workspaces of the stack, which their memory agrees with.
    """
    is_local = row.get("engine") == "local" or "TE impl local" in row["notes"]
    if "Megatron-LM CI" not in row["framework"] or is_local:
        return stack
    capability = device.compute_capability or _HOPPER
    is_new = capability >= _HOPPER
    noted = re.search(r"deterministic (mode|kernels)", row["notes"])
    deterministic = noted is not None or row.get("deterministic") == "true"
    threads = 2 * (32 if is_new or deterministic else 8)
    engine = 32 if is_new else 4
    engines = 1 + (4 if row.get("grouped_gemm") == "true" else 0)
    is_older_kernel = deterministic and not is_before_blackwell(capability)
    copies = int(not is_new or is_older_kernel)
    older = (AvailableKernel(kernel=FlashKernel.FLASH2),)
    return replace(
        stack,
        deterministic=deterministic,
        flash_kernels=older if is_older_kernel else stack.flash_kernels,
        workspace_bytes=(threads + engines * engine) * MIB,
        attention_output_copies=copies if stack.attention is AttentionKernel.FLASH else 0,
    )


def precision_of(row: Row) -> tuple[Precision, ProductFormat | None]:
    """Returns the precision of weights, and the narrow format of products, if they have one.

    Raises UnpricedError.
    """
    dtype = row["dtype"].lower()
    if not dtype:
        raise UnpricedError("dtype is not stated")
    if PURE.match(dtype):
        return Precision.BF16, None
    narrow = PRODUCT_FORMATS.get(dtype)
    if dtype not in PRECISIONS and narrow is None:
        raise UnpricedError(f"precision {row['dtype']!r}")
    if dtype == "fp8" and CURRENT_SCALING.search(row["framework"]):
        narrow = ProductFormat.FP8_CURRENT
    return (Precision.BF16 if narrow else PRECISIONS[dtype]), narrow


def training_of(row: Row, stack: Stack) -> TrainingSpec:
    precision, narrow = precision_of(row)
    # Megatron-LM has a flag for it that is off by default
    overlap = stack.overlap_grad_reduce and "Megatron-LM" not in row["framework"]
    if NO_OVERLAP.search(row["notes"]):
        overlap = False
    elif (
        "overlap=grad" in row["notes"]
        or row.get("overlap") == "grad"
        or ("nanotron" in row["framework"] and row["zero_stage"] == "0")
    ):
        overlap = True
    return TrainingSpec(
        global_batch_size=whole(row, "global_batch"),
        seq_length=whole(row, "seq_len"),
        precision=precision,
        gradient_precision=_gradient_precision(row, precision),
        optimizer=_optimizer(row),
        fine_tuning=fine_tuning_of(row),
        expert_imbalance=RELEASE_TEST_IMBALANCE if "Megatron-LM CI" in row["framework"] else 1.0,
        attention=stack.attention,
        products=narrow,
        narrow_weights=_gathers_casts(row, narrow, stack),
        overlap_grad_reduce=overlap,
        documents=documents_of_row(row),
        stack=stack,
    )


def _gathers_casts(row: Row, narrow: ProductFormat | None, stack: Stack) -> bool:
    """Returns true for a run that gathers the weights of its products in their format."""
    if narrow not in stack.narrow_gathers or narrow is ProductFormat.FP8_BLOCK:
        return False
    if row.get("narrow_weights"):
        return is_true(row, "narrow_weights")
    return any(re.search(pattern, row[cell]) for cell, pattern in NARROW_WEIGHTS)


def _gradient_precision(row: Row, precision: Precision) -> Precision:
    """Returns the stated type, else fp32 for bf16 weights, else the precision of the weights.

    Runs in pure bf16, InternEvo and the runs of `NARROW_GRADIENTS` keep bf16.
    """
    stated = choice(row, "gradients", Precision)
    if stated is not None:
        return stated
    pure = PURE.match(row["dtype"].lower())
    narrow = pure or "InternEvo" in row["framework"] or NARROW_GRADIENTS.match(row["id"])
    return Precision.FP32 if precision is Precision.BF16 and not narrow else precision


def _optimizer(row: Row) -> Optimizer:
    """Returns the optimizer that the framework, the model cell or the notes name, else Adam."""
    named = f"{row['framework']} {row['model']} {row['notes']}"
    return next(
        (optimizer for pattern, optimizer in OPTIMIZERS if re.search(pattern, named)),
        Optimizer.ADAM,
    )


def micro_batches_of(row: Row, mesh: Mesh) -> tuple[int, ...]:
    if row["micro_batch"]:
        return (whole(row, "micro_batch"),)
    per_rank = whole(row, "global_batch") // mesh.dp
    return tuple(
        size for size in OPEN_MICRO_BATCHES if size <= per_rank and per_rank % size == 0
    ) or (1,)


def virtual_stages_of(row: Row, mesh: Mesh, stack: Stack) -> tuple[int, ...]:
    """Returns open choices only if the framework interleaves and the row states no micro-batch.

    A stated layout has all virtual stages.
    """
    if row.get("pipeline_layout"):
        return (max(1, len(laid_out(row["pipeline_layout"])) // mesh.pp),)
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
    if cell in RECOMPUTE:
        return (RECOMPUTE[cell],)
    if named_modules(cell):
        return ((Recompute.NONE,),)
    raise UnpricedError(f"recompute {cell!r}")


def modules_of(row: Row) -> Modules:
    """Returns the modules that a row recomputes by name, and those that it offloads.

    Raises UnpricedError for an offloaded module that is not known.
    """
    recomputed = () if row["recompute"] in RECOMPUTE else named_modules(row["recompute"])
    noted = "all" if OFFLOADS.search(row["notes"]) else ""
    offloaded = tuple((row.get("offload") or noted).split())
    for module in offloaded:
        if module not in OFFLOADED:
            raise UnpricedError(f"offloaded module {module!r}")
    return Modules(recomputed, offloaded)
