"""Configurations of makers are candidates of their requests, and cost what `plan estimate` says."""

from __future__ import annotations

import pytest

from benchmarks.prices.makers_ranking import MAKERS, as_published, may_be_faster, request_for
from parplan.commands.requests.machine import DEFAULT_STACK
from parplan.planner.request import SearchOptions
from parplan.planner.search.price_factory import DescribedFactory
from parplan.planner.search.search_session import SearchSession
from tests.helpers.cases import named

SMALL = next(maker for maker in MAKERS if maker.model == "gpt-oss-120b")


@pytest.mark.parametrize("maker", named({maker.model: maker for maker in MAKERS}, {SMALL.model}))
def test_a_published_configuration_is_one_candidate(maker):
    request = request_for(maker, DEFAULT_STACK)
    degrees = maker.pp * maker.tp * maker.cp

    assert request.training.global_batch_size == maker.batch
    assert request.cluster.num_gpus % degrees == 0
    assert (request.cluster.num_gpus // maker.pp) % (maker.ep * maker.etp) == 0
    assert as_published(maker, request).step_s > 0


def test_only_candidates_with_lower_bounds_count_as_faster():
    prices = DescribedFactory(request_for(SMALL, DEFAULT_STACK)).prices(())
    session = SearchSession(prices, SearchOptions(), None)
    layout = prices.space.layouts[0]
    bound_s = prices.step_bound_s(layout, session.limit_bytes)

    assert not may_be_faster(layout, bound_s, session)
    assert not may_be_faster(layout, bound_s / 2, session)
