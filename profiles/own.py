"""The hardware profile of a user's own: a YAML file with what the runs on a machine say of its prices.

`plan calibrate` writes it, `plan --profile FILE` reads it. Its factors are relative to the prices that were there when it was
made: `fingerprint` is of those, so that a profile is not laid over others unnoticed.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from profiles.calibration import Calibration
from profiles.errors import ConfigError
from profiles.hardware import Cluster
from profiles.measured import machine_for
from profiles.schema import document, parse
from profiles.spec import TrainingSpec
from profiles.stack import Stack

PROFILE_VERSION = 1
FINGERPRINT_DIGITS = 16
_FORBID = {"extra": "forbid"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One run that a profile was made from: the fingerprint of its file, its date, its step as it was and as it is priced.

    mesh: for people to read; priced_s: before the calibration, calibrated_s: with it
    """

    __pydantic_config__ = _FORBID

    fingerprint: str
    date: str
    model: str
    mesh: str
    measured_s: float
    priced_s: float
    calibrated_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnProfile:
    """allocator_share: what the caching allocator held beyond what was allocated, over that; None where no run measured it."""

    __pydantic_config__ = _FORBID

    profile_version: int
    fingerprint: str
    device: str
    calibration: Calibration
    allocator_share: float | None = None
    runs: tuple[Source, ...] = ()


def digest(text: str) -> str:
    """A short fingerprint of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:FINGERPRINT_DIGITS]


def prices_fingerprint(cluster: Cluster, stack: Stack) -> str:
    """Of the constants that factors are relative to: the device's datasheet, its profile, its links, and the stack.

    Not of the stack's name, its memory, nor of how many nodes there are.
    """
    machine = machine_for(replace(cluster, calibration=None))
    pace = (stack.kernel_slowdown, stack.host_operator_s, stack.transfer_share)
    parts = (
        cluster.device, cluster.intra_node.bytes_per_s, cluster.nic.bytes_per_s, document(machine.profile), pace)
    return digest(repr(parts))


def to_yaml(profile: OwnProfile) -> str:
    """The file's text."""
    return yaml.safe_dump(document(profile), sort_keys=False, width=120)


def read(path: Path) -> OwnProfile:
    """The profile in a file. Raises ConfigError: not readable, not YAML, another version, unknown or missing keys."""
    try:
        body: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", hint="make one with: plan calibrate run.json -o FILE") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not YAML: {getattr(error, 'problem', None) or error}", hint="make the profile again") from None
    found = body.get("profile_version") if isinstance(body, dict) else None
    if found != PROFILE_VERSION:
        raise ConfigError(
            f"{path}: profile_version is {'missing' if found is None else repr(found)}, this parplan reads {PROFILE_VERSION}",
            hint="--profile takes a file of plan calibrate: make it again with this version")
    return parse(OwnProfile, body, str(path))


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
    for what, made, asked in (
            ("device", profile.device, cluster.device.name), ("software stack", of.stack, training.stack.name),
            ("precision", of.precision, training.precision.value)):
        if made != asked:
            return f"the profile is of {what} {made}, asked is {asked}"
    if profile.fingerprint != prices_fingerprint(cluster, training.stack):
        return f"the profile is relative to other prices of {profile.device} than these ({profile.fingerprint})"
    return None
