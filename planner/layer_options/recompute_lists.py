"""The recompute lists of a layer of any class that are worth a search, at one division.

They are points of the front of a described block (planner/layer_options/layer_front.py), whose
placements are those of the division: every operator runs again in the backward pass, or its tensors
are saved. Operators that cannot run again by themselves (`Operator.repeatable`) are on no list.
"""

from __future__ import annotations

from parplan.costmodels.layers.layer_price_cache import LayerPriceCache
from parplan.costmodels.operators.sharding import Sharding
from parplan.planner.layer_options.layer_front import FrontLimits, layer_fronts
from parplan.planner.layer_options.layer_problem import LayerStrategies
from parplan.profiles.models.operator_graph import LayerKey

# A class with more lists than this has those on the lower convex hull of time and saved bytes.
# Layers of a stage that mix them reach what lies between, and no point of the front lies below the
# hull.
MOST_LISTS = 8
# Partial layers of the walk. An eager block of GPT-NeoX, 31 operators, has up to 600.
MOST_LABELS = 4000
LIMITS = FrontLimits(points=MOST_LISTS, labels=MOST_LABELS)


def recompute_lists(
    kind: LayerKey, micro_batch_size: int, sharding: Sharding, price_cache: LayerPriceCache
) -> tuple[tuple[str, ...], ...]:
    """Returns the names of the recomputed operators of each point of the front, fastest first.

    They do not depend on where the states are, and `price_cache` keeps them.
    """
    return price_cache.once(
        ("recompute lists", kind, micro_batch_size, sharding),
        lambda: _made(kind, micro_batch_size, sharding, price_cache),
    )


def _made(
    kind: LayerKey, micro_batch_size: int, sharding: Sharding, price_cache: LayerPriceCache
) -> tuple[tuple[str, ...], ...]:
    strategies = LayerStrategies(
        (price_cache.layer(kind, micro_batch_size, sharding.part),),
        price_cache.inside(sharding.degrees),
        price_cache.training,
        sharding=sharding,
        like=sharding,
    )
    (problem,) = strategies.problems(sharding)
    (front,) = layer_fronts(problem, limits=LIMITS)
    return tuple(
        tuple(
            name
            for name, options, k in zip(problem.names, problem.options, row, strict=True)
            if options[k].recomputed
        )
        for row in front.tolist()
    )
