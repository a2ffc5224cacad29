"""A torch module is traced and cut into shards, whose prices the searches share."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from parplan.costmodels.host.offload import Offload
from parplan.planner.candidates.never_searched import HOST_WHERE_NEEDED, UnsearchedPart
from parplan.planner.objective import Objective
from parplan.planner.request import (
    TRACED_OFFLOAD,
    ModuleRequest,
    TracedRequest,
    host_contents,
)
from parplan.planner.search.price_factory import Hosted, PriceFactory
from parplan.planner.search.sequence_prices import SequencePrices
from parplan.planner.search.sequence_shortfall import least_peak_bytes
from parplan.planner.traced.shards import Cutting, Sharded, shard
from parplan.planner.traced.stage_rules import StageRule
from parplan.planner.traced.traced_prices import traced_prices
from parplan.planner.traced.traced_shortfall import infeasible_traced_error
from parplan.profiles.errors import ConfigError, InfeasibleError
from parplan.profiles.models.tp_rules import TpRules

SAMPLES = "samples"
_UNSEARCHED = (
    UnsearchedPart("other orders of the mesh axes than pp-dp-tp", "--mesh-order asks for them"),
    UnsearchedPart(
        "any shards on the host",
        "they are the last of a pipeline rank in chunks, or all without chunks",
    ),
    UnsearchedPart(
        "chunks with several virtual stages, or for another objective than throughput",
        "plan estimate prices them by hand",
    ),
    UnsearchedPart(
        "every count of shards on the host",
        "of more than 16 shards in chunks a rank, the counts are on a grid of 17",
    ),
    UnsearchedPart(
        "chunks that only their exact schedule fits",
        "the closed form counts a few percent more bytes",
    ),
    UnsearchedPart("activations on the host", "a traced module has only its states there"),
    UnsearchedPart(
        "other recompute lists",
        "a class of shards has the eight that save most for their time",
    ),
    UnsearchedPart(
        "other divisions of a shard over tensor-parallel ranks",
        "every shard has the one that divides most of its operators",
    ),
    UnsearchedPart(
        "all orders of unequal parts with several virtual stages",
        "the closed form knows the sums of a rank's parts; a few orders are simulated",
    ),
    UnsearchedPart("tensor parallelism across nodes", "its ranks are inside a node"),
    UnsearchedPart("sequence and expert parallelism", "a trace does not name their dims"),
)


class TracedFactory(PriceFactory):
    """The prices of a traced module, whose states may lie on the hosts.

    rule: the way to give shards to stages (--stages)
    cutting: the way to cut the module into shards (--shards, --cross-skips)
    front: the request begins a front, which other objectives go on
    Raises ConfigError for states in chunks alone with another objective than throughput.

    In a plan of samples the sequence has one token, so speeds are samples a second.
    """

    request: TracedRequest
    prefer = None  # no error band is known

    def __init__(
        self,
        request: TracedRequest,
        rule: StageRule | None = None,
        cutting: Cutting | None = None,
        *,
        front: bool = False,
    ) -> None:
        if request.model.unit == SAMPLES:
            request = replace(request, training=replace(request.training, seq_length=1))
        self.request, self._named = request, rule or StageRule()
        self.searched = host_contents(TRACED_OFFLOAD, request.training.optimizer)
        self.cutting, self.offload = cutting or Cutting(), request.constraints.offload
        self._chunks = request.objective is Objective.THROUGHPUT and not front
        if not self._chunks and self.offload and Offload.STATES not in self.offload:
            raise ConfigError(
                f"--offload {','.join(self.offload)} is of chunks, which are searched for "
                f"--objective {Objective.THROUGHPUT} alone where a module is traced",
                hint="use --offload states, or that objective",
            )
        self._prices: dict[Hosted, SequencePrices] = {}

    @cached_property
    def _sharded(self) -> Sharded:
        return shard(self.request.model, replace(self.cutting, splits=self._named.names))

    @cached_property
    def rule(self) -> StageRule:
        """The way to give shards to stages, by counts where the user named submodules."""
        return self._named.of(self._sharded)

    def prices(self, offload: Hosted) -> SequencePrices:
        if offload not in self._prices:
            searched = tuple(each for each in offload if self._chunks or each is Offload.STATES)
            request = self.request.with_offload(searched)
            self._prices[offload] = traced_prices(request, self._sharded, self.rule)
        return self._prices[offload]

    def least_peak_bytes(self, offload: Hosted) -> float:
        return least_peak_bytes(self.prices(offload))

    def unsearched(self) -> tuple[UnsearchedPart, ...]:
        return _UNSEARCHED if self.offload is not None else (*_UNSEARCHED, HOST_WHERE_NEEDED)

    def error(self, offload: Hosted) -> InfeasibleError:
        request = self.request.with_offload(offload)
        return infeasible_traced_error(request, self.prices(offload), self.rule)


def traced_request(request: ModuleRequest, rules: TpRules | None = None) -> TracedRequest:
    """Returns the request for the trace of its module, made without memory for its weights.

    `rules` override the tensor parallelism that is derived. Raises ConfigError when the module
    cannot be traced, or cannot have the rules.
    """
    from parplan.profiles.tracing.trace import trace  # loads torch

    training = request.training
    model = trace(
        request.model,
        seq_length=training.seq_length,
        precision=training.precision,
        attention=training.attention,
        on_cpu=request.cluster.device.is_host,
        rules=rules,
        check=request.options.deadline.check,
    )
    return request.of_model(model)
