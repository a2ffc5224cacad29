"""The libraries that draw a page: are they installed, and the one that the page holds."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path

from parplan.profiles.documents.files import write_text
from parplan.profiles.errors import ConfigError

_GLOBALS = "window.vegaEmbed = vegaEmbed;"
_PROGRAM = """
import sys, vl_convert

sys.stdout.buffer.write(vl_convert.javascript_bundle(sys.argv[1], sys.argv[2]).encode("utf-8"))
"""


def require_page_libraries() -> None:
    """Raises ConfigError where a library that draws the page is not installed."""
    try:
        import altair  # noqa: F401
        import jinja2  # noqa: F401
        import vl_convert  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"plan report needs {error.name}, which is not installed",
            hint="pip install 'parplan[report]'",
        ) from None


@contextmanager
def chart_library() -> Iterator[Callable[[], str]]:
    """Yields a function that returns the javascript of Vega, Vega-Lite and vega-embed.

    It takes a second to put together, which a process of its own spends meanwhile, once for each
    version: the user's cache folder keeps it. Its version of Vega-Lite is that of altair's charts.
    """
    import altair as alt

    release = ".".join(alt.SCHEMA_VERSION.lstrip("v").split(".")[:2])
    cached = cache_folder() / f"charts-{version('vl-convert-python')}-{release}.js"
    library = _kept(cached)
    if library is not None:
        yield lambda: library
        return
    with subprocess.Popen(
        [sys.executable, "-P", "-c", _PROGRAM, _GLOBALS, release],
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        try:
            yield lambda: _output(process, cached)
        finally:
            process.kill()


def cache_folder() -> Path:
    """Returns the user's folder of files that can be made again.

    Source of the rule: XDG Base Directory Specification 0.8, which ignores a relative path.
    """
    stated = Path(os.environ.get("XDG_CACHE_HOME", ""))
    folder = stated if stated.is_absolute() else Path(os.path.expanduser("~/.cache"))
    return folder / "parplan"


def _kept(cached: Path) -> str | None:
    """Returns the text of a file in the cache, None where there is none that can be read."""
    with suppress(OSError, UnicodeDecodeError):  # it is made again
        return cached.read_text(encoding="utf-8") or None
    return None


def _keep(library: str, cached: Path) -> None:
    """Writes a file of the cache where that is possible: without it a page takes longer."""
    if cached.is_absolute():  # there is no home otherwise
        with suppress(OSError, ConfigError):
            cached.parent.mkdir(parents=True, exist_ok=True)
            write_text(library, cached, hint="set XDG_CACHE_HOME")


def _output(process: subprocess.Popen[bytes], cached: Path) -> str:
    """Returns the library that a process prints, and keeps it in a file where one can be made."""
    printed, _ = process.communicate()
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, process.args)
    library = printed.decode("utf-8")
    _keep(library, cached)
    return library
