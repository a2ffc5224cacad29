"""A profile of one's own: the file, the machines that it is for, and that every price of a search follows it."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from costmodels.layer import price_operators
from costmodels.sharding import Sharding
from planner.layer_ilp import evaluate
from planner.layer_problem import layer_problem
from planner.plan import read as read_plan
from planner.plan import to_document, write
from planner.reprice import reprice
from planner.request import Constraints
from planner.search import find_plan
from profiles.applied import applied
from profiles.calibration import Calibration, Factor
from profiles.catalog import load_cluster, load_model, load_stack, with_gpus
from profiles.errors import ConfigError
from profiles.measured import machine_for
from profiles.own import PROFILE_VERSION, OwnProfile, Source, prices_fingerprint, read, to_yaml
from profiles.spec import Precision, TrainingSpec
from profiles.transformer import build_graph

CLUSTER = with_gpus(load_cluster("a100-80gb"), 8)
TRAINING = TrainingSpec(global_batch_size=32, seq_length=1024, stack=load_stack("megatron-core"))
ODD = {"forward": 1.3, "backward": 0.7, "tensor": 5.0, "data": 3.0, "pipeline": 2.0, "optimizer": 4.0}


def calibration(**values: float) -> Calibration:
    return Calibration(stack="megatron-core", precision="bf16", **{
        cause: Factor(value=value, measured=True, source="run 0123") for cause, value in values.items()})


PROFILE = OwnProfile(
    profile_version=PROFILE_VERSION, fingerprint=prices_fingerprint(CLUSTER, TRAINING.stack), device="a100-80gb",
    calibration=calibration(**ODD), allocator_share=0.07,
    runs=(Source(fingerprint="0123", date="2026-11-01", model="m", mesh="pp 1", measured_s=1.0, priced_s=2.0, calibrated_s=1.0),))


def test_a_profile_comes_back_unchanged(tmp_path):
    (tmp_path / "mine.yaml").write_text(to_yaml(PROFILE))

    assert read(tmp_path / "mine.yaml") == PROFILE


def test_a_profile_goes_to_the_cluster_and_the_allocators_share_to_the_stack():
    cluster, training = applied(PROFILE, CLUSTER, TRAINING, "mine.yaml", force=False)

    assert cluster.calibration == PROFILE.calibration
    assert training.stack.allocator_share == 0.07
    assert replace(cluster, calibration=None) == CLUSTER


def test_a_cluster_of_more_nodes_takes_the_same_profile():
    assert applied(PROFILE, with_gpus(CLUSTER, 64), TRAINING, "mine.yaml", force=False)[0].calibration == PROFILE.calibration


@pytest.mark.parametrize(("cluster", "training", "message"), [
    pytest.param(load_cluster("h100-80gb"), TRAINING, "mine.yaml: the profile is of device a100-80gb, asked is h100-80gb", id="device"),
    pytest.param(
        CLUSTER, replace(TRAINING, stack=load_stack("nemo")), "the profile is of software stack megatron-core, asked is nemo", id="stack"),
    pytest.param(CLUSTER, replace(TRAINING, precision=Precision.FP16), "the profile is of precision bf16, asked is fp16", id="precision"),
    pytest.param(
        replace(CLUSTER, device=replace(CLUSTER.device, memory_bytes_per_s=1e12)), TRAINING, "relative to other prices of a100-80gb",
        id="another-datasheet"),
    pytest.param(
        CLUSTER, replace(TRAINING, stack=replace(TRAINING.stack, kernel_slowdown=1.9)), "relative to other prices", id="other-terms"),
])
def test_a_profile_of_another_machine_is_refused_but_by_force(cluster, training, message):
    with pytest.raises(ConfigError, match=message) as error:
        applied(PROFILE, cluster, training, "mine.yaml", force=False)

    assert "--force-profile" in error.value.hint
    assert applied(PROFILE, cluster, training, "mine.yaml", force=True)[0].calibration == PROFILE.calibration


@pytest.mark.parametrize(("text", "message"), [
    pytest.param("a: [", "mine.yaml: not YAML", id="not-yaml"),
    pytest.param("name: x", "profile_version is missing, this parplan reads 2", id="a-cluster-file"),
    pytest.param("- 1", "profile_version is missing", id="a-list"),
    pytest.param(to_yaml(PROFILE).replace("profile_version: 2", "profile_version: 3"), "profile_version is 3", id="another-version"),
    pytest.param(to_yaml(PROFILE).replace("value: 5.0", "value: 0.0"), "a factor is 0.0, it must be a positive number", id="zero"),
    pytest.param(to_yaml(PROFILE).replace("tensor:", "tenser:"), "unknown key calibration.tenser", id="unknown-key"),
])
def test_what_is_no_profile_is_refused(text, message, tmp_path):
    (tmp_path / "mine.yaml").write_text(text)

    with pytest.raises(ConfigError, match=message):
        read(tmp_path / "mine.yaml")


def test_a_missing_profile_says_how_to_make_one(tmp_path):
    with pytest.raises(ConfigError, match="cannot read") as error:
        read(tmp_path / "mine.yaml")

    assert error.value.hint == "make one with: plan profile -o FILE, or of runs with: plan calibrate run.json -o FILE"


def test_a_plan_keeps_the_calibration_that_it_was_made_with(tmp_path):
    there = replace(CLUSTER, calibration=calibration(**ODD))
    plan = find_plan(load_model("gpt-2.5b").spec, there, TRAINING, "throughput", constraints=Constraints(tp=(2,), pp=(2,)))
    write(plan, tmp_path / "plan.yaml")

    back = read_plan(tmp_path / "plan.yaml")

    assert back == plan
    assert reprice(back).plan == plan  # search, its integer programs and the price of the result agree
    assert "calibration" not in to_document(replace(plan, cluster=CLUSTER))["cluster"]


def test_slow_communication_makes_a_search_leave_it():
    def mesh(**off: float):
        there = replace(CLUSTER, calibration=calibration(**off) if off else None)
        pins = Constraints(pp=(1,), tp=(1, 2), dp=(4, 8), zero=(0,))
        return find_plan(load_model("gpt-2.5b").spec, there, TRAINING, "throughput", constraints=pins).mesh

    assert mesh(tensor=30.0).tp == 1
    assert mesh(data=100.0, tensor=0.01).tp == 2


@pytest.mark.parametrize("host_s", [0.0, 20e-6], ids=["kernels", "host"])
@pytest.mark.parametrize("sharding", [Sharding(), Sharding(2), Sharding(2, True)], ids=["one", "tp2", "tp2-sp"])
def test_the_program_of_a_layer_and_its_price_agree_under_a_calibration(sharding, host_s):
    training = replace(TRAINING, stack=replace(TRAINING.stack, host_operator_s=host_s))
    machine = machine_for(replace(CLUSTER, calibration=calibration(**ODD)))
    layer = build_graph(load_model("gpt-tiny").spec, training, 4).block
    problem, draw = layer_problem(layer, sharding, machine, training), random.Random(0)
    for _ in range(5):
        options = tuple(draw.choice(found) for found in problem.options)
        own = replace(sharding, own=tuple((name, option.splits) for name, option in zip(problem.names, options, strict=True)))
        again = tuple(name for name, option in zip(problem.names, options, strict=True) if option.again)

        price = price_operators(layer, own, machine, training).time(again)

        assert evaluate(problem, options).launched_s == pytest.approx(price.total_s, rel=1e-12)
