"""The hardware profile of a user's own: a YAML file with what was measured on a machine, and what
its runs say of its prices.

`plan profile` writes what it measured and the curves that it fitted to it; `plan calibrate`
factors. `plan --profile FILE` reads both. Factors are relative to the prices that were there when
they were made: `fingerprint` is of those, so that they are not laid over others unnoticed. A
curve's points are those of the records and written once, there
(profiles/machines/profile_records.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import yaml

from parplan.profiles.documents.files import write_text
from parplan.profiles.documents.reader import Hints, read_yaml
from parplan.profiles.documents.schema import document, json_schema, parse
from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.calibration_factors import Calibration
from parplan.profiles.machines.hardware import Cluster
from parplan.profiles.machines.machine_catalog import cluster_from_document, cluster_schema
from parplan.profiles.machines.measured_points import DROPPED_FLASH, points_of
from parplan.profiles.machines.measurements import Record
from parplan.profiles.machines.profile_records import lines_of, lines_schema, records_of_lines
from parplan.profiles.machines.shipped_profiles import machine_for
from parplan.profiles.machines.speeds import Profile
from parplan.profiles.stack import Stack

PROFILE_VERSION = 2
FINGERPRINT_DIGITS = 16
_FORBID = {"extra": "forbid"}
_HEADER = (
    "# A machine's own profile: plan --profile FILE. Times in s or us, sizes in bytes, as the keys say; spread: half of the\n"
    "# interquartile range over the median. Each record is what was measured of one case, or why it was not.\n"
)
_MADE_BY = "make one with: plan profile -o FILE, or of runs with: plan calibrate run.json -o FILE"
_FACTS = {  # figure of a record -> the field that it is
    "reserved_share": "allocator_share",
    "context_bytes": "context_bytes",
    "buffer_bytes": "communicator_bytes",
    "granularity_bytes": "granularity_bytes",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledRun:
    """One run that a profile was made from: the fingerprint of its file, its date, its step as it
    was and as it is priced.

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
class ProfileEnvironment:
    """What a profile was measured on, without names of hosts, paths or numbers of single parts.
    None: not known.

    device              as torch calls it; `cpu` for the host itself, whose devices are its cores
    memory_bytes        of one device
    sm_clock_mhz, memory_clock_mhz      when it was asked; max_: the highest that the device takes
    gpu_links           how many pairs of GPUs have a link of that kind, as nvidia-smi names kinds:
                        {NV18: 28}
    nic_links           the same of pairs of a GPU and a NIC
    """

    __pydantic_config__ = _FORBID

    date: str
    device: str
    num_devices: int
    torch: str
    memory_bytes: int | None = None
    compute_capability: str | None = None
    num_sms: int | None = None
    driver: str | None = None
    cuda: str | None = None
    nccl: str | None = None
    cudnn: str | None = None
    python: str | None = None
    cpu: str | None = None
    num_cores: int | None = None
    host_memory_bytes: int | None = None
    sm_clock_mhz: float | None = None
    max_sm_clock_mhz: float | None = None
    memory_clock_mhz: float | None = None
    max_memory_clock_mhz: float | None = None
    power_limit_w: float | None = None
    gpu_links: Mapping[str, int] = field(default_factory=dict)
    nic_links: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class UserProfile:
    """What one file holds. Of `plan calibrate`: fingerprint, calibration and runs; of `plan
    profile`: the rest.

    fingerprint         of the prices that the calibration is relative to
    precision           of the tensors that were measured
    environment         what it was measured on and when
    allocator_share     what the caching allocator held beyond what was allocated, over that; None
                        where nothing measured it
    context_bytes       what a process takes of the device before it has any tensor
    communicator_bytes  what one communicator takes of it
    granularity_bytes   what the allocator rounds a tensor up to
    cluster             the machine, as in configs/clusters
    profile             the curves; their points are those of the records, where there are records
    records             everything that was tried, with what came of it
    """

    __pydantic_config__ = _FORBID

    profile_version: int
    device: str
    precision: str | None = None
    environment: ProfileEnvironment | None = None
    allocator_share: float | None = None
    context_bytes: int | None = None
    communicator_bytes: int | None = None
    granularity_bytes: int | None = None
    fingerprint: str = ""
    calibration: Calibration | None = None
    runs: tuple[ProfiledRun, ...] = ()
    cluster: Mapping[str, Any] | None = None
    profile: Profile | None = None
    records: tuple[Record, ...] = ()


