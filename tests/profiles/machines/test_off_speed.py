"""A machine at other speeds: exactly the prices of the part that is off change."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parplan.costmodels.communication.collectives import (
    Collective,
    collective_time,
    point_to_point_time,
)
from parplan.costmodels.communication.mesh import Axis, Mesh, place
from parplan.costmodels.operators.compute import optimizer_time
from parplan.profiles.machines.calibration_factors import Calibration, Factor
from parplan.profiles.machines.machine_catalog import load_cluster, with_gpus
from parplan.profiles.machines.off_speed import SpeedFactors, at_speeds
from parplan.profiles.machines.shipped_profiles import machine_for
from parplan.profiles.models.spec import TrainingSpec
from parplan.profiles.stack import NEUTRAL

TRAINING = TrainingSpec(global_batch_size=8, seq_length=128, stack=NEUTRAL)
LARGE = 2**30
AS_PRICED = SpeedFactors()


def machine(name="a100-80gb", **changes):
    return machine_for(replace(with_gpus(load_cluster(name), 16), **changes))


def seconds(of):
    """Returns the seconds of an update, an all-reduce in a node, one across, and a message."""
    gpus_per_node = of.cluster.gpus_per_node
    inside = place(Mesh(pp=1, dp=2, tp=8), Axis.TP, gpus_per_node)
    across = place(Mesh(pp=1, dp=16, tp=1), Axis.DP, gpus_per_node)
    return (
        optimizer_time(1e9, of, TRAINING).value_s,
        collective_time(Collective.ALL_REDUCE, LARGE, inside, of).value_s,
        collective_time(Collective.ALL_REDUCE, LARGE, across, of).value_s,
        point_to_point_time(LARGE, level=1, sharing=1, machine=of).value_s,
    )


@pytest.mark.parametrize("name", ["a100-80gb", "rtx3090-24gb", "v100-32gb"])
def test_no_factor_changes_no_price(name):
    plain = machine(name)

    assert seconds(at_speeds(plain, AS_PRICED)) == seconds(plain)


@pytest.mark.parametrize("factor", [0.8, 1.25])
def test_compute_scales_kernels_and_nothing_else(factor):
    update_s, *messages_s = seconds(machine())
    off_update_s, *off_messages_s = seconds(at_speeds(machine(), SpeedFactors(compute=factor)))

    assert off_update_s == pytest.approx(update_s / factor)
    assert off_messages_s == messages_s


@pytest.mark.parametrize("factor", [0.8, 1.25])
def test_a_large_message_in_a_node_takes_as_long_as_one_of_other_bytes(factor):
    plain = machine()
    off = at_speeds(plain, SpeedFactors(inside_node=factor))
    inside = place(Mesh(pp=1, dp=2, tp=8), Axis.TP, plain.cluster.gpus_per_node)

    for n_bytes in (2**12, 2**20, LARGE):  # latency, between, bandwidth
        slow = collective_time(Collective.ALL_REDUCE, round(n_bytes * factor), inside, off)
        assert slow.value_s == pytest.approx(
            collective_time(Collective.ALL_REDUCE, n_bytes, inside, plain).value_s, rel=1e-3
        )
    assert seconds(off)[0] == seconds(plain)[0]
    assert seconds(off)[3] == seconds(plain)[3]


@pytest.mark.parametrize("factor", [0.8, 1.25])
def test_nics_scale_what_leaves_a_node_and_latency_stays(factor):
    plain = machine()
    off = at_speeds(plain, SpeedFactors(across_nodes=factor))
    latency_s = plain.cluster.nic.latency_s

    assert seconds(off)[:2] == seconds(plain)[:2]
    assert seconds(off)[3] - latency_s == pytest.approx((seconds(plain)[3] - latency_s) / factor)
    assert (seconds(off)[2] > seconds(plain)[2]) is (factor < 1)


def test_a_calibration_of_the_cluster_is_kept():
    calibration = Calibration(
        stack="megatron-core",
        precision="bf16",
        optimizer=Factor(value=2.0, measured=True),
        data=Factor(value=3.0, measured=True),
    )
    plain = machine(calibration=calibration)
    off = at_speeds(plain, SpeedFactors(compute=0.5)).cluster.calibration

    assert off.optimizer.value == 4.0
    assert off.forward.value == 2.0
    assert off.data == calibration.data
