"""The libraries that draw a page: are they installed, and the one that the page holds."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

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

    It takes a second to put together, which a process of its own spends meanwhile. Its version of
    Vega-Lite is that of altair's charts.
    """
    import altair as alt

    release = ".".join(alt.SCHEMA_VERSION.lstrip("v").split(".")[:2])
    with subprocess.Popen(
        [sys.executable, "-P", "-c", _PROGRAM, _GLOBALS, release],
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        try:
            yield lambda: _output(process)
        finally:
            process.kill()


def _output(process: subprocess.Popen[bytes]) -> str:
    library, _ = process.communicate()
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, process.args)
    return library.decode("utf-8")
