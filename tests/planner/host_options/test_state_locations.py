"""State locations of blocks: counts, order, and the candidates that may hold states in chunks."""

import itertools
from dataclasses import replace

import pytest

from parplan.commands.options.target_options import TargetOptions
from parplan.commands.requests.requests import request_of
from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.host.offload import Offload
from parplan.costmodels.host.state_location import Access, StateLocation
from parplan.costmodels.schedules.schedule import Schedule
from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.candidates.enumeration import layout_text
from parplan.planner.candidates.meshes import Pruned
from parplan.planner.host_options.state_locations import (
    BlockLocations,
    counts_of_locations,
    has_chunks,
    illegal_chunks,
    locations_allowed,
)
from parplan.planner.request import SEARCHED_OFFLOAD, Constraints
from parplan.profiles.errors import ConfigError
from tests.helpers.planning import enumerate_candidates

FRAME = ParallelLayout(
    mesh=Mesh(pp=2, dp=2, tp=1),
    schedule=Schedule.ONE_F_ONE_B,
    virtual_stages=1,
    micro_batch_size=1,
    num_micro_batches=4,
    sequence_parallel=False,
    chunked=True,
)


def test_the_last_blocks_are_on_the_host_and_the_optimizer_states_of_some_before_them() -> None:
    assert BlockLocations(2, 1).of(5) == (
        StateLocation.DEVICE,
        StateLocation.DEVICE,
        StateLocation.OPTIMIZER,
        StateLocation.HOST,
        StateLocation.HOST,
    )


@pytest.mark.parametrize(
    ("offload", "homes"),
    [
        ((Offload.OPTIMIZER, Offload.PARAMETERS), set(StateLocation)),
        ((Offload.OPTIMIZER,), {StateLocation.DEVICE, StateLocation.OPTIMIZER}),
        ((Offload.PARAMETERS,), {StateLocation.DEVICE, StateLocation.HOST}),
        ((Offload.ACTIVATIONS,), {StateLocation.DEVICE}),
        ((), {StateLocation.DEVICE}),
    ],
)
def test_the_homes_of_a_rank_are_all_that_what_may_be_offloaded_allows(
    offload: tuple[Offload, ...], homes: set[StateLocation]
) -> None:
    locations = list(
        itertools.starmap(
            BlockLocations, zip(*counts_of_locations(3, locations_allowed(offload)), strict=True)
        )
    )
    runs = {
        tuple(sorted(given, key=list(StateLocation).index))
        for given in itertools.product(homes, repeat=3)
    }
    assert len(locations) == len(set(locations))
    assert {location.of(3) for location in locations} == runs
    assert has_chunks(offload) == (homes != {StateLocation.DEVICE})


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"schedule": Schedule.ZBV, "virtual_stages": 2}, "splits"),
        ({"schedule": Schedule.SCP}, "recomputes ahead"),
        ({"tp_overlap": 1}, "two halves"),
        ({"mesh": Mesh(pp=2, dp=2, tp=1, ep=2), "access": Access.OPERATOR}, "experts"),
        ({"mesh": Mesh(pp=2, dp=1, tp=4, ep=2)}, "experts"),
    ],
)
def test_what_has_no_whole_passes_of_one_block_after_the_other_is_refused(
    changes: dict[str, object], why: str
) -> None:
    assert why in (illegal_chunks(replace(FRAME, **changes)) or "")  # type: ignore[arg-type]


@pytest.mark.parametrize("schedule", [Schedule.GPIPE, Schedule.ONE_F_ONE_B, Schedule.INTERLEAVED])
def test_plain_schedules_may_hold_chunks(schedule: Schedule) -> None:
    assert illegal_chunks(replace(FRAME, schedule=schedule)) is None


def test_chunks_of_several_replicas_are_sharded_as_zero_3_over_all_of_them() -> None:
    alone = replace(FRAME, mesh=Mesh(pp=2, dp=1, tp=1))
    assert "ZeRO 3" in (illegal_chunks(FRAME, (0, 1)) or "")
    assert "2 neighbours" in (illegal_chunks(FRAME, None, 2) or "")
    assert illegal_chunks(alone, (0, 1), 2) is None


def test_every_plain_candidate_is_also_one_in_chunks_or_says_why_not() -> None:
    request = request_of(
        TargetOptions(model="gpt-1.5b", gpus=8, gpu="v100", precision="fp16", global_batch_size=16)
    )
    plain = enumerate_candidates(request.model, request.cluster, request.training, Constraints())
    both = enumerate_candidates(
        request.model, request.cluster, request.training, Constraints(offload=SEARCHED_OFFLOAD)
    )
    chunked = [replace(layout, chunked=True) for layout in plain.layouts]
    assert [layout for layout in both.layouts if not layout.chunked] == list(plain.layouts)
    assert {layout for layout in both.layouts if layout.chunked} == {
        layout for layout in chunked if not illegal_chunks(layout)
    }
    assert {*both.pruned} - {*plain.pruned} == {
        Pruned(layout_text(layout), why) for layout in chunked if (why := illegal_chunks(layout))
    }


def test_nothing_is_held_in_chunks_unless_the_host_may_keep_states() -> None:
    request = request_of(
        TargetOptions(model="gpt-1.5b", gpus=2, gpu="v100", precision="fp16", global_batch_size=4)
    )
    for offload in ((), None, (Offload.ACTIVATIONS,)):
        space = enumerate_candidates(
            request.model, request.cluster, request.training, Constraints(offload=offload)
        )
        assert not any(layout.chunked for layout in space.layouts)


def test_a_search_does_not_take_what_only_an_estimate_has() -> None:
    with pytest.raises(ConfigError, match="states is for estimate"):
        request_of(TargetOptions(model="gpt-1.5b", gpus=2, gpu="v100")).with_offload(
            (Offload.STATES,)
        )
