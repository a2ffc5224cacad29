"""A user's own hardware profile: a YAML file with measurements of a machine and of runs on it.

`plan profile` writes its measurements and the curves fitted to them, `plan calibrate` writes
factors, and `plan --profile FILE` reads both. Factors are relative to the prices of the time when
they were made, and `fingerprint` identifies those prices, so that the factors are not laid over
others unnoticed. A curve's points are those of the records and written once, there
(profiles/machines/profile_records.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import yaml

from parplan.profiles.documents.bounded import Hints
from parplan.profiles.documents.files import write_text
from parplan.profiles.documents.reader import read_yaml
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
    "# A machine's own profile: plan --profile FILE. Times in s or us, sizes in bytes, as "
    "the keys say; spread: half of the\n"
    "# interquartile range over the median. Each record is what was measured of one case, or "
    "why it was not.\n"
)
_MADE_BY = "make one with: plan profile -o FILE, or of runs with: plan calibrate run.json -o FILE"
_FACTS = {  # figure of a record -> field of the profile
    "reserved_share": "allocator_share",
    "context_bytes": "context_bytes",
    "buffer_bytes": "communicator_bytes",
    "granularity_bytes": "granularity_bytes",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledRun:
    """One run that a profile was made from.

    fingerprint   fingerprint of the file of the run
    mesh          for people to read
    measured_s    None where only parts of a step were measured
    priced_s      the price of its step before the calibration
    calibrated_s  the price of its step with the calibration
    """

    __pydantic_config__ = _FORBID

    fingerprint: str
    date: str
    model: str
    mesh: str
    measured_s: float | None
    priced_s: float
    calibrated_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileEnvironment:
    """The machine and the software of a profile, without names of hosts, paths or serial numbers.

    A field is None where it is not known.

    tool                            the other planner whose files were imported, None where this
                                    program measured the machine
    device                          torch's name of it; `cpu` for the host itself, whose devices are
                                    its cores
    memory_bytes                    memory of one device
    sm_clock_mhz, memory_clock_mhz  at the time of the question; max_: the highest that the device
                                    takes
    gpu_links                       number of pairs of GPUs with a link of each kind, as nvidia-smi
                                    names kinds: {NV18: 28}
    nic_links                       the same of pairs of a GPU and a NIC
    """

    __pydantic_config__ = _FORBID

    date: str
    device: str
    num_devices: int
    torch: str
    tool: str | None = None
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
    """The content of one file.

    `plan calibrate` writes fingerprint, calibration and runs, `plan profile` all other fields.

    fingerprint         fingerprint of the prices that the calibration is relative to
    precision           precision of the measured tensors
    environment         the machine, the software and the date of the measurements
    allocator_share     bytes that the caching allocator held beyond the allocated ones, over the
                        allocated ones; None where nothing measured it
    context_bytes       bytes of the device that a process takes before it has any tensor
    communicator_bytes  bytes of the device that one communicator takes
    granularity_bytes   bytes whose multiple the allocator rounds a tensor up to
    cluster             the machine, as in configs/clusters
    profile             the curves; their points are those of the records, where there are records
    records             all cases that were tried, with their outcomes
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
    """Returns a short fingerprint of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:FINGERPRINT_DIGITS]


def prices_fingerprint(cluster: Cluster, stack: Stack) -> str:
    """Returns the fingerprint of the constants that factors are relative to.

    They are the device's datasheet, its profile, its links and the speeds of the stack. The stack's
    name, its memory and the number of nodes do not count.
    """
    machine = machine_for(replace(cluster, calibration=None))
    pace = (stack.kernel_slowdown, stack.host_operator_s, stack.transfer_share)
    curves = document(machine.profile)
    del curves["host"]  # no factor is for offload
    parts = (cluster.device, cluster.intra_node.bytes_per_s, cluster.nic.bytes_per_s, curves, pace)
    return digest(repr(parts))


class _Dumper(yaml.SafeDumper):
    """A dumper that writes lists of numbers and words in one line, and all else in blocks.

    A text of several lines is one quoted text.
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
    """Returns the file's text: each record is one line."""
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
    """Returns the file's content as plain values, without empty ones."""
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
    """Returns the value without None and empty parts, which are the defaults.

    `points` stay even where they are empty.
    """
    if not isinstance(value, dict):
        return [_filled(item) for item in value] if isinstance(value, list) else value
    return {
        key: _filled(item)
        for key, item in value.items()
        if item not in (None, [], {}) or key == "points"
    }


