"""The largest model equals trying every size, with gaps, interrupted, and as a command."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import yaml

from parplan.costmodels.schedules.schedule import Schedule
from parplan.planner.plan.derived import host_gib
from parplan.planner.plan.plan_file import read_plan
from parplan.planner.request import Constraints, PlanRequest, Request, SearchOptions
from parplan.planner.search.largest_model import (
    ALSO_TRIED,
    LEVELS,
    SearchWatch,
    find_largest,
    last_that_fits,
    members,
    widths,
)
from parplan.profiles.documents.ranges import LAYERS
from parplan.profiles.errors import InfeasibleError
from parplan.profiles.machines.machine_catalog import load_cluster, with_gpus
from parplan.profiles.models.families import ModelFamily, parse_family
from parplan.profiles.models.spec import Precision, TrainingSpec
from parplan.profiles.stack import NEUTRAL
from parplan.profiles.units import MIB, tflops
from parplan.report.searches.largest_table import flops_per_s, tokens_per_s
from tests.helpers.command_runs import fail, run, succeed
from tests.helpers.planning import find_plan

WIDTHS = (64, 96, 128, 160, 192, 256, 320, 384)
FAMILY = {
    "name": "own",
    "model": {
        "vocab_size": 512,
        "max_seq_length": 64,
        "norm": "layer_norm",
        "positions": "learned",
        "dropout": 0.0,
        "tied_embeddings": True,
    },
    "members": {
        f"w{width}": {"hidden_size": width, "num_layers": 6, "num_heads": 4} for width in WIDTHS
    },
    "training": {"global_batch_size": 4, "seq_length": 32},
    "source": "made up",
}
TRAINING = TrainingSpec(global_batch_size=4, seq_length=32, precision=Precision.FP32, stack=NEUTRAL)
CLUSTER = with_gpus(load_cluster("cpu"), 2)
PINS = Constraints(offload=(), tp=(1,), megatron_sharding=True)
OPTIONS = SearchOptions(memory_limit_bytes=690 * MIB)


def family() -> ModelFamily:
    return parse_family(FAMILY, "own.yaml")


def asking(**changes) -> Request:
    request = PlanRequest(
        model=family().members[0].spec,
        cluster=CLUSTER,
        training=TRAINING,
        constraints=PINS,
        options=OPTIONS,
    )
    return replace(request, **changes)


@cache
def fits(width: int) -> bool:
    model = next(entry.spec for entry in family().members if entry.spec.hidden_size == width)
    try:
        find_plan(model, CLUSTER, TRAINING, constraints=PINS, options=OPTIONS)
    except InfeasibleError:
        return False
    return True


def test_the_largest_member_is_that_of_asking_every_one_and_all_below_it_fit():
    (row,) = find_largest(members(family().members), asking(), [()])

    every = [fits(width) for width in WIDTHS]
    assert set(every) == {True, False}
    assert every == sorted(every, reverse=True)  # the bisection expects this
    assert row.plan.model.hidden_size == max(width for width in WIDTHS if fits(width))
    assert row.next_name == f"own-w{min(width for width in WIDTHS if not fits(width))}"
    assert re.search(
        r"does not fit on 2 x cpu: the leanest plan .* GiB short", row.next_error.message
    )
    assert row.num_searches < len(WIDTHS)
    assert row.proven


@pytest.mark.parametrize("seed", range(8))
def test_sizes_that_are_not_legal_are_passed_over_and_one_that_fits_above_others_is_found(seed):
    rng = random.Random(seed)
    count, largest = rng.randint(1, 60), rng.randint(-1, 60)
    legal = [rng.random() < 0.6 for _ in range(count)]
    fitting = [legal[index] and index <= largest for index in range(count)]
    after = [index for index in range(count) if legal[index] and index > largest][:ALSO_TRIED]
    for index in after[:1] if rng.random() < 0.3 else ():
        fitting[index] = True  # an exception to the rule, just above it

    def legal_at_most(high: int, low: int) -> int | None:
        return next((index for index in range(high, low - 1, -1) if legal[index]), None)

    tried = []
    answer = last_that_fits(
        lambda index: tried.append(index) or fitting[index], legal_at_most, 0, count
    )

    assert answer == max((index for index in range(count) if fitting[index]), default=-1)
    assert all(legal[index] for index in tried)
    assert len(tried) <= 3 * count.bit_length() + 4 * ALSO_TRIED


@pytest.mark.slow
def test_between_members_the_most_blocks_of_a_width_are_found_and_only_legal_numbers_are_tried():
    answers = asking(
        constraints=replace(PINS, pp=(2,), schedule=(Schedule.INTERLEAVED,), virtual_stages=(2,))
    )
    sizes = widths(lambda blocks: family().of_width(192, blocks), answers)
    (row,) = find_largest(sizes, answers, [()])

    blocks = row.plan.model.num_layers
    assert (row.plan.mesh.pp, row.plan.pipeline.virtual_stages, blocks % 4 in (0, 2)) == (
        2,
        2,
        True,
    )  # 4 equal chunks, or ends that count
    assert row.next_name in (f"own-h192-l{blocks + 2}", f"own-h192-l{blocks + 4}")
    assert sizes.count > blocks


def test_a_narrow_model_has_at_most_the_blocks_that_a_model_may_have():
    request = asking()
    sizes = widths(lambda blocks: family().of_width(8, blocks), request)

    assert sizes.of(sizes.count - 1).spec.num_layers == LAYERS.high


def test_what_one_copy_of_the_states_outgrows_is_not_searched():
    small = replace(
        CLUSTER, device=replace(CLUSTER.device, memory_bytes=2 * MIB), host_memory_bytes=4 * MIB
    )
    (row,) = find_largest(members(family().members[2:]), asking(cluster=small), [()])

    assert row.plan is None
    assert "one copy of its states takes at least" in row.next_error.message


def test_ctrl_c_ends_it_with_what_is_known():
    tried = []

    def interrupted() -> bool:
        return len(tried) > 2

    rows = find_largest(
        members(family().members),
        asking(),
        [(), ()],
        watch=SearchWatch(
            on_search=lambda name, done, planned: tried.append(name), interrupted=interrupted
        ),
    )

    assert len(rows) == 1
    assert not rows[0].proven
    assert rows[0].plan is None or fits(rows[0].plan.model.hidden_size)


@pytest.fixture
def family_file(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("own.yaml").write_text(yaml.safe_dump(FAMILY, sort_keys=False))
    return tmp_path


ASKED = (
    "max-model",
    "--family",
    "own.yaml",
    "--gpus",
    "2",
    "--gpu",
    "cpu",
    "--precision",
    "fp32",
    "--tp",
    "1",
    "--megatron-sharding",
    "--memory-limit",
    "780MiB",
    "--offload",
    "none",
)


@pytest.mark.slow
def test_the_command_prints_a_row_and_writes_the_plan_of_the_largest(family_file):
    result = succeed(*ASKED, "-o", "big.yaml")

    plan = read_plan(family_file / "big.yaml")
    total = tflops(flops_per_s(plan))
    assert re.search(rf"^  nothing +{plan.model.name} +6 ", result.stdout, re.MULTILINE)
    assert f"wrote big.yaml, the plan of {plan.model.name}" in result.stderr
    assert "--global-batch-size 4 (the family's)" in result.stdout
    largest = json.loads(run(*ASKED, "--json").stdout)["largest"]
    assert [(row["model"], row["offload"], row["proven"]) for row in largest] == [
        (plan.model.name, [], True)
    ]
    assert largest[0]["tflops"] == pytest.approx(total, abs=1e-3)
    assert largest[0]["tokens_per_s"] == pytest.approx(tokens_per_s(plan), abs=1e-3)
    assert largest[0]["host_memory_gib"] == host_gib(plan) == 0


@pytest.mark.parametrize(
    ("code", "change", "message"),
    [
        pytest.param(
            3,
            ("--memory-limit", "300MiB"),
            r"no model of the family fits: own-w64 does not fit on 2 x cpu",
            id="nothing-fits",
        ),
        pytest.param(
            2,
            ("--family", "gtp"),
            r"unknown family 'gtp'\nhint: did you mean 'gpt'",
            id="unknown-family",
        ),
        pytest.param(
            2,
            ("--hidden", "65"),
            r"the hidden size 65 is not a multiple of the 4 heads",
            id="width",
        ),
        pytest.param(
            2, ("--output", "none/plan.yaml"), r"cannot write none/plan\.yaml", id="output"
        ),
        pytest.param(
            2,
            ("--seq-length", "128"),
            r"--seq-length is 128, own-w64 learns 64 positions",
            id="positions",
        ),
    ],
)
def test_a_request_that_cannot_be_met_says_what_is_missing(family_file, code, change, message):
    assert re.search(message, fail(code, *ASKED, *change))


@pytest.mark.slow
def test_what_the_host_may_keep_never_makes_the_largest_smaller_and_saves_searches():
    cluster = replace(CLUSTER, host_memory_bytes=128 * MIB)
    tight = asking(
        cluster=cluster,
        options=SearchOptions(memory_limit_bytes=720 * MIB),
        constraints=replace(PINS, pp=(1,), zero=(3,)),
    )
    rows = find_largest(widths(lambda blocks: family().of_width(256, blocks), tight), tight, LEVELS)

    blocks = [row.plan.model.num_layers for row in rows]
    assert [row.offload for row in rows] == list(LEVELS)
    assert blocks == sorted(blocks)
    assert blocks[-1] > blocks[0]
    assert host_gib(rows[0].plan) == 0 < host_gib(rows[-1].plan) <= 128 / 1024
    for row in rows:
        assert max(stage.total for stage in row.plan.predicted.memory_gib) <= 720 / 1024
