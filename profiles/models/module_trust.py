"""Whether a module that a plan file names may be imported: to import it runs its code, and a plan
file may come from anyone.

Accepted are names that resolve in the current folder and in installed packages. Others, as those of
the standard library and of folders that PYTHONPATH adds, need --trust-module. Only the outermost
package is looked for, which imports nothing. A name on the command line is the user's own word and
is not looked at here.
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

HERE, INSTALLED, STANDARD, ELSEWHERE = (
    "the current folder",
    "an installed package",
    "the standard library",
    "neither",
)


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a package would be imported from: a file or folder, and one of the four words for
    it.
    """

    path: str
    place: str


def trusted_note(source: ModuleSource | None, plan_file: str, *, trust: bool) -> str | None:
    """One line that says what the plan file imports from where; None where it imports nothing, or
    where there is nothing of the name.

    Raises ConfigError for a name that resolves elsewhere than in the current folder and in
    installed packages, unless `trust`.
    """
    if source is None or source.factory is None:
        return None
    origin = origin_of(source.factory.partition(":")[0])
    if origin is None:  # the import says what is missing
        return None
    if origin.place not in (HERE, INSTALLED) and not trust:
        found = (
            f"in {STANDARD}"
            if origin.place == STANDARD
            else "outside of the current folder and of installed packages"
        )
        raise ConfigError(
            f"{plan_file}: module: {source.factory} is {found} ({origin.path}), and a plan file runs only what is inside",
            hint="run from the folder that holds it, or add --trust-module if you trust that code",
        )
    return f"{plan_file} runs code: {source.factory}, imported from {origin.path}"


def origin_of(package: str) -> Origin | None:
    """Where the import of a dotted name would begin; None where there is no such name. Imports
    nothing.

    Folders without an __init__ are gone through, since one of that name may lie in several places.
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
        return (
            None if module is None else module.__spec__ or ModuleSpec(name, None, origin="no file")
        )  # __main__ may have none
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
    """Where package managers of this interpreter and of its virtual environment install."""
    own = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages())
    return (*own, site.getusersitepackages()) if site.ENABLE_USER_SITE else own


def _editable_folders() -> Iterator[str]:
    """The folders of packages that are installed as `pip install -e` does."""
    for distribution in distributions(path=list(_installed_folders())):
        text = distribution.read_text("direct_url.json")
        found = json.loads(text) if text else {}
        url = urlsplit(found.get("url", ""))
        if url.scheme == "file" and found.get("dir_info", {}).get("editable"):
            yield unquote(url.path)
