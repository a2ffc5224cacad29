"""The whole price of one strategy of one operator (EQUATIONS S1).

A strategy is the split of each axis, saved or recomputed, at a ZeRO stage. Costs that depend on the
operators around it are the price of its edges (costmodels/layers/tensor_flow.py,
`layer_price.edge_time`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from parplan.costmodels.layers.layer_price import StageAxes, own_communication
from parplan.costmodels.layers.model_states import StateBytes, StateSharding, operator_states
from parplan.costmodels.layers.narrow_products import narrow_weights
from parplan.costmodels.layers.recompute import gradient_bytes, made_inside
from parplan.costmodels.operators.compute import OperatorTime, operator_time
from parplan.costmodels.operators.sharding import Sharding, Shardings, Splits
from parplan.profiles.models.operator_graph import Operator
from parplan.profiles.models.spec import TrainingSpec
from parplan.profiles.provenance import Seconds

WHOLE = Sharding()


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorPrice:
    """The cost of one strategy of an operator on one rank and for one micro-batch.

    compute, ending     its kernels; and the end of its partial sums and its exchanges, forward and
                        backward
    recompute           forward once more, with its ending, where it is recomputed
    states              bytes of its parameters, gradients and optimizer states by class
    saved_bytes         tensors made inside and saved for its backward pass (masks, scores); 0 where
                        it is recomputed
    temporary_bytes     gradients of its inputs, outputs and parameters while its backward pass runs
    """

    compute: OperatorTime
    ending: OperatorTime
    recompute: Seconds | None
    states: StateBytes
    saved_bytes: int
    temporary_bytes: int

    @property
    def forward_s(self) -> float:
        return self.compute.forward.value_s + self.ending.forward.value_s

    @property
    def backward_s(self) -> float:
        return self.compute.backward.value_s + self.ending.backward.value_s

    @property
    def recompute_s(self) -> float:
        return self.recompute.value_s if self.recompute else 0.0


def single_operator_sharding(
    operator: Operator,
    splits: Splits,
    degrees: tuple[int, ...],
    *,
    sequence_parallel: bool = False,
    over_data: bool = False,
    like: Sharding = WHOLE,
) -> Sharding:
    """Returns a sharding of the axes of `degrees` that divides `operator` by `splits`.

    With `over_data` the first axis are data-parallel ranks. Experts and sequences are divided as in
    `like`.
    """
    data, inside = (degrees[0], degrees[1:]) if over_data else (1, degrees)
    return Sharding(
        math.prod(inside),
        sequence_parallel,
        ((operator.name, splits),),
        inside if len(inside) > 1 else (),
        data=data,
        ep=like.ep,
        etp=like.etp,
        cp=like.cp,
        context_form=like.context_form,
        rows=like.rows,
    )


def operator_price(
    operator: Operator,
    splits: Splits,
    inside: StageAxes,
    training: TrainingSpec,
    *,
    recomputed: bool = False,
    zero: int = 0,
    dp: int = 1,
    over_data: bool = False,
    like: Sharding = WHOLE,
) -> OperatorPrice:
    """Prices one strategy; `zero` shards the states over `dp` data-parallel ranks.

    With `over_data` these ranks are the first axis of `inside`. Experts and sequences are divided
    as in `like`.
    """
    sharding = single_operator_sharding(
        operator, splits, inside.degrees, over_data=over_data, like=like
    )
    compute = operator_time(operator, sharding, inside.machine, training)
    states = StateSharding(zero, dp)
    price = _price(operator, sharding, compute, inside, training, states)
    if not recomputed:
        return price
    return replace(price, recompute=compute.forward + price.ending.forward, saved_bytes=0)


def operator_prices(
    operator: Operator,
    ways: Sequence[Splits],
    inside: StageAxes,
    training: TrainingSpec,
    states: StateSharding,
    *,
    over_data: bool = False,
    like: Sharding = WHOLE,
) -> list[OperatorPrice]:
    """Prices several strategies at once, none of which recomputes (`operator_price`).

    An operator of several micro-batch sizes gives arrays with a row for each.
    """
    each = tuple(
        single_operator_sharding(operator, splits, inside.degrees, over_data=over_data, like=like)
        for splits in ways
    )
    compute = operator_time(operator, Shardings(each), inside.machine, training)
    return [
        _price(operator, sharding, compute.of_sharding(number), inside, training, states)
        for number, sharding in enumerate(each)
    ]


def _price(
    operator: Operator,
    sharding: Sharding,
    compute: OperatorTime,
    inside: StageAxes,
    training: TrainingSpec,
    states: StateSharding,
) -> OperatorPrice:
    capability = inside.machine.cluster.device.compute_capability
    return OperatorPrice(
        compute=compute,
        ending=own_communication(operator, sharding, compute, inside),
        recompute=None,
        states=operator_states(
            operator, sharding, states, training, narrow=narrow_weights(training, capability)
        ),
        saved_bytes=sum(sharding.tensor_bytes(operator, t) for t in made_inside(operator)),
        temporary_bytes=gradient_bytes(operator, sharding, training.stack),
    )
