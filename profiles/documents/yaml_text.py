"""The text of a document in YAML, and the lines that its values have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import yaml

Path = tuple[str | int, ...]
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def yaml_text(document: object) -> str:
    """Returns a document as YAML, with its keys in their order."""
    return str(yaml.safe_dump(document, sort_keys=False, width=10_000))


def yaml_flow(value: object) -> str:
    """Returns a value as YAML on one line."""
    text: str = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10**6)
    return text.removesuffix("...\n").strip()


def line_numbers(text: str) -> Mapping[Path, int]:
    """Returns the line of each key and of each element of a list, counted from 1, by its path.

    text    YAML or JSON that `parse_yaml` reads; merged keys have no line of their own
    """
    node = yaml.compose(text, Loader=_LOADER)
    return {} if node is None else dict(_lines((), node))


def _lines(path: Path, node: Any) -> Iterator[tuple[Path, int]]:
    inside: list[tuple[str | int, Any, Any]] = []
    if isinstance(node, yaml.MappingNode):
        inside = [(key.value, key, below) for key, below in node.value]
    elif isinstance(node, yaml.SequenceNode):
        inside = [(index, below, below) for index, below in enumerate(node.value)]
    for name, marked, below in inside:
        yield (*path, name), marked.start_mark.line + 1
        yield from _lines((*path, name), below)
