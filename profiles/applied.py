"""A profile of one's own laid over a cluster and a training: `plan --profile FILE`."""

from __future__ import annotations

from dataclasses import replace

from profiles.errors import ConfigError
from profiles.hardware import Cluster
from profiles.own import OwnProfile, prices_fingerprint
from profiles.spec import TrainingSpec


def applied(profile: OwnProfile, cluster: Cluster, training: TrainingSpec, where: str, *, force: bool) -> tuple[Cluster, TrainingSpec]:
    """The cluster and the training with what the profile says.

    Raises ConfigError unless `force`: it is of another device, stack or precision, or of other prices.
    """
    reason = None if force else _mismatch(profile, cluster, training)
    if reason:
        raise ConfigError(f"{where}: {reason}", hint="calibrate with a run of that, or take it all the same with --force-profile")
    stack = training.stack
    if profile.allocator_share is not None:
        stack = replace(stack, allocator_share=profile.allocator_share)
    return replace(cluster, calibration=profile.calibration), replace(training, stack=stack)


def _mismatch(profile: OwnProfile, cluster: Cluster, training: TrainingSpec) -> str | None:
    of = profile.calibration
    if of is None:
        return None
    for what, made, asked in (
            ("device", profile.device, cluster.device.name), ("software stack", of.stack, training.stack.name),
            ("precision", of.precision, training.precision.value)):
        if made != asked:
            return f"the profile is of {what} {made}, asked is {asked}"
    if profile.fingerprint != prices_fingerprint(cluster, training.stack):
        return f"the profile is relative to other prices of {profile.device} than these ({profile.fingerprint})"
    return None
