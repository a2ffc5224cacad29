"""Small traces in the published format of Kineto, worked out by hand."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

BASE_NS = 1_700_000_000_000_000_000  # 2023-11-14
MAIN, AUTOGRAD = 1, 2  # threads of the host


def host(name: str, start: float, end: float, thread: int = MAIN, cat: str = "cpu_op"):
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "pid": 100,
        "tid": thread,
        "ts": start,
        "dur": end - start,
        "args": {},
    }


def marked(name: str, start: float, end: float):
    return host(name, start, end, cat="user_annotation")


class Kernels:
    """Kernels with their launches, in the order of the calls."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def run(
        self,
        name: str,
        start: float,
        end: float,
        launched: float,
        thread: int = MAIN,
        **arguments: Any,
    ) -> None:
        correlation = zlib.crc32(f"{name} {start} {launched} {thread}".encode())
        self.events += [
            host("cudaLaunchKernel", launched, launched + 5, thread, cat="cuda_runtime")
            | {"args": {"correlation": correlation}},
            {
                "ph": "X",
                "cat": "kernel",
                "name": name,
                "pid": 0,
                "tid": 7,
                "ts": start,
                "dur": end - start,
                "args": {"correlation": correlation, "stream": 7, **arguments},
            },
        ]

    def collective(
        self,
        name: str,
        start: float,
        end: float,
        launched: float,
        *,
        ranks: Iterable[int],
        thread: int = MAIN,
        elements: int = 1024,
    ) -> None:
        ranks = list(ranks)
        self.run(
            f"ncclDevKernel_{name}_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
            start,
            end,
            launched,
            thread,
            **{
                "Collective name": name.lower(),
                "In msg nelems": elements,
                "Out msg nelems": elements // 2,
                "Group size": len(ranks),
                "dtype": "BFloat16",
                "Process Group Name": "3",
                "Process Group Ranks": str(ranks),
            },
        )


def one_step(at: float = 0.0) -> list[dict[str, Any]]:
    """One step of 1,000 us at tp 2 x dp 2; the device starts 100 us after the host.

    Of the device: forward 100-400, an all-reduce of tensor parallelism exposed 400-450, backward
    450-700, a reduce-scatter of data parallelism exposed 700-800, the norm and Adam 800-900.
    """
    kernels = Kernels()
    kernels.run("sm80_xmma_gemm_bf16bf16_tn", at + 100, at + 300, at + 10)
    kernels.run("flash_fwd_kernel<Flash_fwd_kernel_traits>", at + 320, at + 400, at + 20)
    kernels.collective("AllReduce", at + 390, at + 450, at + 30, ranks=(0, 1))
    kernels.run("sm80_xmma_gemm_bf16bf16_nt", at + 450, at + 700, at + 310, AUTOGRAD)
    kernels.collective(
        "_Reduce_Scatter_Base", at + 650, at + 800, at + 400, ranks=(0, 2), thread=AUTOGRAD
    )
    kernels.run("multi_tensor_apply_kernel<LpNormFunctor>", at + 820, at + 830, at + 510)
    kernels.run("multi_tensor_apply_kernel<FusedAdamMathFunctor>", at + 830, at + 900, at + 530)
    return [
        marked("ProfilerStep#3", at, at + 1000),
        host("autograd::engine::evaluate_function: MmBackward0", at + 300, at + 500, AUTOGRAD),
        marked("Optimizer.step#AdamW.step", at + 520, at + 600),
        *kernels.events,
    ]


def kineto_text(
    events: Iterable[Mapping[str, Any]], rank: int = 0, world_size: int = 4, **header: Any
) -> str:
    body: dict[str, Any] = {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0, "name": "NVIDIA A100-SXM4-80GB", "numSms": 108}],
        "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": world_size},
        "traceEvents": list(events),
        "baseTimeNanoseconds": BASE_NS,
    }
    return json.dumps(body | header)


def write_kineto(path: Path, events: Iterable[Mapping[str, Any]], **header: Any) -> Path:
    path.write_text(kineto_text(events, **header), encoding="utf-8")
    return path
