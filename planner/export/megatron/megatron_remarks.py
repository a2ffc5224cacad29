"""Arguments of Megatron-LM that are priced as others, with the bytes that this may be off.

Both change the memory of full recompute, and hardly its time. The code that was read is
megatron/core/recompute.py and megatron/core/tensor_parallel/random.py of NVIDIA/Megatron-LM at
d98e8a64dd.
"""

from __future__ import annotations

from collections.abc import Iterator

from parplan.costmodels.price_cache import PriceCache
from parplan.costmodels.strategy import Strategy
from parplan.planner.export.fields.arguments import Given
from parplan.planner.plan.plan import Plan
from parplan.planner.plan.plan_strategy import prices_of_plan, strategy_of
from parplan.profiles.documents.numbers import whole_of
from parplan.profiles.documents.ranges import LAYERS
from parplan.profiles.models.operator_graph import LayerKind
from parplan.profiles.units import gib


def remarks(given: tuple[Given, ...], plan: Plan) -> Iterator[str]:
    """Yields a sentence for each argument that is priced as another one."""
    last = {each.name: each for each in given}
    units = last.get("--recompute-num-layers")
    uniform = last.get("--recompute-method")
    blocks = units.words[0] if units and units.words else ""
    uniformly = uniform is not None and uniform.words == ("uniform",)
    size = whole_of(blocks, LAYERS) or 1 if uniformly else 1
    if units and size > 1:
        more = gib((size - 1) * _remade_bytes(plan))
        yield (
            f"{units.where}: --recompute-num-layers {size} is priced as 1: the step is the same, "
            f"the peak at most {more:.1f} GiB more, for {size} blocks run again at once"
        )
    divided = last.get("--distribute-saved-activations")
    if divided:
        saved = max(stage.activations for stage in plan.predicted.memory_gib)
        less = saved * (1 - 1 / plan.mesh.tp)
        yield (
            f"{divided.where}: --distribute-saved-activations is priced without: each block's "
            f"input is gathered once more, and the peak is at most {less:.1f} GiB less"
        )


def _remade_bytes(plan: Plan) -> float:
    """Returns the bytes of a block that its recompute makes again, of the largest block."""
    price_cache = prices_of_plan(plan)
    return max(_of_blocks(strategy_of(plan, price_cache), price_cache))


def _of_blocks(strategy: Strategy, price_cache: PriceCache) -> Iterator[float]:
    layout = strategy.layout
    for choice in {each for stage in strategy.stages for each in stage}:
        if choice.kind.role is LayerKind.BLOCK:
            yield price_cache.remade_bytes(
                choice.kind, layout.micro_batch_size, layout.sharding_of(choice), choice.recompute
            )
