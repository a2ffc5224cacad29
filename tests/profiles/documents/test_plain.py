"""Documents are built directly exactly where the validator would give the same instance."""

from __future__ import annotations

import random
from copy import deepcopy
from importlib.resources import files
from typing import Any

import pytest

from parplan.profiles.documents.packaged_configs import packaged_file, packaged_names, read_config
from parplan.profiles.documents.plain import NotPlainError, plain
from parplan.profiles.documents.reader import read_yaml
from parplan.profiles.documents.schema import _validated
from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.machine_catalog import _ClusterDocument
from parplan.profiles.machines.speeds import Profile
from parplan.profiles.machines.stack_terms import Terms
from parplan.profiles.models.model_catalog import _ModelFile
from parplan.profiles.stack import Stack

DATA = files("parplan.profiles") / "data"
KINDS = {"clusters": _ClusterDocument, "models": _ModelFile, "stacks": Stack}
SHIPPED = [
    *((kind, folder, name) for folder, kind in KINDS.items() for name in packaged_names(folder)),
    (Terms, "data", "terms"),
    (Profile, "data", "a100-80gb"),
]
OTHER_VALUES: tuple[Any, ...] = (
    None,
    "",
    "1",
    "inf",
    "nan",
    0,
    -1,
    2,
    0.5,
    -2.0,
    True,
    [],
    {},
    [1],
)


def shipped_document(folder: str, name: str) -> Any:
    if folder == "data":
        return read_yaml(DATA / f"{name}.yaml")
    return read_config(packaged_file(folder, name))


def places(document: Any) -> list[tuple[Any, Any]]:
    """Returns the container and the key of every value."""
    if isinstance(document, dict):
        items: list[tuple[Any, Any]] = list(document.items())
    else:
        items = list(enumerate(document)) if isinstance(document, list) else []
    inner = (place for _, value in items for place in places(value))
    return [*((document, key) for key, _ in items), *inner]


@pytest.mark.parametrize(("kind", "folder", "name"), SHIPPED)
def test_a_shipped_file_needs_no_validator_and_reads_as_with_it(kind, folder, name):
    document = shipped_document(folder, name)

    built = plain(kind, document)

    assert repr(built) == repr(_validated(kind, document, name))


@pytest.mark.parametrize(
    ("kind", "folder", "name"),
    [
        (_ClusterDocument, "clusters", "a100-80gb"),
        (_ModelFile, "models", "llama3-8b"),
        (Stack, "stacks", "megatron-core"),
        (Terms, "data", "terms"),
    ],
)
def test_a_changed_value_is_accepted_only_where_the_validator_accepts_it(kind, folder, name):
    original = shipped_document(folder, name)
    rng = random.Random(0)
    outcomes = set()
    for _ in range(300):
        document = deepcopy(original)
        container, key = rng.choice(places(document))
        if isinstance(container, dict) and rng.random() < 0.2:
            container[f"{key}_"] = container.pop(key)
        else:
            container[key] = rng.choice(OTHER_VALUES)
        try:
            built = plain(kind, document)
        except (NotPlainError, ConfigError):
            outcomes.add("left to the validator")
            continue
        outcomes.add("built")
        assert repr(built) == repr(_validated(kind, document, name))

    assert outcomes == {"built", "left to the validator"}
