"""The hardware profile of a user's own: a YAML file with what was measured on a machine, and what its runs say of its prices.

`plan profile` writes what it measured and the curves that it fitted to it; `plan calibrate` factors. `plan --profile FILE` reads
both. Factors are relative to the prices that were there when they were made: `fingerprint` is of those, so that they are not
laid over others unnoticed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from profiles.calibration import Calibration
from profiles.cases import Record
from profiles.errors import ConfigError
from profiles.hardware import Cluster
from profiles.measured import machine_for
from profiles.schema import document, parse
from profiles.speeds import Profile
from profiles.stack import Stack

PROFILE_VERSION = 2
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
class Environment:
    """What a profile was measured on, without names of hosts or paths."""

    __pydantic_config__ = _FORBID

    date: str
    device: str
    num_devices: int
    torch: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnProfile:
    """What one file holds. Of `plan profile`: all from `precision` to `records`; of `plan calibrate`: the rest.

    fingerprint       of the prices that the calibration is relative to
    allocator_share   what the caching allocator held beyond what was allocated, over that; None where nothing measured it
    precision         of the tensors that were measured
    cluster           the machine, as in configs/clusters
    environment       what it was measured on and when
    profile           the curves; their points are those of the records, where there are records
    records           everything that was tried, with what came of it
    """

    __pydantic_config__ = _FORBID

    profile_version: int
    device: str
    fingerprint: str = ""
    calibration: Calibration | None = None
    allocator_share: float | None = None
    runs: tuple[Source, ...] = ()
    precision: str | None = None
    cluster: Mapping[str, Any] | None = None
    environment: Environment | None = None
    profile: Profile | None = None
    records: tuple[Record, ...] = ()


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
