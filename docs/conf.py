"""The site of the documentation: what Sphinx needs to turn the Markdown pages into it.

    sphinx-build -W --keep-going -c docs . build/site

The source folder is the root, so that a link to README.md or to a file of the code is the same on
the site and on a code host. The navigation is read from the page `docs/index.md`: each of its
sections is a part, and each page that the section links to is an entry. A page that no section
links to fails the build, as do links and anchors without a target. The pages load nothing from the
network.
"""

from __future__ import annotations

import re
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[1]
HOME = "docs/index"
UNIT = re.compile(r"(?<=\d) (?=(?:%|s|ms|GiB|MiB|TiB|GB)(?!\w))")

project = "parplan"
author = "the parplan authors"
copyright = author
extensions = ["myst_parser"]
root_doc = HOME
source_suffix = {".md": "markdown"}
include_patterns = [
    "docs/**",
    "benchmarks/README.md",
    *sorted(p.name for p in ROOT.glob("*.md")),
]
highlight_language = "text"
smartquotes = False  # two dashes open an option
nitpicky = True

myst_heading_anchors = 4  # the fragments by which a code host links to headings
myst_links_external_new_tab = False

html_theme = "pydata_sphinx_theme"
html_title = "parplan"
html_static_path = ["theme/site.css"]
html_css_files = ["site.css"]
templates_path = ["theme"]
html_context = {"default_mode": "auto"}
html_additional_pages = {"index": "home.html"}
html_copy_source = False
html_show_sourcelink = False
html_show_search_summary = False  # it would read each page again, which a page from a file cannot
html_sidebars = {"**": ["sidebar-nav.html"]}
html_theme_options = {
    "navbar_center": [],
    "navbar_end": ["theme-switcher"],
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": ["theme-version"],
    "show_toc_level": 2,
    "logo": {"text": "parplan"},
}


def navigation(page: str) -> str:
    """The navigation of the site, from the sections of the home page and the pages they link to.

    A page stands where the first link to it stands, under the text of that link if this begins
    with a capital, else under its own title. Other links than those to pages are not entries.
    """
    parts = []
    listed: set[str] = set()
    for section in re.split(r"^## ", page, flags=re.MULTILINE)[1:]:
        title, _, text = section.partition("\n")
        entries = []
        for shown, target in re.findall(r"\[([^]]+)\]\(([^)#]+\.md)[^)]*\)", text.replace("`", "")):
            name = _document(target)
            if name not in listed:
                entries.append(f"{shown} <{name}>" if shown[0].isupper() else name)
                listed.add(name)
        if entries:
            head = ["```{toctree}", f":caption: {title}", ":hidden:", ""]
            parts.append("\n".join([*head, *entries, "```"]))
    return "\n\n".join(parts)


def _document(target: str) -> str:
    """The name of a page for Sphinx, from a link of the home page to it."""
    path = (ROOT / HOME).parent.joinpath(target).resolve()
    return f"/{path.relative_to(ROOT).with_suffix('')}"


def _add_navigation(app: Sphinx, name: str, source: list[str]) -> None:
    if name == HOME:
        source[0] += "\n\n" + navigation(source[0]) + "\n"


def _keep_units(app: Sphinx, document: nodes.document) -> None:
    """Keeps a number and its unit on one line, which narrow columns would part."""
    for text in list(document.findall(nodes.Text)):
        if not isinstance(text.parent, nodes.literal | nodes.literal_block):
            text.parent.replace(text, nodes.Text(UNIT.sub("\N{NO-BREAK SPACE}", text)))


def setup(app: Sphinx) -> None:
    app.connect("doctree-read", _keep_units)
    app.connect("source-read", _add_navigation)
