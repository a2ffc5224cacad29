"""The ways to divide embedding and head over tensor-parallel ranks (EQUATIONS S1)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from parplan.costmodels.layers.operator_price import single_operator_sharding
from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.operators.sharding import Sharding
from parplan.costmodels.price_cache import PriceCache, table_division, table_of
from parplan.planner.dominance import Array, Ints
from parplan.planner.layer_options.layer_option import LayerOption, WeightLayout
from parplan.planner.layer_options.layer_problem import LayerProblem, StrategyOption
from parplan.planner.layer_options.layer_program import evaluate
from parplan.profiles.models.operator_graph import LayerKind
from parplan.profiles.models.parts.multi_token import is_in_module


class EndOptions:
    """The ways of embedding or head in a layout with `sharding`, at one micro-batch size.

    choices    a strategy for every operator
    """

    def __init__(
        self, kind: LayerKind, micro_batch_size: int, sharding: Sharding, price_cache: PriceCache
    ) -> None:
        self.kind, self.sharding = kind, sharding
        self.micro_batch_size = micro_batch_size
        self.price_cache = price_cache
        self.layer = price_cache.layer(kind, 1)

    @property
    def only_megatron(self) -> bool:
        """True for a head with modules that predict further tokens: they share one table."""
        return any(is_in_module(operator.name) for operator in self.layer.operators)

    def megatron(self) -> LayerOption:
        """Returns the way of Megatron: the table is divided by vocabulary."""
        kind, b = self.kind, self.micro_batch_size
        level = Recompute.NONE
        size = self.price_cache.activations(kind, b, self.sharding, level)
        return LayerOption(
            recompute=(),
            sharding=self.sharding,
            weight_layout=self._table_layout(self.sharding),
            time_s=self.price_cache.layer_time(kind, b, self.sharding, level).total_s,
            saved_bytes=float(size.saved),
            ideal_saved_bytes=size.ideal_saved,
            workspace_bytes=float(size.workspace),
            kind=kind,
        )

    def others(self, choices: LayerProblem) -> Iterator[LayerOption]:
        """Yields the ways that no way with the same division of the table equals or beats.

        The values compared are seconds, saved bytes and workspace. No operator is recomputed.
        """
        megatron, sharding = self.megatron(), self.sharding
        operators = self.layer.operators
        kept = _kept(choices)
        every = np.indices([len(options) for options in kept.options])
        rows = every.reshape(len(operators), -1).T
        picked = evaluate(kept, rows)
        table = operators.index(table_of(self.layer))
        layouts = [
            self._table_layout(replace(sharding, own=((operators[table].name, each.splits),)))
            for each in kept.options[table]
        ]
        numbers = np.array([layouts.index(layout) for layout in layouts])
        values = [[p.launched_s, p.saved_bytes, p.workspace_bytes] for p in picked]
        for row in _unbeaten_rows(np.array(values), numbers[rows[:, table]]):
            own = tuple(
                (op.name, option.splits)
                for op, option in zip(operators, picked[row].options, strict=True)
                if option.splits != sharding.splits(op)
            )
            if own:
                yield replace(
                    megatron,
                    sharding=replace(sharding, own=own),
                    weight_layout=layouts[rows[row, table]],
                    time_s=picked[row].launched_s,
                    saved_bytes=picked[row].saved_bytes,
                    workspace_bytes=picked[row].workspace_bytes,
                )

    def alike(self, choices: LayerProblem, division: Sharding) -> LayerProblem:
        """Returns the choices that divide the token table as `division` does."""
        table = table_of(self.layer)
        weight_layout = self._table_layout(division)

        def allowed(name: str, option: StrategyOption) -> bool:
            if name != table.name:
                return True
            alone = single_operator_sharding(table, option.splits, division.degrees)
            return self._table_layout(alone) == weight_layout

        return _kept(choices).only(allowed)

    def _table_layout(self, sharding: Sharding) -> WeightLayout:
        """Returns the division of the token table."""
        return frozenset((dim, False) for dim in table_division(self.layer, sharding) if dim)


def _kept(choices: LayerProblem) -> LayerProblem:
    return choices.only(lambda _, option: not option.recomputed)


def _unbeaten_rows(values: Array, group: Ints) -> list[int]:
    """Returns the rows that no other of the same group equals or beats, the first of equals."""
    no_worse = (values[:, None] <= values[None, :]).all(axis=2) & (group[:, None] == group)
    first = np.arange(len(values))
    beats = no_worse & (~no_worse.T | (first[:, None] < first))
    return np.flatnonzero(~beats.any(axis=0)).tolist()
