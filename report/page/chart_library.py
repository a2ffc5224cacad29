"""The libraries that draw a page: are they installed, and the one that the page holds."""

from __future__ import annotations

from parplan.profiles.errors import ConfigError

_GLOBALS = "window.vegaEmbed = vegaEmbed;"


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


def chart_library() -> str:
    """Returns the javascript of Vega, Vega-Lite and vega-embed, which the page holds.

    Its version of Vega-Lite is that of altair's charts.
    """
    import altair as alt
    import vl_convert

    release = ".".join(alt.SCHEMA_VERSION.lstrip("v").split(".")[:2])
    library: str = vl_convert.javascript_bundle(_GLOBALS, release)
    return library
