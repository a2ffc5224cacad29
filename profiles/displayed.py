"""Records that a notebook shows.

How they look is said by a room above the records, so they do not import it: the package `parplan`,
which knows all rooms, names it here when it is imported.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any, ClassVar


class Displayed:
    """A record with an HTML form and a table.

    views   the module whose `html_of` and `frame_of` make them
    """

    __slots__ = ()
    views: ClassVar[str] = ""

    def _repr_html_(self) -> str:
        """Returns what a notebook shows: one piece of HTML, in the colours of the notebook."""
        return str(_views().html_of(self))

    def to_pandas(self) -> Any:
        """Returns the record as a `pandas.DataFrame`, with units in the names of its columns.

        Raises ConfigError where pandas is not installed.
        """
        return _views().frame_of(self)


def _views() -> ModuleType:
    return import_module(Displayed.views)
