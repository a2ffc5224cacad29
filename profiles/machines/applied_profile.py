"""A user's own profile laid over a cluster and a training: `plan --profile FILE`.

The measurements of `plan profile` replace the shipped curves of the device. The factors of `plan
calibrate` multiply the prices that they were made for, including those of measured curves where the
file has both.
"""

from __future__ import annotations

from dataclasses import replace

from parplan.profiles.errors import ConfigError, unknown_name_error
from parplan.profiles.machines.hardware import Cluster
from parplan.profiles.machines.machine_catalog import cluster_from_document
from parplan.profiles.machines.user_profile import UserProfile, prices_fingerprint
from parplan.profiles.models.spec import Precision, TrainingSpec
from parplan.profiles.stack import Stack

FORCED = "--force-profile takes it all the same"


def profile_cluster(profile: UserProfile, where: str) -> Cluster | None:
    """Returns the machine that a profile was measured on, without the profile.

    It is None where the file names no machine. Raises ConfigError.
    """
    if profile.cluster is None:
        return None
    return replace(
        cluster_from_document(profile.cluster, f"{where}: cluster"), profile=None, calibration=None
    )


def precision_of(profile: UserProfile, where: str) -> Precision | None:
    """Returns the precision that a profile was measured at, None where it names none.

    Raises ConfigError for an unknown precision.
    """
    if profile.precision is None:
        return None
    if profile.precision not in list(Precision):
        raise unknown_name_error("precision", profile.precision, list(Precision), where=where)
    return Precision(profile.precision)


def stack_of(profile: UserProfile) -> str | None:
    """Returns the name of the stack under which whole layers were measured, None without any."""
    in_step = profile.profile and profile.profile.in_step
    return in_step.stack if in_step else None


def apply_profile(
    profile: UserProfile,
    cluster: Cluster | None,
    training: TrainingSpec,
    where: str,
    *,
    force: bool,
) -> tuple[Cluster, TrainingSpec]:
    """Returns the cluster and the training with the profile's speeds, factors and memory figures.

    cluster: None for the profile's machine

    The datasheet figures that measured curves are relative to replace those of the cluster. Raises
    ConfigError: the profile names no machine, or, unless `force`, it is of another device, stack or
    precision, or its factors are relative to other prices.
    """
    measured_on = profile_cluster(profile, where)
    machine = cluster or measured_on
    if machine is None:
        raise ConfigError(
            f"{where}: it names no machine, it is of device {profile.device}",
            hint=f"say which with --gpu {profile.device}",
        )
    if not force:
        _require_same(profile, machine, training, where)
    if profile.profile is not None:
        machine = replace(_of_same_datasheet(machine, measured_on), profile=profile.profile)
    if not force:
        _require_same_prices(profile, machine, training, where)
    stack = _with_memory(profile, training.stack)
    return replace(machine, calibration=profile.calibration), replace(training, stack=stack)


def _with_memory(profile: UserProfile, stack: Stack) -> Stack:
    """Returns the stack with the measured figures of its allocator and its communicators."""
    if profile.allocator_share is not None:
        stack = replace(stack, allocator_share=profile.allocator_share)
    if profile.communicator_bytes is not None:
        stack = replace(stack, nccl_bytes=float(profile.communicator_bytes))
    return stack


def _of_same_datasheet(cluster: Cluster, measured_on: Cluster | None) -> Cluster:
    """Returns the cluster with the speeds that the curves were fitted with.

    It changes only where both are of one device; the amount of memory stays.
    """
    if measured_on is None or measured_on.device.name != cluster.device.name:
        return cluster
    device = measured_on.device
    return replace(
        cluster,
        device=replace(
            cluster.device,
            peak_flops_per_s=device.peak_flops_per_s,
            memory_bytes_per_s=device.memory_bytes_per_s,
            num_sms=device.num_sms,
            context_bytes=device.context_bytes,
        ),
    )


def _require_same(
    profile: UserProfile, cluster: Cluster, training: TrainingSpec, where: str
) -> None:
    """Raises ConfigError where the request differs from what the profile was made for.

    The device and the precision must be the same and, for factors, the stack.
    """
    calibration = profile.calibration
    precision = training.precision.value
    checks = [("device", profile.device, cluster.device.name, FORCED)]
    if profile.profile is not None and profile.precision is not None:
        checks.append(
            ("precision", profile.precision, precision, f"ask for --precision {profile.precision}")
        )
    if calibration is not None:
        stack, made_at = calibration.stack, calibration.precision
        checks += [
            ("software stack", stack, training.stack.name, f"ask for --stack {stack}"),
            ("precision", made_at, precision, f"ask for --precision {made_at}"),
        ]
    for what, profiled, requested, hint in checks:
        if profiled != requested:
            raise ConfigError(
                f"{where}: the profile is of {what} {profiled}, asked is {requested}", hint=hint
            )


def _require_same_prices(
    profile: UserProfile, cluster: Cluster, training: TrainingSpec, where: str
) -> None:
    """Raises ConfigError where the factors are relative to other prices than the cluster's."""
    if profile.calibration is not None and profile.fingerprint != prices_fingerprint(
        cluster, training.stack
    ):
        raise ConfigError(
            f"{where}: the profile is relative to other prices of {profile.device} than these "
            f"({profile.fingerprint})",
            hint="calibrate again: plan calibrate run.json -o FILE",
        )
