"""Files of other planners become a profile of a catalogued device, or extend an existing one.

A profile that is made of files alone has the points of these files, and the shipped curves of the
device for all that no file measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from parplan.planner.calibration.profiling import Profiled, add_records, fitted
from parplan.profiles.documents.files import changed_on
from parplan.profiles.errors import ConfigError
from parplan.profiles.imports.import_formats import read_import
from parplan.profiles.imports.imported import ImportedFile
from parplan.profiles.machines.driver_names import CATALOGUE
from parplan.profiles.machines.machine_catalog import load_cluster
from parplan.profiles.machines.measurements import Record
from parplan.profiles.machines.profile_records import rounded_records
from parplan.profiles.machines.user_profile import (
    PROFILE_VERSION,
    ProfileEnvironment,
    UserProfile,
    write_profile,
)


def import_files(output: Path, paths: Sequence[Path], gpu: str | None) -> Profiled:
    """Writes the measurements of files to a profile, which is made where there is none.

    gpu   the device of files that do not name it
    Raises ConfigError: no known format, unlike devices or precisions, or a device that is not of
    the catalogue.
    """
    files = [read_import(path) for path in paths]
    where = ", ".join(map(str, paths))
    records = tuple(record for each in files for record in each.records)
    device = _driver_name(files, gpu, where)
    notes = tuple(
        f"{path}: left out: {line}"
        for path, each in zip(paths, files, strict=True)
        for line in each.left_out
    )
    if output.exists():
        profiled = add_records(output, records, device, where)
        return replace(profiled, notes=(*profiled.notes, *notes))
    if device is None:
        raise ConfigError(f"{where}: it names no device", hint="say which with --gpu a100-80gb")
    profile = fitted(_made_of(records, device, files, paths))
    write_profile(profile, output)
    return Profiled(profile=profile, notes=notes)


def _made_of(
    records: Sequence[Record], device: str, files: Sequence[ImportedFile], paths: Sequence[Path]
) -> UserProfile:
    precisions = sorted({record.case.precision for record in records})
    if len(precisions) > 1:
        raise ConfigError(
            f"the files have rows in {' and '.join(precisions)}",
            hint="import those of one precision, each to a profile of its own",
        )
    cluster = load_cluster(CATALOGUE[device])
    counts = [each.num_devices for each in files if each.num_devices is not None]
    return UserProfile(
        profile_version=PROFILE_VERSION,
        device=cluster.device.name,
        precision=precisions[0],
        environment=ProfileEnvironment(
            date=max(map(changed_on, paths)),
            device=device,
            num_devices=max(counts, default=cluster.gpus_per_node),
            torch="",
            tool=", ".join(sorted({each.tool for each in files})),
        ),
        records=rounded_records(tuple(records)),
    )


def _driver_name(files: Sequence[ImportedFile], gpu: str | None, where: str) -> str | None:
    """Returns the driver's name of the one device that files and the option name."""
    stated = {each.driver_name for each in files if each.driver_name is not None}
    if gpu is not None:
        names = [name for name, machine in CATALOGUE.items() if machine == gpu]
        if not names:
            raise ConfigError(
                f"--gpu {gpu}: no driver's name of such a GPU is known",
                hint="use a GPU of plan clusters, such as a100-80gb",
            )
        stated = {name for name in stated if CATALOGUE.get(name) != gpu} | {names[0]}
    if len(stated) > 1:
        raise ConfigError(
            f"{where}: they are of several devices: {', '.join(sorted(stated))}",
            hint="import those of one device",
        )
    device = next(iter(stated), None)
    if device is not None and device not in CATALOGUE:
        raise ConfigError(
            f"{where}: the device {device} is not in the catalogue",
            hint="say which it is with --gpu; plan clusters lists them",
        )
    return device