def digest(text: str) -> str:
    """A short fingerprint of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:FINGERPRINT_DIGITS]


def prices_fingerprint(cluster: Cluster, stack: Stack) -> str:
    """Of the constants that factors are relative to: the device's datasheet, its profile, its
    links, and the stack.

    Not of the stack's name, its memory, nor of how many nodes there are.
    """
    machine = machine_for(replace(cluster, calibration=None))
    pace = (stack.kernel_slowdown, stack.host_operator_s, stack.transfer_share)
    curves = document(machine.profile)
    del curves["host"]  # no factor is of offload
    parts = (cluster.device, cluster.intra_node.bytes_per_s, cluster.nic.bytes_per_s, curves, pace)
    return digest(repr(parts))


class _Dumper(yaml.SafeDumper):
    """Lists of numbers and words in one line, all else in blocks; a text of several lines stays
    one.
    """


def _list(dumper: _Dumper, values: list[Any]) -> yaml.Node:
    plain = not any(isinstance(value, dict | list) for value in values)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", values, flow_style=plain)


def _text(dumper: _Dumper, value: str) -> yaml.Node:
    return dumper.represent_scalar(
        "tag:yaml.org,2002:str", value, style='"' if "\n" in value else None
    )


_Dumper.add_representer(list, _list)
_Dumper.add_representer(str, _text)


def profile_to_yaml(profile: UserProfile) -> str:
    """The file's text: each record is one line."""
    body = profile_to_document(profile)
    records = body.pop("records", [])
    text = _HEADER + yaml.dump(body, Dumper=_Dumper, sort_keys=False, width=120)
    lines = (
        yaml.dump(
            line, Dumper=_Dumper, sort_keys=False, default_flow_style=True, width=float("inf")
        )
        for line in records
    )
    return text + "".join(("records:\n", *(f"- {line}" for line in lines)) if records else ())


def profile_to_document(profile: UserProfile) -> dict[str, Any]:
    """The file's content as plain values; what is None or empty is left out."""
    body = document(replace(profile, cluster=None, records=()))
    if profile.profile is not None:
        _leave_out_points(body["profile"]["compute"], profile.records)
    body = _filled(body) | {
        "cluster": dict(profile.cluster or {}),
        "records": lines_of(profile.records, profile.precision),
    }
    return {
        key.name: body[key.name]
        for key in fields(UserProfile)
        if body.get(key.name) not in (None, "", [], {})
    }


def _filled(value: Any) -> Any:
    """Without what is None or empty, which is so by default; `points` stay where they are written
    at all.
    """
    if not isinstance(value, dict):
        return [_filled(item) for item in value] if isinstance(value, list) else value
    return {
        key: _filled(item)
        for key, item in value.items()
        if item not in (None, [], {}) or key == "points"
    }


def _leave_out_points(compute: Mapping[str, Any], records: tuple[Record, ...]) -> None:
    """Takes from the document of curves the points that the records have."""
    points = points_of(records)
    for name, curve in _curve_documents(compute):
        if curve["points"] == [list(point) for point in points.get(name, ())]:
            del curve["points"]


def _curve_documents(compute: object) -> Iterator[tuple[str, dict[str, Any]]]:
    """The documents of curves by the names of
    `parplan.profiles.machines.measured_points.curves_of`; whatever is no mapping is passed over.
    """
    body = compute if isinstance(compute, dict) else {}
    named, dropped = body.get("named"), body.get("dropped_flash")
    found = dict(body) | (named if isinstance(named, dict) else {})
    found |= dict(zip(DROPPED_FLASH, dropped, strict=False)) if isinstance(dropped, list) else {}
    for name, value in found.items():
        if not isinstance(value, dict) or name in ("named", "flash_kernels"):
            continue
        if "kind" in value:
            yield name, value
        else:
            yield from (
                (f"{name}.{key}", curve) for key, curve in value.items() if isinstance(curve, dict)
            )


