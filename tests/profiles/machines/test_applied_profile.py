"""User profiles applied to a cluster: the matching machines, and prices that follow them."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import numpy as np
import pytest

from parplan.commands.options.target_options import TargetOptions
from parplan.commands.requests.requests import request_of
from parplan.costmodels.layers.layer_price import price_operators
from parplan.costmodels.operators.sharding import Sharding
from parplan.planner.layer_options.layer_problem import layer_problem
from parplan.planner.layer_options.layer_program import evaluate
from parplan.planner.plan.plan_file import (
    plan_from_document,
    plan_to_document,
    read_plan,
    write_plan,
)
from parplan.planner.plan.plan_file import plan_to_yaml as plan_yaml
from parplan.planner.plan.reprice import reprice
from parplan.planner.request import Constraints
from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.applied_profile import apply_profile
from parplan.profiles.machines.calibration_factors import Calibration, Factor
from parplan.profiles.machines.curves import CollectiveCurve, SizeBounds
from parplan.profiles.machines.machine_catalog import (
    cluster_document,
    load_cluster,
    load_stack,
    with_gpus,
)
from parplan.profiles.machines.shipped_profiles import analytic_profile, machine_for
from parplan.profiles.machines.speeds import InStep, Profile
from parplan.profiles.machines.user_profile import (
    PROFILE_VERSION,
    UserProfile,
    prices_fingerprint,
    profile_to_yaml,
)
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.spec import Precision, TrainingSpec
from parplan.profiles.models.transformer import build_graph
from parplan.profiles.provenance import Kind
from parplan.profiles.units import GIB
from tests.helpers.planning import find_plan

CLUSTER = with_gpus(load_cluster("a100-80gb"), 8)
TRAINING = TrainingSpec(global_batch_size=32, seq_length=1024, stack=load_stack("megatron-core"))
ODD = {
    "forward": 1.3,
    "backward": 0.7,
    "tensor": 5.0,
    "data": 3.0,
    "pipeline": 2.0,
    "optimizer": 4.0,
}


def calibration(**values: float) -> Calibration:
    return Calibration(
        stack="megatron-core",
        precision="bf16",
        **{
            cause: Factor(value=value, measured=True, source="run 0123")
            for cause, value in values.items()
        },
    )


PROFILE = UserProfile(
    profile_version=PROFILE_VERSION,
    fingerprint=prices_fingerprint(CLUSTER, TRAINING.stack),
    device="a100-80gb",
    calibration=calibration(**ODD),
    allocator_share=0.07,
)
CPU = load_cluster("cpu")
AT_FP32 = TrainingSpec(
    global_batch_size=16, seq_length=64, precision=Precision.FP32, stack=load_stack("torchtitan")
)


def measured_profile() -> Profile:
    """The assumptions for a CPU, with two products measured."""
    assumed = analytic_profile("cpu")
    forward = replace(
        assumed.compute.forward,
        kind=Kind.INTERPOLATED,
        bounds=SizeBounds(low=(128, 64, 64), high=(512, 64, 64)),
        rows=2,
        efficiency=0.5,
        points=((128, 64, 64, 12.5), (512, 64, 64, 40.0)),
    )
    in_step = InStep(
        stack="torchtitan",
        kernel_slowdown=1.0,
        forward_s=1e-5,
        backward_s=1e-5,
        host_adds=True,
        source="blocks of made-up models",
    )
    return replace(assumed, compute=replace(assumed.compute, forward=forward), in_step=in_step)


MEASURED = UserProfile(
    profile_version=PROFILE_VERSION,
    device="cpu",
    precision="fp32",
    allocator_share=0.01,
    communicator_bytes=2**20,
    cluster=cluster_document(CPU),
    profile=measured_profile(),
)


def test_a_profile_goes_to_the_cluster_and_the_allocators_share_to_the_stack():
    cluster, training = apply_profile(PROFILE, CLUSTER, TRAINING, "mine.yaml", force=False)

    assert cluster.calibration == PROFILE.calibration
    assert training.stack.allocator_share == 0.07
    assert replace(cluster, calibration=None) == CLUSTER


def test_a_cluster_of_more_nodes_takes_the_same_profile():
    assert (
        apply_profile(PROFILE, with_gpus(CLUSTER, 64), TRAINING, "mine.yaml", force=False)[
            0
        ].calibration
        == PROFILE.calibration
    )


@pytest.mark.parametrize(
    ("cluster", "training", "message", "hint"),
    [
        pytest.param(
            load_cluster("h100-80gb"),
            TRAINING,
            "mine.yaml: the profile is of device a100-80gb, asked is h100-80gb",
            "--force-profile takes it all the same",
            id="device",
        ),
        pytest.param(
            CLUSTER,
            replace(TRAINING, stack=load_stack("nemo")),
            "the profile is of software stack megatron-core, asked is nemo",
            "ask for --stack megatron-core",
            id="stack",
        ),
        pytest.param(
            CLUSTER,
            replace(TRAINING, precision=Precision.FP16),
            "the profile is of precision bf16, asked is fp16",
            "ask for --precision bf16",
            id="precision",
        ),
        pytest.param(
            replace(CLUSTER, device=replace(CLUSTER.device, memory_bytes_per_s=1e12)),
            TRAINING,
            "relative to other prices of a100-80gb",
            "calibrate again: plan calibrate run.json -o FILE",
            id="another-datasheet",
        ),
        pytest.param(
            CLUSTER,
            replace(TRAINING, stack=replace(TRAINING.stack, kernel_slowdown=1.9)),
            "relative to other prices",
            "calibrate again: plan calibrate run.json -o FILE",
            id="other-terms",
        ),
    ],
)
def test_a_profile_of_another_machine_is_refused_but_by_force(cluster, training, message, hint):
    with pytest.raises(ConfigError, match=message) as error:
        apply_profile(PROFILE, cluster, training, "mine.yaml", force=False)

    assert error.value.hint == hint
    assert (
        apply_profile(PROFILE, cluster, training, "mine.yaml", force=True)[0].calibration
        == PROFILE.calibration
    )


def test_measured_curves_go_to_the_cluster_with_the_datasheet_that_they_are_shares_of():
    lean = replace(
        CPU,
        device=replace(
            CPU.device,
            memory_bytes=2 * GIB,
            memory_bytes_per_s=1.0,
            num_sms=7,
            peak_flops_per_s={"fp32": 1.0},
        ),
    )

    cluster, training = apply_profile(MEASURED, lean, AT_FP32, "mine.yaml", force=False)

    assert cluster.profile is machine_for(cluster).profile is MEASURED.profile
    assert cluster == replace(
        CPU, device=replace(CPU.device, memory_bytes=2 * GIB), profile=MEASURED.profile
    )
    assert (training.stack.allocator_share, training.stack.nccl_bytes) == (0.01, 2**20)


def test_without_a_cluster_it_is_the_machine_that_was_measured():
    assert apply_profile(MEASURED, None, AT_FP32, "mine.yaml", force=False)[0] == replace(
        CPU, profile=MEASURED.profile
    )
    with pytest.raises(
        ConfigError, match=r"mine\.yaml: it names no machine, it is of device a100-80gb"
    ) as error:
        apply_profile(PROFILE, None, TRAINING, "mine.yaml", force=False)
    assert error.value.hint == "say which with --gpu a100-80gb"


def test_measured_curves_hold_at_their_own_precision_alone():
    with pytest.raises(
        ConfigError, match=r"mine\.yaml: the profile is of precision fp32, asked is bf16"
    ) as error:
        apply_profile(MEASURED, CPU, TRAINING, "mine.yaml", force=False)

    assert error.value.hint == "ask for --precision fp32"
    assert (
        apply_profile(MEASURED, CPU, TRAINING, "mine.yaml", force=True)[0].profile
        is MEASURED.profile
    )


def test_factors_beside_measured_curves_are_relative_to_these():
    with_curves = replace(CPU, profile=MEASURED.profile)
    factors = replace(calibration(forward=1.5), stack=AT_FP32.stack.name, precision="fp32")
    both = replace(
        MEASURED, calibration=factors, fingerprint=prices_fingerprint(with_curves, AT_FP32.stack)
    )

    assert apply_profile(both, CPU, AT_FP32, "mine.yaml", force=False)[0] == replace(
        with_curves, calibration=factors
    )
    assert both.fingerprint != prices_fingerprint(CPU, AT_FP32.stack)
    with pytest.raises(ConfigError, match="relative to other prices of cpu"):
        apply_profile(
            replace(both, profile=None, precision=None), CPU, AT_FP32, "mine.yaml", force=False
        )


def test_collectives_that_were_measured_hold_on_the_machines_own_link_whatever_its_datasheet_says():
    curve = CollectiveCurve(
        collective="all_reduce",
        ranks=2,
        bytes=(1024, 2048),
        time_us=(10.0, 12.0),
        rows=2,
        median_error=0.0,
    )
    relinked = replace(
        MEASURED.profile, intra=replace(MEASURED.profile.intra, kind=Kind.MEASURED, curves=(curve,))
    )

    assert machine_for(replace(CPU, profile=relinked)).collective_curves["all_reduce"] == (curve,)


def asked(tmp_path, profile: UserProfile, **more):
    path = tmp_path / "mine.yaml"
    path.write_text(profile_to_yaml(profile))
    return request_of(TargetOptions(model="gpt-tiny", gpus=2, profile=str(path), **more))


def test_what_the_user_leaves_open_is_as_it_was_measured_and_said(tmp_path):
    request = asked(tmp_path, MEASURED)

    assert cluster_document(request.cluster) == cluster_document(
        replace(CPU, profile=MEASURED.profile)
    )
    assert (request.training.precision, request.training.stack.name) == (
        Precision.FP32,
        "torchtitan",
    )
    assert {
        "--gpu cpu (the profile's)",
        "--precision fp32 (the profile's)",
        "--stack torchtitan (the profile's)",
    } < set(request.assumed)


def test_what_the_user_says_is_not_assumed(tmp_path):
    request = asked(tmp_path, MEASURED, gpu="cpu", precision="fp32", stack="nemo", gpus_per_node=1)

    assert (request.cluster.nodes, request.training.stack.name) == (2, "nemo")
    assert not any("the profile's" in phrase for phrase in request.assumed)
    with pytest.raises(
        ConfigError, match=r"mine\.yaml: the profile is of device cpu, asked is h100-80gb"
    ):
        asked(tmp_path, MEASURED, gpu="h100")


def test_a_profile_of_factors_alone_leaves_the_defaults_as_they_are(tmp_path):
    request = asked(tmp_path, replace(PROFILE, calibration=None))

    assert {"--gpu a100-80gb", "--precision bf16", "--stack megatron-core"} < set(request.assumed)


def test_a_precision_that_is_none_names_the_file(tmp_path):
    with pytest.raises(ConfigError, match=r"unknown precision 'fp33' in .*mine\.yaml"):
        asked(tmp_path, replace(MEASURED, precision="fp33"))


def test_a_plan_keeps_what_was_measured_in_compact_rows(tmp_path):
    there = replace(CPU, profile=MEASURED.profile)
    plan = find_plan(load_model("gpt-tiny").spec, there, AT_FP32, "throughput")
    text = plan_yaml(plan)
    write_plan(plan, tmp_path / "plan.yaml")

    back = read_plan(tmp_path / "plan.yaml")

    assert plan_yaml(back) == text
    assert "        - [128, 64, 64, 12.5]\n" in text
    assert plan_to_document(reprice(back).plan) == plan_to_document(plan)
    assert plan_to_document(
        plan_from_document(json.loads(json.dumps(plan_to_document(plan))), "run.json")
    ) == plan_to_document(plan)
    assert "profile" not in plan_to_document(replace(plan, cluster=CPU))["cluster"]


@pytest.mark.slow
def test_a_plan_keeps_the_calibration_that_it_was_made_with(tmp_path):
    there = replace(CLUSTER, calibration=calibration(**ODD))
    plan = find_plan(
        load_model("gpt-2.5b").spec,
        there,
        TRAINING,
        "throughput",
        constraints=Constraints(tp=(2,), pp=(2,)),
    )
    write_plan(plan, tmp_path / "plan.yaml")

    back = read_plan(tmp_path / "plan.yaml")

    assert back == plan
    assert (
        reprice(back).plan == plan
    )  # search, its integer programs and the price of the result agree
    assert "calibration" not in plan_to_document(replace(plan, cluster=CLUSTER))["cluster"]


def test_slow_communication_makes_a_search_leave_it():
    def mesh(**off: float):
        there = replace(CLUSTER, calibration=calibration(**off) if off else None)
        pins = Constraints(pp=(1,), tp=(1, 2), dp=(4, 8), zero=(0,))
        return find_plan(
            load_model("gpt-2.5b").spec, there, TRAINING, "throughput", constraints=pins
        ).mesh

    assert mesh(tensor=30.0).tp == 1
    assert mesh(data=100.0, tensor=0.01).tp == 2


@pytest.mark.parametrize("host_s", [0.0, 20e-6], ids=["kernels", "host"])
@pytest.mark.parametrize(
    "sharding", [Sharding(), Sharding(2), Sharding(2, True)], ids=["one", "tp2", "tp2-sp"]
)
def test_the_program_of_a_layer_and_its_price_agree_under_a_calibration(sharding, host_s):
    training = replace(TRAINING, stack=replace(TRAINING.stack, host_operator_s=host_s))
    machine = machine_for(replace(CLUSTER, calibration=calibration(**ODD)))
    layer = build_graph(load_model("gpt-tiny").spec, training, 4).block
    problem, draw = layer_problem(layer, sharding, machine, training), random.Random(0)
    for _ in range(5):
        row = np.array([[draw.randrange(len(options)) for options in problem.options]])
        (layer_price,) = evaluate(problem, row)
        options = layer_price.options
        divided = replace(
            sharding,
            own=tuple(
                (name, option.splits) for name, option in zip(problem.names, options, strict=True)
            ),
        )
        repeated = tuple(
            name for name, option in zip(problem.names, options, strict=True) if option.recomputed
        )

        price = price_operators(layer, divided, machine, training).time(repeated)

        assert layer_price.launched_s == pytest.approx(price.total_s, rel=1e-12)
