"""Records of an invented machine, for tests of files, fits and reports.

The times are those that given curves price, with noise.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from parplan.profiles.machines.curves import (
    Chip,
    Product,
    flash_attention_s,
    matmul_s,
    memory_bound_s,
)
from parplan.profiles.machines.hardware import Cluster
from parplan.profiles.machines.machine_catalog import load_cluster
from parplan.profiles.machines.measured_points import NAMED
from parplan.profiles.machines.measurements import (
    Case,
    CaseFigures,
    CaseOutcome,
    CasePass,
    Record,
    Timing,
)
from parplan.profiles.machines.shipped_profiles import shipped_profile
from parplan.profiles.machines.speeds import Compute
from parplan.profiles.models.spec import Precision

CLUSTER = load_cluster("a100-80gb")
LINEARS = tuple(
    (m, n, k) for m in (512, 2048, 8192) for n in (1024, 4096) for k in (1024, 4096, 16384)
)
HEADS = tuple(
    (heads, seq, dim) for heads in (16, 64) for seq in (512, 1024, 2048, 4096) for dim in (64, 128)
)
BYTES = tuple(2**power for power in range(18, 31, 2))


def rested(compute: Compute) -> Compute:
    """The curves without a power limit of their own, as fits make them."""
    products = (
        "forward",
        "input_gradient",
        "weight_gradient",
        "batched_forward",
        "batched_backward",
    )
    return replace(
        compute, **{name: replace(getattr(compute, name), throttle=0.0) for name in products}
    )


CURVES = rested(shipped_profile("a100-80gb").compute)


class Machine:
    """Times of cases by curves, as a profiler of the machine would record them.

    `noise` is the standard deviation of a time over itself.
    """

    def __init__(
        self,
        compute: Compute = CURVES,
        cluster: Cluster = CLUSTER,
        precision: str = "bf16",
        noise: float = 0.0,
    ) -> None:
        device = cluster.device
        self.compute = compute
        self.precision = precision
        self.noise = noise
        self.chip = Chip(
            peak_flops_per_s=device.peak(precision),
            bytes_per_s=device.memory_bytes_per_s,
            num_sms=device.num_sms,
        )
        self.element_bytes = Precision(precision).num_bytes
        self.draw = random.Random(0)

    def record(
        self, work: str, sizes: dict[str, int], passes: Sequence[tuple[CasePass, float]]
    ) -> Record:
        """A measured case: passes with their seconds."""
        times = {
            case_pass.name: Timing(
                median_us=round(1e6 * time_s * self.draw.gauss(1.0, self.noise), 3),
                spread=0.01,
                repeats=20,
            )
            for case_pass, time_s in passes
        }
        case = Case(
            work=work,
            sizes=tuple(sizes.items()),
            precision=self.precision,
            passes=tuple(case_pass for case_pass, _ in passes),
        )
        return Record(
            case=case,
            outcome=CaseOutcome.MEASURED,
            measured=CaseFigures(times=times, saved_bytes=4096, clock_mhz=1410.0),
        )

    def linear(self, m: int, n: int, k: int) -> Record:
        shapes = {"forward": (m, n, k), "input_gradient": (m, k, n), "weight_gradient": (k, n, m)}
        return self.record(
            "linear",
            {"m": m, "n": n, "k": k, "bias": 0},
            [
                (CasePass(name=name, curve=name, sizes=shape), self.product_s(shape, name))
                for name, shape in shapes.items()
            ],
        )

    def product_s(self, shape: tuple[int, int, int], curve: str, batch: int = 1) -> float:
        m, n, k = shape
        product = Product(
            m=m,
            n=n,
            k=k,
            batch=batch,
            operand_bytes=self.element_bytes,
            result_bytes=self.element_bytes,
        )
        return matmul_s(product, getattr(self.compute, curve), self.chip, sustained=True)

    def batched(self, batch: int, m: int, n: int, k: int) -> Record:
        names = ("batched_forward", "batched_backward")
        return self.record(
            "batched",
            {"batch": batch, "m": m, "n": n, "k": k},
            [
                (
                    CasePass(
                        name=name.removeprefix("batched_"), curve=name, sizes=(batch, m, n, k)
                    ),
                    self.product_s((m, n, k), name, batch),
                )
                for name in names
            ],
        )

    def attention(self, heads: int, seq: int, head_dim: int, dropout: int = 0) -> Record:
        names = (
            ("dropped_flash.forward", "dropped_flash.backward")
            if dropout
            else ("flash_forward", "flash_backward")
        )
        curves, passes = (self.compute.flash_forward, self.compute.flash_backward), []
        for name, direction, curve, work in zip(
            names, ("forward", "backward"), curves, (1.0, 2.5), strict=True
        ):
            flops = work * 2.0 * heads * seq * seq * head_dim
            time_s = flash_attention_s(
                flops,
                heads=heads,
                seq=seq,
                keys=seq / 2,
                head_dim=head_dim,
                curve=curve,
                chip=self.chip,
            )
            passes.append(
                (
                    CasePass(name=direction, curve=name, sizes=(heads, seq, head_dim)),
                    time_s * (1.5 if dropout else 1.0),
                )
            )
        sizes = {
            "batch": 1,
            "heads": heads,
            "kv_heads": heads,
            "seq": seq,
            "head_dim": head_dim,
            "dropout": dropout,
        }
        return self.record("attention", sizes, passes)

    def streamed(
        self, work: str, n_bytes: int, directions: Sequence[str] = ("forward", "backward")
    ) -> Record:
        """An operation bound by memory, at the speed of its class."""
        passes = getattr(self.compute, NAMED.get(work, work))
        return self.record(
            work,
            {"elements": n_bytes // self.element_bytes},
            [
                (
                    CasePass(name=direction, curve=f"{work}.{direction}", sizes=(n_bytes,)),
                    memory_bound_s(n_bytes, getattr(passes, direction), self.chip.bytes_per_s),
                )
                for direction in directions
            ],
        )

    def adamw(self, parameters: int) -> Record:
        n_bytes = 28 * parameters
        time_s = memory_bound_s(n_bytes, self.compute.optimizer, self.chip.bytes_per_s)
        return self.record(
            "adamw",
            {"parameters": parameters},
            [(CasePass(name="time", curve="optimizer", sizes=(n_bytes,)), time_s)],
        )

    def figures(self, work: str, sizes: dict[str, int], **figures: float) -> Record:
        """A case that gives figures and no times."""
        case = Case(work=work, sizes=tuple(sizes.items()), precision=self.precision, passes=())
        return Record(
            case=case, outcome=CaseOutcome.MEASURED, measured=CaseFigures(figures=figures)
        )

    def failed(self, outcome: CaseOutcome, detail: str, m: int = 65536) -> Record:
        record = self.linear(m, 65536, 65536)
        return replace(record, outcome=outcome, measured=None, detail=detail)

    def every(self) -> tuple[Record, ...]:
        """About as many records of all kinds as a profile of a few models has."""
        works = (
            "layer_norm",
            "gelu",
            "residual",
            "dropped_residual",
            "softmax",
            "dropout",
            "embedding",
            "cross_entropy",
        )
        return (
            *(self.linear(*shape) for shape in LINEARS),
            *(self.attention(*shape) for shape in HEADS),
            *(self.attention(*shape, dropout=1) for shape in HEADS[:6]),
            *(
                self.batched(32, *shape)
                for seq in (512, 1024, 2048)
                for dim in (64, 128)
                for shape in ((seq, seq, dim), (seq, dim, seq))
            ),
            *(self.streamed(work, n_bytes) for work in works for n_bytes in BYTES),
            *(self.streamed("bias_gradient", n_bytes, ("backward",)) for n_bytes in BYTES),
            *(self.adamw(parameters) for parameters in (10**6, 10**7, 10**8)),
            self.figures("device_copy", {"bytes": 2**30}, copied_bytes_per_s=1.8e12),
            self.figures("launch", {}, host_launch_s=8e-6),
            self.figures(
                "allocator", {}, granularity_bytes=512.0, reserved_share=0.04, context_bytes=5e8
            ),
            self.figures(
                "transfer",
                {"bytes": 2**28},
                to_device_bytes_per_s=2.4e10,
                from_device_bytes_per_s=2.2e10,
            ),
            self.failed(CaseOutcome.OUT_OF_MEMORY, "tried to allocate 8.00 GiB"),
            self.failed(CaseOutcome.HUNG, "no answer in 60 s", m=131072),
        )
