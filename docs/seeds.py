"""Writes docs/design/seeds.md, the features of the four systems, from docs/seeds.yaml.

    python -m docs.seeds

`tests/docs/test_seeds.py` fails while the page differs, or where code or a test in it is gone.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parent
PAGE = FOLDER / "design" / "seeds.md"
HEADING = (
    "| feature | where it is | the test that proves it | a command that shows it | missing |",
    "|---|---|---|---|---|",
)


def systems() -> list[dict[str, Any]]:
    """The systems with their features, as docs/seeds.yaml has them."""
    loaded: list[dict[str, Any]] = yaml.safe_load((FOLDER / "seeds.yaml").read_text("utf-8"))
    return loaded


def page() -> str:
    """The content of the page."""
    features = [feature for system in systems() for feature in system["features"]]
    partly = [feature for feature in features if feature.get("missing")]
    lines = [
        "# The systems that parplan stands on",
        "",
        "This page is generated: `python -m docs.seeds` writes it from `docs/seeds.yaml`, and a "
        "test compares the two.",
        "",
        f"Of {len(features)} features {len(features) - len(partly)} are whole. The last column "
        "says what is missing of the others.",
        *(line for system in systems() for line in _section(system)),
    ]
    return "\n".join(lines) + "\n"


def _section(system: dict[str, Any]) -> Iterator[str]:
    yield ""
    yield f"## {system['system']}"
    yield ""
    yield from HEADING
    for feature in system["features"]:
        code, test, command = (
            f"`{feature[key]}`" if feature[key] else "" for key in ("code", "test", "command")
        )
        yield (
            f"| {feature['id']} {feature['name']} | {code} | {test} | {command} "
            f"| {feature.get('missing', '')} |"
        )


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
