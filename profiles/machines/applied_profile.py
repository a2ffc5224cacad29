"""A profile of one's own laid over a cluster and a training: `plan --profile FILE`.

What `plan profile` measured takes the place of the shipped curves of the device; the factors of
`plan calibrate` multiply the prices that were there when they were made, measured curves included
where the file has both.
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
    """The machine that a profile was measured on, without the profile; None where its file names
    none. Raises ConfigError.
    """
    if profile.cluster is None:
        return None
    return replace(
        cluster_from_document(profile.cluster, f"{where}: cluster"), profile=None, calibration=None
    )


def precision_of(profile: UserProfile, where: str) -> Precision | None:
    """What a profile was measured at, None where nothing says so. Raises ConfigError for what is no
    precision.
    """
    if profile.precision is None:
        return None
    if profile.precision not in list(Precision):
        raise unknown_name_error("precision", profile.precision, list(Precision), where=where)
    return Precision(profile.precision)


def stack_of(profile: UserProfile) -> str | None:
    """The name of the stack under which whole layers were measured, None where none were."""
    in_step = profile.profile and profile.profile.in_step
    return in_step.stack if in_step else None


def applied(
    profile: UserProfile,
    cluster: Cluster | None,
    training: TrainingSpec,
    where: str,
    *,
    force: bool,
) -> tuple[Cluster, TrainingSpec]:
    """The cluster, None for the profile's own, and the training with what the profile says, of
    memory too.

    The datasheet figures that measured curves are shares of come with them. Raises ConfigError: it
    names no machine, and unless `force`: it is of another device, stack or precision, or of other
    prices.
    """
    measured_on = profile_cluster(profile, where)
    there = cluster or measured_on
    if there is None:
        raise ConfigError(
            f"{where}: it names no machine, it is of device {profile.device}",
            hint=f"say which with --gpu {profile.device}",
        )
    if not force:
        _require_same(profile, there, training, where)
    if profile.profile is not None:
        there = replace(_of_same_datasheet(there, measured_on), profile=profile.profile)
    if not force:
        _require_same_prices(profile, there, training, where)
    return replace(there, calibration=profile.calibration), replace(
        training, stack=_with_memory(profile, training.stack)
    )


def _with_memory(profile: UserProfile, stack: Stack) -> Stack:
    """The stack with what its allocator and its communicators were seen to hold."""
    if profile.allocator_share is not None:
        stack = replace(stack, allocator_share=profile.allocator_share)
    return (
        stack
        if profile.communicator_bytes is None
        else replace(stack, nccl_bytes=float(profile.communicator_bytes))
    )


def _of_same_datasheet(cluster: Cluster, measured_on: Cluster | None) -> Cluster:
    """The cluster with the speeds by which the curves were fitted, where both are of one device;
    how much memory it has stays.
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
    """Raises ConfigError where device, precision or, of factors, the stack are not those that the
    profile is of.
    """
    of = profile.calibration
    precision = training.precision.value
    found = [("device", profile.device, cluster.device.name, FORCED)]
    if profile.profile is not None and profile.precision is not None:
        found.append(
            ("precision", profile.precision, precision, f"ask for --precision {profile.precision}")
        )
    if of is not None:
        found += [
            ("software stack", of.stack, training.stack.name, f"ask for --stack {of.stack}"),
            ("precision", of.precision, precision, f"ask for --precision {of.precision}"),
        ]
    for what, made, asked, hint in found:
        if made != asked:
            raise ConfigError(
                f"{where}: the profile is of {what} {made}, asked is {asked}", hint=hint
            )


def _require_same_prices(
    profile: UserProfile, cluster: Cluster, training: TrainingSpec, where: str
) -> None:
    """Raises ConfigError where the factors are relative to other prices than those of the cluster
    as it now is.
    """
    if profile.calibration is not None and profile.fingerprint != prices_fingerprint(
        cluster, training.stack
    ):
        raise ConfigError(
            f"{where}: the profile is relative to other prices of {profile.device} than these ({profile.fingerprint})",
            hint="calibrate again: plan calibrate run.json -o FILE",
        )
