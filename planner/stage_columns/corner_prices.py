"""Costs of a block whose averages bound every option from below, before options are made.

They are the corners of planner/layer_options/front_corners.py at each ZeRO stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields

import numpy as np

from parplan.costmodels.layers.data_parallel import DataParallelTime
from parplan.costmodels.layers.layer_price_cache import LayerStates
from parplan.costmodels.price_cache import PriceCache
from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.layer_options.catalogue import Catalogue
from parplan.planner.layer_options.front_corners import FrontCorners
from parplan.planner.layer_options.layer_option import LayerOption, WeightLayout
from parplan.planner.layer_options.mixes import column_of
from parplan.planner.layer_options.zero_ways import ZeroWay
from parplan.planner.stage_columns.stage_prices import BlockCosts
from parplan.profiles.models.operator_graph import LayerKind

_COSTS = tuple(field.name for field in fields(BlockCosts) if field.name != "options")


def corner_prices(
    corners: Mapping[WeightLayout, FrontCorners],
    layout: ParallelLayout,
    ways: Sequence[ZeroWay],
    catalogue: Catalogue,
    prices: PriceCache,
) -> BlockCosts:
    """Returns the costs of a block at each corner and ZeRO stage; the options are no plans.

    They have no workspace. Where operators have several shardings, whose windows differ, data
    parallelism counts as hidden. Costs that no bound asks for are zero.
    """
    sharding, mesh = layout.of_blocks, layout.mesh
    options: list[LayerOption] = []
    data: list[DataParallelTime] = []
    held: list[LayerStates] = []
    for weight_layout, points in corners.items():
        divided = catalogue.with_weight_layout(weight_layout, sharding)
        for zero, own_zero in ways:
            way = divided, zero, own_zero
            each_s = (
                prices.hidden_data_parallel(LayerKind.BLOCK, mesh, *way)
                if catalogue.divides(sharding)
                else prices.data_parallel(LayerKind.BLOCK, layout.micro_batch_size, mesh, *way)
            )
            states = prices.states(LayerKind.BLOCK, mesh, *way)
            for time_s, saved in zip(points.time_s, points.saved_bytes, strict=True):
                options.append(
                    LayerOption(
                        recompute=(),
                        sharding=divided,
                        weight_layout=weight_layout,
                        time_s=float(time_s),
                        saved_bytes=float(saved),
                        ideal_saved_bytes=0.0,
                        workspace_bytes=0.0,
                        zero=zero,
                        own_zero=own_zero,
                    )
                )
                data.append(each_s)
                held.append(states)
    none = dict.fromkeys(_COSTS, np.zeros(len(options)))
    return BlockCosts(
        options=tuple(options),
        **none
        | {
            "time_s": column_of(options, "time_s") + column_of(data, "per_micro_batch_s"),
            "tail_s": column_of(data, "per_step_s"),
            "states": np.array([float(each.states.total) for each in held]),
            "gradients": np.array([float(each.states.gradients) for each in held]),
            "gathered_bytes": column_of(held, "gathered_bytes"),
            "reduced_bytes": column_of(held, "reduced_bytes"),
        },
    )