def _leave_out_points(compute: Mapping[str, Any], records: tuple[Record, ...]) -> None:
    """Removes from the document of curves the points that the records have."""
    points = points_of(records)
    for name, curve in _curve_documents(compute):
        if curve["points"] == [list(point) for point in points.get(name, ())]:
            del curve["points"]


def _curve_documents(compute: object) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the documents of curves with the names of `measured_points.curves_of`.

    It skips all values that are not mappings.
    """
    body = compute if isinstance(compute, dict) else {}
    named, dropped = body.get("named"), body.get("dropped_flash")
    documents = dict(body) | (named if isinstance(named, dict) else {})
    if isinstance(dropped, list):
        documents |= dict(zip(DROPPED_FLASH, dropped, strict=False))
    for name, value in documents.items():
        if not isinstance(value, dict) or name in ("named", "flash_kernels"):
            continue
        if "kind" in value:
            yield name, value
        else:
            yield from (
                (f"{name}.{key}", curve) for key, curve in value.items() if isinstance(curve, dict)
            )


def write_profile(profile: UserProfile, path: Path) -> None:
    """Writes the file whole or not at all. Raises ConfigError."""
    write_text(profile_to_yaml(profile), path, hint="choose another file with -o")


def read_profile(path: Path) -> UserProfile:
    """Returns the profile in a file.

    Raises ConfigError: not readable, not YAML, another version, unknown or missing keys.
    """
    body = read_yaml(path, hints=Hints(_MADE_BY, "make the profile again"))
    version = body.get("profile_version") if isinstance(body, dict) else None
    if version != PROFILE_VERSION:
        stated = "missing" if version is None else repr(version)
        raise ConfigError(
            f"{path}: profile_version is {stated}, this parplan reads {PROFILE_VERSION}",
            hint="--profile takes a file of plan profile or plan calibrate: make it again with "
            "this version",
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
    """Returns the profile with the memory figures of its records.

    They are those of the allocator and of the largest communicator.
    """
    facts: dict[str, Any] = {}
    for record in profile.records:
        for name, value in (record.measured.figures if record.measured else {}).items():
            if name in _FACTS:
                fact = _FACTS[name]
                figure = round(value) if fact.endswith("_bytes") else value
                facts[fact] = max(facts.get(fact, 0), figure)
    return replace(profile, **facts)


def merge_profiles(old: UserProfile, new: UserProfile) -> UserProfile:
    """Returns a profile with the measurements of another session on the same machine.

    A case that both have is the new session's. The curves are the new ones, if any, and have to be
    fitted again to all records. Raises ConfigError: another device, precision or major version of
    torch.
    """
    for what, before, now in (
        ("device", old.device, new.device),
        ("precision", old.precision, new.precision),
        ("torch", _torch_major(old), _torch_major(new)),
    ):
        if before is not None and now is not None and before != now:
            raise ConfigError(
                f"the file was measured with {what} {before}, this session with {now}",
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
    here = profile.environment
    return here.torch.split(".")[0] if here and not here.tool else None


def profile_schema() -> dict[str, Any]:
    """Returns the JSON Schema of the file.

    Its records have the shape of their lines, and its cluster that of a cluster file.
    """
    schema = json_schema(UserProfile)
    lines = lines_schema()
    cluster = cluster_schema()
    definitions = schema["$defs"] | lines["$defs"] | cluster.pop("$defs")
    schema["properties"] |= {
        "records": lines["properties"]["records"],
        "profile_version": {"const": PROFILE_VERSION},
        "cluster": {"$ref": "#/$defs/_ClusterDocument"},
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "$defs": definitions | {"_ClusterDocument": cluster},
    }
