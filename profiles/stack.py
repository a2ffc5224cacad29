"""The software stack: how a training framework runs a plan.

It is the third input beside model and cluster.

Two frameworks that run the same plan on the same devices differ by tens of percent: in their
attention kernel, in the communication that they hide under compute, in how fast their host launches
work. A fact that can be read in a framework's code is in its file in `configs/stacks`; a quantity
that cannot is one of a few terms that `planner/validation/term_fit.py` fits to measured steps
(`profiles/machines/stack_terms.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal, get_args

from parplan.profiles.errors import ConfigError, coerce_choice
from parplan.profiles.product_formats import ProductFormat
from parplan.profiles.state_precision import STATES, StateBytes16, StatePrecision
from parplan.profiles.units import MIB

_FORBID = {"extra": "forbid"}

ScheduleName = Literal[
    "gpipe",
    "1f1b",
    "interleaved",
    "early-recompute",
    "last-no-recompute",
    "scp",
    "zbv",
    "dualpipev",
    "custom",
]
MeshOrderName = Literal["pp-dp-tp", "dp-pp-tp"]
ContextFormName = Literal["ring", "all-gather", "all-to-all", "two-level"]
PlainKernelName = Literal["rms_norm", "rotary", "swiglu"]
RecomputeKind = Literal["none", "selective", "full", "operators"]
EVERY_SCHEDULE: tuple[ScheduleName, ...] = get_args(ScheduleName)
EVERY_PLAIN_KERNEL: tuple[PlainKernelName, ...] = get_args(PlainKernelName)
EVERY_RECOMPUTE: tuple[RecomputeKind, ...] = get_args(RecomputeKind)


class AttentionKernel(StrEnum):
    """The kinds of attention kernel, by the activations that they save.

    `flash` never stores the S x S scores; `unfused` stores them (and their dropout mask) for the
    backward pass.
    """

    FLASH = "flash"
    UNFUSED = "unfused"


class FlashKernel(StrEnum):
    """A fused attention kernel.

    They are PyTorch's memory-efficient one, the generations of FlashAttention, and cuDNN's
    (Transformer Engine).
    """

    EFFICIENT = "efficient"
    FLASH1 = "flash1"
    FLASH2 = "flash2"
    FLASH3 = "flash3"
    CUDNN = "cudnn"


class TowerDivision(StrEnum):
    """The ways in which tensor-parallel ranks run a tower.

    tensor     they divide its matrices, as those of the blocks
    images     each has whole matrices and its own images of a micro-batch
    repeated   each has whole matrices and all images
    """

    TENSOR = "tensor"
    IMAGES = "images"
    REPEATED = "repeated"


class ContextForm(StrEnum):
    """The ways in which ranks that divide a sequence compute its attention.

    ring         keys and values of each rank go round, one neighbour at a time
                 (Liu et al. 2023, arXiv 2310.01889)
    all-gather   every rank gathers keys and values of the whole sequence (Llama 3, arXiv
                 2407.21783, section 3.3.2)
    all-to-all   tokens are exchanged for heads, so that a rank has the whole sequence of some heads
                 (Ulysses, arXiv 2309.14509)
    two-level    all-to-all among neighbours, and a ring over the groups of them (USP, arXiv
                 2405.07719)
    """

    RING = "ring"
    ALL_GATHER = "all-gather"
    ALL_TO_ALL = "all-to-all"
    TWO_LEVEL = "two-level"


@dataclass(frozen=True, slots=True, kw_only=True)
class AvailableKernel:
    """A fused attention kernel that a stack runs on devices of at least a compute capability."""

    __pydantic_config__ = _FORBID

    kernel: FlashKernel
    from_capability: float = 0.0

    def __post_init__(self) -> None:
        coerce_choice(self, "kernel", FlashKernel)


# scaled_dot_product_attention: pytorch/pytorch aten/src/ATen/native/transformers/cuda/sdp_utils.cpp
SDPA_KERNELS = (
    AvailableKernel(kernel=FlashKernel.FLASH2, from_capability=8.0),
    AvailableKernel(kernel=FlashKernel.EFFICIENT, from_capability=5.0),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """A training framework at some version; the defaults are neutral, without any slowdown.

    Facts:
    attention                the kind of attention kernel that it runs by default
    flash_kernels            its fused attention kernels, each with the compute capability from
                             which it runs
    async_tensor_parallel    without sequence parallelism, input gradients are all-reduced under the
                             product for the weight gradient
    async_reduce_scatter     with it, input gradients are reduce-scattered under that product
    partitioned_transfers    each tensor-parallel rank sends its part of a pipeline boundary tensor
                             and gathers the received parts
    overlap_tensor_parallel  the gathers and reductions of sequence parallelism run under the
                             products before and after them
    tp_overlap               highest level of sub-pipelined tensor parallelism that it runs, 0 to 3
                             (costmodels/layers/sub_pipeline.py)
    divided_ends             embedding and head may be divided in other ways than by vocabulary
    weights_over_data        operators of a block may be divided over data-parallel ranks as well
    tensor_grid              tensor-parallel ranks may be a grid that divides products in two dims
    overlap_exchanges        the exchanges of tokens with their experts run under the compute of
                             another micro-batch
    sends_tokens_once        a token goes to a rank once, however many of its experts are there, and
                             to another node once (DeepEP, HybridEP); otherwise once for each expert
    narrow_experts           products of experts run in the format of the blocks' other products,
                             too
    fused_experts            one kernel has a product of experts, the activation and the casts
    stashes_experts          what experts save is copied to pages of memory, and back
    widens_expert_biases     biases of experts are added in fp32, expert by expert
    dispatch_launches        launches of one pass of a dispatch or a combination beside its own
    expert_launches          launches of a product for each expert of a rank
    overlap_transfers        under the interleaved schedule, transfers between stages run under the
                             compute of other micro-batches
    paired_exchanges         the tensors of a message between stages, and those of the message that
                             it meets in the other direction, are one operation: a transfer has one
                             latency, however many tensors it has
    overlap_grad_reduce      gradient reduction and parameter gathering run under compute
    fused_accumulation       the weight gradient's product adds to the gradient; otherwise it is
                             written and another kernel adds it
    plain_kernels            of rms_norm, rotary and swiglu those that are operations of PyTorch, a
                             kernel each, in place of one fused kernel; such a norm saves its input
                             in fp32 and its scaled values
    deterministic            it runs kernels that give equal bits in every run, of which the
                             backward pass of FlashAttention 2 is priced
    schedules                the pipeline schedules that it runs
    recompute                the kinds of recompute that it runs; `operators` is any list of
                             operators
    mesh_orders              the orders of the parallel axes over the ranks, outermost first, that
                             it can start in (costmodels/communication/mesh.py)
    context_forms            the forms of context parallelism that it runs
    sends_within_windows     context-parallel ranks send keys and values to those ranks alone whose
                             queries read them, where a window or documents bound their reach
    divides_documents        context-parallel ranks have equal parts of every document, so that they
                             have equal work
    context_alone            it divides sequences only without tensor and pipeline parallelism
    divides_experts          each expert may be divided over the tensor-parallel ranks
    tower_divisions          the ways in which its tensor-parallel ranks run a tower
    equal_image_parts        under sequence parallelism ranks have equal parts of the tokens of an
                             image; False: it pads them
    product_formats          the formats that its products of blocks run in beside the precision of
                             training; the first of each peak is that of --fp8
    state_precisions         the precisions in which its optimizer keeps states of 16-bit parameters
    gathers_casts            under sequence parallelism tokens are cast to such a format before they
                             are gathered: a rank casts its own, and the gather moves the casts
    holds_cast_weights       weights are cast to such a format once a step, not in every micro-batch
    keeps_casts              such a product keeps the casts of its operands for the backward pass,
                             otherwise the operands, which are cast again
    narrow_gathers           the formats in which data-parallel ranks may gather weights; where the
                             stack holds cast weights, these then replace the weights
    terms_of                 the stack whose fitted terms it shares, empty for its own

    Facts of memory:
    logit_bytes                    bytes held for each logit at the peak of the loss (16-bit logits
                                   and fp32 probabilities: 6)
    keeps_gathered_inputs          under sequence parallelism a column-parallel product saves its
                                   gathered input, not the rank's tokens
    keeps_activated_gate           a gated activation saves its activated half in addition to its
                                   input
    weighs_activations             experts multiply the activation by the weight of the choice, not
                                   their output
    copies_latent_values           latent attention saves a copy of its values, not the tensor of
                                   keys and values that they are a part of
    attention_kv_copies            further copies of keys and values that attention saves
    attention_output_copies        further copies of its output that attention saves where sequences
                                   and batch change places (micro-batch > 1)
    keeps_low_precision_gradients  16-bit gradients stay allocated beside the fp32 gradients that
                                   they are added to
    ddp_buckets                    data parallelism holds 16-bit buckets, as large as the
                                   parameters, beside the gradients
    master_bytes                   bytes of the copy of a 16-bit parameter that the optimizer
                                   updates; 0: it updates the parameter itself
    moment_bytes                   bytes of one of its moments that has no 8 bits
    keeps_shards                   ZeRO 3 keeps shards of the 16-bit parameters beside the fp32
                                   copies
    step_copy_bytes                bytes of the fp32 copies of 16-bit gradients in the optimizer's
                                   step, for each parameter that the rank updates; they do not
                                   coexist with the activations, but the allocator cannot reuse the
                                   activations' blocks for them
    bucket_elements                gradients that data parallelism flattens into one buffer to
                                   reduce them, in addition to the gradients themselves
    zero_buffers                   ZeRO 1 and 2 reduce and gather through buffers of one layer, not
                                   in place
    frees_gradients                gradients are freed after each update: where all forward passes
                                   of a step come before its first backward pass, there are no
                                   gradients at the peak of the activations
    deferred_head_gradients        micro-batches whose weight gradient of the head is computed at
                                   the end of the step: their inputs and gradients of logits are
                                   kept
    updates_in_backward            the optimizer updates a layer in its backward pass, which then
                                   frees its gradients
    whole_table_gradients          the gradient of a token table that tensor parallelism divides is
                                   made whole and then cut
    keeps_sent                     a stage holds the activations and gradients that it sends until
                                   the end of the step
    plain_dropout_on_cpu           it runs torch's dropout, which on CPUs saves a mask of its
                                   input's type; attention then saves its scores
    workspace_bytes                libraries' workspaces that the allocator holds all the time
                                   (cuBLAS, Transformer Engine)

    Terms, of which the first four are fitted to measured steps (planner/validation/term_fit.py has
    their bounds):
    kernel_slowdown  factor by which kernels take longer in a step than alone: gaps, clocks, kernels
                     that are not priced
    host_operator_s  seconds in which the host launches one operator of the graph; a layer is never
                     faster than its operators
    transfer_share   share that transfers between stages reach of a single message's bandwidth on
                     the link
    allocator_share  bytes that the caching allocator holds beyond the allocated ones, over the
                     allocated ones
    nccl_bytes       bytes that the communicators of one parallel axis hold outside the allocator
    """

    __pydantic_config__ = _FORBID

    name: str = "neutral"
    source: str = ""
    attention: AttentionKernel = AttentionKernel.FLASH
    flash_kernels: tuple[AvailableKernel, ...] = SDPA_KERNELS
    async_tensor_parallel: bool = False
    async_reduce_scatter: bool = False
    partitioned_transfers: bool = False
    overlap_tensor_parallel: bool = False
    tp_overlap: int = 0
    divided_ends: bool = False
    weights_over_data: bool = False
    tensor_grid: bool = False
    overlap_exchanges: bool = False
    sends_tokens_once: bool = False
    narrow_experts: bool = False
    fused_experts: bool = False
    stashes_experts: bool = False
    widens_expert_biases: bool = False
    dispatch_launches: int = 0
    expert_launches: int = 0
    overlap_transfers: bool = False
    paired_exchanges: bool = False
    overlap_grad_reduce: bool = True
    fused_accumulation: bool = True
    plain_kernels: tuple[PlainKernelName, ...] = ()
    deterministic: bool = False
    schedules: tuple[ScheduleName, ...] = EVERY_SCHEDULE
    recompute: tuple[RecomputeKind, ...] = EVERY_RECOMPUTE
    mesh_orders: tuple[MeshOrderName, ...] = ("pp-dp-tp",)
    context_forms: tuple[ContextFormName, ...] = ()
    sends_within_windows: bool = False
    divides_documents: bool = False
    context_alone: bool = False
    divides_experts: bool = False
    tower_divisions: tuple[TowerDivision, ...] = (TowerDivision.TENSOR,)
    equal_image_parts: bool = False
    product_formats: tuple[ProductFormat, ...] = ()
    state_precisions: tuple[StatePrecision, ...] = (StatePrecision.FP32,)
    gathers_casts: bool = False
    holds_cast_weights: bool = False
    keeps_casts: bool = False
    narrow_gathers: tuple[ProductFormat, ...] = ()
    terms_of: str = ""
    logit_bytes: int = 6
    keeps_gathered_inputs: bool = False
    keeps_activated_gate: bool = False
    weighs_activations: bool = False
    copies_latent_values: bool = False
    attention_kv_copies: int = 0
    attention_output_copies: int = 0
    keeps_low_precision_gradients: bool = False
    ddp_buckets: bool = False
    master_bytes: int = 4
    moment_bytes: int = 4
    keeps_shards: bool = False
    step_copy_bytes: int = 0
    bucket_elements: int = 0
    zero_buffers: bool = True
    frees_gradients: bool = False
    deferred_head_gradients: int = 0
    updates_in_backward: bool = False
    whole_table_gradients: bool = False
    keeps_sent: bool = False
    plain_dropout_on_cpu: bool = False
    workspace_bytes: int = 0
    kernel_slowdown: float = 1.0
    # assumed: between 20 us, a bare launch from Python, and the 84 us fitted to vTrain's steps
    host_operator_s: float = 50e-6
    transfer_share: float = 1.0
    allocator_share: float = 0.04  # measured reserved/allocated is 1.02-1.07 (EQUATIONS M6)
    # 0.5-2 GiB with many communicators (EQUATIONS M6); one a parallel axis, an assumption
    nccl_bytes: float = 400.0 * MIB

    def __post_init__(self) -> None:
        coerce_choice(self, "attention", AttentionKernel, where=f"stack {self.name}")
        if (
            self.kernel_slowdown < 1.0
            or self.host_operator_s < 0.0
            or not 0.0 < self.transfer_share <= 1.0
        ):
            raise ConfigError(
                f"stack {self.name}: kernel_slowdown must be at least 1, host_operator_s "
                "at least 0, transfer_share in (0, 1]"
            )
        if self.tp_overlap not in (0, 1, 2, 3):
            raise ConfigError(
                f"stack {self.name}: tp_overlap is {self.tp_overlap}, it must be 0, 1, 2 or 3"
            )
        sizes = (
            "logit_bytes",
            "attention_kv_copies",
            "attention_output_copies",
            "master_bytes",
            "moment_bytes",
            "step_copy_bytes",
            "bucket_elements",
            "workspace_bytes",
            "deferred_head_gradients",
            "dispatch_launches",
            "expert_launches",
            "allocator_share",
            "nccl_bytes",
        )
        for field in sizes:
            if getattr(self, field) < 0:
                raise ConfigError(
                    f"stack {self.name}: {field} is {getattr(self, field)}, it must be at least 0"
                )

    def keeping(self, precision: StatePrecision) -> Stack:
        """Returns the stack with an optimizer that keeps its states in a precision."""
        states = STATES[precision]
        return replace(self, master_bytes=states.master, moment_bytes=states.moment)

    @property
    def states(self) -> StatePrecision | None:
        """The precision of the optimizer's states; None for bytes that no recipe has."""
        kept = StateBytes16(self.master_bytes, self.moment_bytes)
        return next((name for name, states in STATES.items() if states == kept), None)

    def flash_kernel_on(self, capability: float | None) -> FlashKernel | None:
        """Returns the newest fused kernel for a compute capability, None where there is none.

        An unknown capability gets the newest of all.
        """
        running = [
            each
            for each in self.flash_kernels
            if capability is None or each.from_capability <= capability
        ]
        return max(running, key=lambda each: each.from_capability).kernel if running else None

    def attention_on(self, capability: float | None) -> AttentionKernel:
        """Returns the default attention of the stack on a device of a compute capability."""
        return self.attention if self.flash_kernel_on(capability) else AttentionKernel.UNFUSED


NEUTRAL = Stack()