def write_profile(profile: UserProfile, path: Path) -> None:
    """Write the file whole or not at all. Raises ConfigError."""
    write_text(profile_to_yaml(profile), path, hint="choose another file with -o")


def read_profile(path: Path) -> UserProfile:
    """The profile in a file. Raises ConfigError: not readable, not YAML, another version, unknown
    or missing keys.
    """
    body = read_yaml(path, hints=Hints(_MADE_BY, "make the profile again"))
    found = body.get("profile_version") if isinstance(body, dict) else None
    if found != PROFILE_VERSION:
        raise ConfigError(
            f"{path}: profile_version is {'missing' if found is None else repr(found)}, this parplan reads {PROFILE_VERSION}",
            hint="--profile takes a file of plan profile or plan calibrate: make it again with this version",
        )
    return _from_document(body, str(path))


def _from_document(body: Mapping[str, Any], where: str) -> UserProfile:
    precision = body.get("precision")
    records = records_of_lines(
        body.get("records", []), precision if isinstance(precision, str) else None, where
    )
    points = points_of(records)
    curves = body["profile"].get("compute") if isinstance(body.get("profile"), dict) else None
    for name, curve in _curve_documents(curves):
        curve.setdefault("points", points.get(name, ()))
    profile = parse(
        UserProfile, {key: value for key, value in body.items() if key != "records"}, where
    )
    if profile.cluster is not None:
        cluster_from_document(profile.cluster, f"{where}: cluster")
    return replace(profile, records=records)


def with_memory_facts(profile: UserProfile) -> UserProfile:
    """The profile with what its records say of memory: the figures of the allocator, and of the
    largest communicator.
    """
    found: dict[str, Any] = {}
    for record in profile.records:
        for name, value in (record.measured.figures if record.measured else {}).items():
            if name in _FACTS:
                fact = _FACTS[name]
                found[fact] = max(
                    found.get(fact, 0), round(value) if fact.endswith("_bytes") else value
                )
    return replace(profile, **found)


def merged(old: UserProfile, new: UserProfile) -> UserProfile:
    """A profile with what another session on the same machine measured; a case that both have is
    the new one's.

    The curves are the new ones, if any, and to be fitted again to all records. Raises ConfigError:
    another device, precision or major version of torch.
    """
    for what, there, here in (
        ("device", old.device, new.device),
        ("precision", old.precision, new.precision),
        ("torch", _torch_major(old), _torch_major(new)),
    ):
        if there is not None and here is not None and there != here:
            raise ConfigError(
                f"the file was measured with {what} {there}, this session with {here}",
                hint="write another file with -o",
            )
    records = {record.case.key: record for record in (*old.records, *new.records)}
    empty: dict[str, Any] = {
        name.name: getattr(old, name.name)
        for name in fields(UserProfile)
        if getattr(new, name.name) in (None, "", ())
    }
    return replace(new, **empty | {"records": tuple(records.values())})


def _torch_major(profile: UserProfile) -> str | None:
    return profile.environment.torch.split(".")[0] if profile.environment else None


def profile_schema() -> dict[str, Any]:
    """The JSON Schema of the file: records as its lines have them, the cluster as in a cluster
    file.
    """
    found, lines, cluster = json_schema(UserProfile), lines_schema(), cluster_schema()
    definitions = found["$defs"] | lines["$defs"] | cluster.pop("$defs")
    found["properties"] |= {
        "records": lines["properties"]["records"],
        "profile_version": {"const": PROFILE_VERSION},
        "cluster": {"$ref": "#/$defs/_ClusterDocument"},
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **found,
        "$defs": definitions | {"_ClusterDocument": cluster},
    }
