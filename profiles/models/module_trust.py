"""The check of a module that a plan file names, before its import runs code from anyone.

Names that resolve in the current folder or in installed packages are accepted. Others, such as
names of the standard library and of folders that PYTHONPATH adds, need --trust-module. Only the
outermost package is located, which imports nothing. A name on the command line is the user's choice
and is not checked here.
"""

from __future__ import annotations

import importlib.util
import json
import os
import site
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import distributions
from pathlib import Path
from urllib.parse import unquote, urlsplit

from parplan.profiles.errors import ConfigError
from parplan.profiles.models.module_source import ModuleSource

HERE = "the current folder"
INSTALLED = "an installed package"
STANDARD = "the standard library"
ELSEWHERE = "neither"


@dataclass(frozen=True, slots=True)
class Origin:
    """The file or folder that a package would be imported from, and the word for its place."""

    path: str
    place: str


def trusted_module_note(source: ModuleSource | None, plan_file: str, *, trust: bool) -> str | None:
    """Returns one line that says which code the plan file imports, and from where.

    It is None where the plan file imports nothing, or where nothing has that name.
    Raises ConfigError for a name that resolves elsewhere than in the current folder and in
    installed packages, unless `trust`.
    """
    if source is None or source.factory is None:
        return None
    origin = origin_of(source.factory.partition(":")[0])
    if origin is None:  # the import says what is missing
        return None
    if origin.place not in (HERE, INSTALLED) and not trust:
        place = (
            f"in {STANDARD}"
            if origin.place == STANDARD
            else "outside of the current folder and of installed packages"
        )
        raise ConfigError(
            f"{plan_file}: module: {source.factory} is {place} ({origin.path}), and a "
            "plan file runs only what is inside",
            hint="run from the folder that holds it, or add --trust-module if you trust that code",
        )
    return f"{plan_file} runs code: {source.factory}, imported from {origin.path}"


def origin_of(package: str) -> Origin | None:
    """Returns where the import of a dotted name would begin, None for an unknown name.

    Nothing is imported. A folder without an __init__ is passed through to the parts inside it,
    since folders of one name may lie in several places.
    """
    spec, name = None, ""
    for part in package.split("."):
        name = f"{name}.{part}" if name else part
        spec = _spec(name, spec)
        if spec is None:
            return None
        if not _is_folder(spec):
            break
    if spec is None or _is_folder(spec):
        return None
    if not spec.has_location or spec.origin is None:
        return Origin("a part of Python", STANDARD)
    path = os.path.abspath(spec.origin)
    return Origin(path, _place(path))


def _spec(name: str, parent: ModuleSpec | None) -> ModuleSpec | None:
    if name in sys.modules:
        module = sys.modules[name]
        if module is None:
            return None
        return module.__spec__ or ModuleSpec(name, None, origin="no file")  # __main__ has no spec
    if parent is None:
        return importlib.util.find_spec(name)
    return PathFinder.find_spec(name, list(parent.submodule_search_locations or ()))


def _is_folder(spec: ModuleSpec) -> bool:
    return spec.origin is None and spec.submodule_search_locations is not None


def _place(path: str) -> str:
    if _inside(path, _installed_folders()):
        return INSTALLED
    if _inside(path, (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))):
        return STANDARD
    if _inside(path, (os.getcwd(),)):
        return HERE
    return INSTALLED if _inside(path, _editable_folders()) else ELSEWHERE


def _inside(path: str, folders: Iterator[str] | tuple[str, ...]) -> bool:
    real = os.path.realpath(path)
    return any(Path(real).is_relative_to(os.path.realpath(folder)) for folder in folders)


def _installed_folders() -> tuple[str, ...]:
    """Returns the folders that package managers of this interpreter install into."""
    folders = (
        sysconfig.get_path("purelib"),
        sysconfig.get_path("platlib"),
        *site.getsitepackages(),
    )
    return (*folders, site.getusersitepackages()) if site.ENABLE_USER_SITE else folders


def _editable_folders() -> Iterator[str]:
    """Yields the folders of packages that were installed by `pip install -e`."""
    for distribution in distributions(path=list(_installed_folders())):
        text = distribution.read_text("direct_url.json")
        origin = json.loads(text) if text else {}
        url = urlsplit(origin.get("url", ""))
        if url.scheme == "file" and origin.get("dir_info", {}).get("editable"):
            yield unquote(url.path)
