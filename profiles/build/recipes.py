"""The common inputs of the fits of one device: its rows, its chip, and the chips that lend rows."""

from __future__ import annotations

from dataclasses import dataclass

from parplan.profiles.machines.curve_fitting import MeasurementTables, Score
from parplan.profiles.machines.curves import Chip
from parplan.profiles.machines.hardware import Cluster
from parplan.profiles.models.spec import Precision


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The rows that a device's profile rests on; an empty name stands for none.

    gpu             name of the device in the tables
    throttles       True if it reaches its power limit in the rows
    gradients       GPU whose backward products (free of tiny gradients) give their efficiency
                    relative to its forward ones
    flash           kernels of the forward rows
    flash_backward  a GPU with backward rows, or the kernel of a published figure on H100
    memory          GPU whose element-wise rows count
    sources         sources of products
    collectives     sources of collectives
    """

    device: str
    gpu: str
    throttles: bool
    gradients: str
    flash: tuple[str, ...]
    flash_backward: str
    memory: str
    sources: tuple[str, ...]
    collectives: tuple[str, ...]


# Datasheets of parts that lend rows to others: dense 16-bit FLOP/s, bytes/s, multiprocessors.
LENDERS = {
    "A100-SXM4-80GB": Chip(peak_flops_per_s=312e12, bytes_per_s=2039e9, num_sms=108),
    "A100-PCIe-80GB": Chip(peak_flops_per_s=312e12, bytes_per_s=1935e9, num_sms=108),
    "H100-SXM5-80GB": Chip(peak_flops_per_s=989e12, bytes_per_s=3350e9, num_sms=132),
    "GH200-96GB": Chip(peak_flops_per_s=989e12, bytes_per_s=4000e9, num_sms=132),
    "B200-SXM-180GB": Chip(peak_flops_per_s=2250e12, bytes_per_s=8000e9, num_sms=148),
}


def chip_of(cluster: Cluster) -> Chip:
    device = cluster.device
    return Chip(
        peak_flops_per_s=device.peak(Precision.FP16),
        bytes_per_s=device.memory_bytes_per_s,
        num_sms=device.num_sms,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FitContext:
    """The common inputs of the fits of one device; fits append to `scores`."""

    recipe: Recipe
    cluster: Cluster
    tables: MeasurementTables
    scores: list[Score]

    @property
    def chip(self) -> Chip:
        return chip_of(self.cluster)

    def lender(self, gpu: str) -> Chip:
        return self.chip if gpu == self.recipe.gpu else LENDERS[gpu]
