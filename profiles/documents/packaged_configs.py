"""Configurations by name or by path: the packaged YAML files and a user's own files of that shape.

Listing the names reads a folder and parses nothing.
"""

from __future__ import annotations

import os
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from parplan.profiles.documents.reader import read_yaml
from parplan.profiles.errors import unknown_name_error


def packaged_names(folder: str) -> tuple[str, ...]:
    """Returns the names of the packaged files in a folder of configs/, sorted."""
    entries = (entry.name for entry in files("parplan.configs").joinpath(folder).iterdir())
    return tuple(sorted(name.removesuffix(".yaml") for name in entries if name.endswith(".yaml")))


def packaged_file(folder: str, name: str) -> Traversable:
    return files("parplan.configs").joinpath(folder, f"{name}.yaml")


def packaged_text(folder: str, name: str) -> str:
    """Returns the text of a packaged file that is no YAML, by its whole name."""
    return files("parplan.configs").joinpath(folder, name).read_text(encoding="utf-8")


def config_source(folder: str, name: str, kind: str, text: str) -> Traversable:
    """Returns the packaged file `name` of a folder if there is one, else the path `text`.

    kind: the word for such a configuration in the error that an unknown name raises
    """
    known = packaged_names(folder)
    return packaged_file(folder, name) if name in known else path_or_unknown(kind, text, known)


def path_or_unknown(kind: str, text: str, known: tuple[str, ...]) -> Path:
    """Returns `text` as a path if it is one or looks like one, else raises for an unknown name."""
    path = Path(text)
    looks_like_path = "/" in text or "\\" in text or path.suffix in (".yaml", ".yml", ".json")
    # os.path.exists, unlike Path.exists, accepts a name that is too long
    if not looks_like_path and not os.path.exists(path):
        raise unknown_name_error(kind, text, known)
    return path


def label_of(source: Traversable) -> str:
    """Returns a path as the user gave it, and a packaged file's path as it is in the package.

    The label of a packaged file does not depend on a machine's site-packages.
    """
    text = str(source)
    root = str(files("parplan.configs"))
    return f"configs{text.removeprefix(root)}" if text.startswith(root) else text


def read_config(source: Traversable) -> object:
    return read_yaml(source, label_of(source))
