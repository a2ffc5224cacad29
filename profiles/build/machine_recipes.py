"""The machines of the builder, a row each: recipes of rows, variants of a chip, and datasheets."""

from __future__ import annotations

from dataclasses import dataclass

from parplan.profiles.build.compute_curves import SUPERSCALER
from parplan.profiles.build.recipes import Recipe

AICONFIGURATOR = "ai-dynamo/aiconfigurator"
TRAIN_TIME = "DebarghaG/estimate-train-time"
VTRAIN = "VIA-Research/vTrain"
NNSCALER = "microsoft/nnscaler"
RECIPES = (
    Recipe(
        device="a100-80gb",
        gpu="A100-SXM4-80GB",
        throttles=False,
        gradients="A100-PCIe-80GB",
        flash=("flash2",),
        flash_backward="A100-SXM4-80GB",
        memory="A100-SXM4-80GB",
        sources=(AICONFIGURATOR, TRAIN_TIME),
        collectives=(AICONFIGURATOR, VTRAIN),
    ),
    Recipe(
        device="h100-80gb",
        gpu="H100-SXM5-80GB",
        throttles=True,
        gradients="A100-PCIe-80GB",
        flash=("flash3",),
        flash_backward="flash3",
        memory="GH200-96GB",
        sources=(AICONFIGURATOR,),
        collectives=(AICONFIGURATOR,),
    ),
    Recipe(
        device="h200-141gb",
        gpu="H200-SXM-141GB",
        throttles=True,
        gradients="A100-PCIe-80GB",
        flash=("flash3",),
        flash_backward="flash3",
        memory="GH200-96GB",
        sources=(AICONFIGURATOR,),
        collectives=(AICONFIGURATOR,),
    ),
    Recipe(
        device="gh200-96gb",
        gpu="GH200-96GB",
        throttles=False,
        gradients="A100-PCIe-80GB",
        flash=("flash2",),
        flash_backward="flash2",
        memory="GH200-96GB",
        sources=(TRAIN_TIME,),
        collectives=(),
    ),
    Recipe(
        device="b200-180gb",
        gpu="B200-SXM-180GB",
        throttles=True,
        gradients="B200-SXM-180GB",
        flash=("flash_te", "flash_trtllm"),
        flash_backward="B200-SXM-180GB",
        memory="GH200-96GB",
        sources=(AICONFIGURATOR,),
        collectives=(AICONFIGURATOR,),
    ),
    Recipe(
        device="gb200-186gb",
        gpu="GB200-186GB",
        throttles=True,
        gradients="B200-SXM-180GB",
        flash=("flash_trtllm",),
        flash_backward="B200-SXM-180GB",
        memory="GH200-96GB",
        sources=(AICONFIGURATOR,),
        collectives=(AICONFIGURATOR,),
    ),
    Recipe(
        device="gb300-279gb",
        gpu="GB300",
        throttles=True,
        gradients="B200-SXM-180GB",
        flash=("flash_trtllm",),
        flash_backward="B200-SXM-180GB",
        memory="GH200-96GB",
        sources=(AICONFIGURATOR,),
        collectives=(AICONFIGURATOR,),
    ),
    Recipe(
        device="v100-32gb",
        gpu="V100-SXM2-32GB",
        throttles=False,
        gradients="V100-SXM2-32GB",
        flash=(),
        flash_backward="",
        memory="V100-SXM2-32GB",
        sources=(SUPERSCALER,),
        collectives=(SUPERSCALER,),
    ),
    Recipe(
        device="l40s-48gb",
        gpu="L40S",
        throttles=True,
        gradients="A100-PCIe-80GB",
        flash=("flash2",),
        flash_backward="A100-SXM4-80GB",
        memory="A100-SXM4-80GB",
        sources=(AICONFIGURATOR,),
        collectives=(AICONFIGURATOR,),
    ),
    Recipe(
        device="rtxpro6000-96gb",
        gpu="RTX-PRO-6000-96GB",
        throttles=True,
        gradients="A100-PCIe-80GB",
        flash=("flash2",),
        flash_backward="A100-SXM4-80GB",
        memory="A100-SXM4-80GB",
        sources=(AICONFIGURATOR,),
        collectives=(AICONFIGURATOR,),
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A device with the chip of another one.

    power       its power limit for a FLOP of its peak, over the other's; where power is the limit,
                it takes power ** -1/2 times as long
    gpu         its name in the tables, where it has its own rows of products and fused attention
    links       its name in the tables, where it has its own rows of collectives
    efficiency  share of its peak that products reach, where its arithmetic and not its power is the
                limit
    """

    device: str
    lender: str
    power: float = 1.0
    gpu: str = ""
    links: str = ""
    efficiency: float | None = None


VARIANTS = (
    Variant(device="a100-40gb", lender="a100-80gb"),
    Variant(device="a800-80gb", lender="a100-80gb"),
    Variant(device="a100-80gb-pcie", lender="a100-80gb", gpu="A100-PCIe-80GB"),
    Variant(device="a100-40gb-pcie", lender="a100-80gb-pcie"),
    Variant(device="h100-96gb-hbm2e", lender="h100-80gb", power=500 / 700),
    Variant(device="h800-80gb", lender="h100-80gb"),
    # 350 W and 400 W over 700, 756 and 835 TFLOP/s over 989: products are priced at 435 and 490
    # TFLOP/s; the best shapes reach 499.5 and 488.5 (github.com/mag-/gpu_benchmark, README)
    Variant(device="h100-80gb-pcie", lender="h100-80gb", power=(350 / 700) / (756 / 989)),
    Variant(device="h100-94gb-nvl", lender="h100-80gb", power=(400 / 700) / (835 / 989)),
    # assumed: a seventh of an H100's arithmetic in 400 W of 700 waits for neither power nor memory
    Variant(device="h20-96gb", lender="h100-80gb", efficiency=0.92),
    Variant(device="v100-16gb", lender="v100-32gb"),
    Variant(device="b300-270gb", lender="b200-180gb", power=1.1, links="B300-SXM"),  # 1,100 W
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Datasheet:
    """The assumptions for a device without measured operators, beyond `analytic_profile`.

    efficiency   share of the peak at the boost clock that products reach
    sustained    share of that efficiency that remains under steady load
    link_share   share of the node's link that a ring reaches, None for the assumed one
    link_source  where that share is from
    links        its name in the tables, where it has rows of all-reduces, the one collective whose
                 sizes they tell
    flash        share of the peak that fused attention reaches forward and backward, None for the
                 assumed ones
    """

    device: str
    efficiency: float
    sustained: float
    source: str
    link_share: float | None = None
    link_source: str = ""
    links: str = ""
    flash: tuple[float, float] | None = None
    flash_source: str = ""


_GPU_BENCHMARK = "best shape of github.com/mag-/gpu_benchmark, README"
_MAX_ACHIEVABLE = "ROCm/rocm-blogs, Measuring Max-Achievable FLOPs part 2, table 1: steady load"
# 1.15 x 335 and 322 TFLOP/s of 1307, over the form's share of heads of 128
_CDNA3_FLASH = (0.34, 0.33)
_CDNA3_FLASH_SOURCE = (
    "1.15 times the bars of FlashAttention 2 on H100 (arXiv:2407.08608 figures 5 and 6), as AMD "
    "says of its own forward pass, 10 to 20 % more (semianalysis.substack.com, "
    "AMD MI300 performance)"
)
DATASHEETS = (
    Datasheet(
        device="rtx3090-24gb",
        efficiency=0.95,
        sustained=0.95,
        source=(
            "assumed: at half rate the tensor cores of GA102 wait for little, and 350 W carry them"
        ),
    ),
    Datasheet(
        device="a10g-24gb",
        efficiency=0.9,
        sustained=0.9,
        source="assumed: as GA102 at half rate, with less power",
    ),
    Datasheet(
        device="l4-24gb",
        efficiency=0.75,
        sustained=0.63,
        source=(
            "assumed: 72 W; 8192^3 in bf16 at 59 TFLOP/s and 2048^3 at 71 are reported "
            "(zzc0721/torch-performance-test-data issue 120)"
        ),
    ),
    Datasheet(
        device="rtxa6000-48gb",
        efficiency=0.75,
        sustained=0.85,
        source="assumed: GA102 at full rate in 300 W, where RTX 3090 has half the rate in 350 W",
    ),
    Datasheet(
        device="rtx4090-24gb",
        efficiency=1.0,
        sustained=0.95,
        source=f"178.5 TFLOP/s, above the peak at the rated boost clock ({_GPU_BENCHMARK})",
    ),
    Datasheet(
        device="rtx5090-32gb",
        efficiency=1.0,
        sustained=1.0,
        source=(
            "254 TFLOP/s, above the peak at the rated boost clock, for the best shape "
            "(github.com/xzwgit/gpu-flops-bench, README); no more than the peak assumed"
        ),
    ),
    Datasheet(
        device="mi250x-64gb",
        efficiency=0.75,
        sustained=0.9,
        source="assumed: round figures near MI300X's at twice its power for a FLOP",
        links="MI200",
        flash=_CDNA3_FLASH,
        flash_source=f"assumed: as MI300X, {_CDNA3_FLASH_SOURCE}",
    ),
    Datasheet(
        device="mi300x-192gb",
        efficiency=0.58,
        sustained=0.93,
        source=(f"708 TFLOP/s ({_MAX_ACHIEVABLE}); 758 TFLOP/s for a moment ({_GPU_BENCHMARK})"),
        flash=_CDNA3_FLASH,
        flash_source=_CDNA3_FLASH_SOURCE,
    ),
    Datasheet(
        device="mi325x-256gb",
        efficiency=0.69,
        sustained=0.93,
        source=f"843 TFLOP/s ({_MAX_ACHIEVABLE}); for a moment as much more as on MI300X",
        flash=_CDNA3_FLASH,
        flash_source=f"assumed: as MI300X, {_CDNA3_FLASH_SOURCE}",
    ),
    Datasheet(
        device="mi355x-288gb",
        efficiency=0.69,
        sustained=0.93,
        source="assumed: as MI325X, with 1.4 times its power and 1.9 times its arithmetic",
        flash=_CDNA3_FLASH,
        flash_source=f"assumed: as MI300X, {_CDNA3_FLASH_SOURCE}",
    ),
    Datasheet(
        device="gaudi3-128gb",
        efficiency=0.8,
        sustained=0.85,
        source="assumed: large matrix engines, which power limits under steady load",
        link_share=0.97,
        link_source=(
            "docs.habana.ai, Collectives Performance: 509 to 513 GB/s of 525 on 8 accelerators"
        ),
    ),
)
