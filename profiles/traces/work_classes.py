"""The class of a kernel, or of an operator on a host, by its name; the names of collectives."""

from __future__ import annotations

import re
from functools import lru_cache

from parplan.profiles.traces.trace_record import WorkClass

# The first pattern that a name matches gives its class. Names are those of NCCL and RCCL, of
# Transformer Engine's user buffers, torch's symmetric memory and DeepEP, cuBLAS and hipBLASLt,
# cuDNN, FlashAttention, Transformer Engine, apex, Triton as torch.compile names kernels, and
# torch's own kernels and operators.
_CLASSES = (
    (
        WorkClass.COLLECTIVES,
        r"^(?:nccl|rccl|gloo:)|ncclDevKernel|ncclKernel|userbuffers|nvshmem|multimem"
        r"|(?:one|two)_shot_all_reduce|deep_ep|(?:intra|inter)node::(?:dispatch|combine)",
    ),
    (WorkClass.COPIES, r"^Memcpy (?:HtoD|DtoH)|CopyHostToDevice|CopyDeviceToHost"),
    (WorkClass.OPTIMIZER, r"adam|lamb(?!da)|lion_|adagrad|sgd_|adafactor"),
    (WorkClass.ATTENTION, r"flash|fmha|attention|attn|sdpa|softmax"),
    (WorkClass.NORMS, r"layer_?norm|rms_?norm|ln_fwd|ln_bwd|batch_?norm|bn_fw|bn_bw|norm_kernel"),
    (
        WorkClass.PRODUCTS,
        # the first triton_tem_ alone counts, so that a name is read once
        r"gemm|gemv|cijk_|xmma|nvjet|wgmma|matmul|splitk|cublas|(?>^.*?triton_tem_).*mm"
        r"|aten::(?:add|b|badd)?mm\b|aten::linear\b|aten::_grouped_mm|aten::_scaled_mm"
        r"|implicit_convolve|convolution|conv2d",
    ),
)
_PATTERNS = tuple((kind, re.compile(pattern, re.IGNORECASE)) for kind, pattern in _CLASSES)
USER_BUFFERS = "user_buffers"  # Transformer Engine's collectives beside products, of tensor ranks
# A part of a collective's name, in small letters without separators -> torch.distributed's name.
_OPERATIONS = (
    ("allreduce", "all_reduce"),
    ("allgather", "all_gather"),
    ("reducescatter", "reduce_scatter"),
    ("alltoall", "all_to_all"),
    ("dispatch", "all_to_all"),
    ("combine", "all_to_all"),
    ("userbuffers", USER_BUFFERS),
    ("sendrecv", "send_recv"),
    ("broadcast", "broadcast"),
    ("barrier", "barrier"),
    ("reduce", "reduce"),
    ("gather", "gather"),
    ("scatter", "scatter"),
    ("send", "send"),
    ("recv", "recv"),
)
UNKNOWN = "collective"
MESSAGES = ("send", "recv", "send_recv")


@lru_cache(maxsize=65536)
def named_class(name: str) -> WorkClass | None:
    """Returns the class that a name tells, None for one that tells none."""
    return next((kind for kind, pattern in _PATTERNS if pattern.search(name)), None)


def class_of(name: str) -> WorkClass:
    """Returns the class of a kernel; all that no pattern names moves elements."""
    return named_class(name) or WorkClass.ELEMENTWISE


@lru_cache(maxsize=4096)
def operation_of(name: str) -> str:
    """Returns the collective that a kernel's or a call's name tells, in torch's words."""
    plain = re.sub(r"[^a-z]", "", name.lower())
    return next((operation for part, operation in _OPERATIONS if part in plain), UNKNOWN)
