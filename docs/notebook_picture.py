"""Runs examples/planning.ipynb, and draws what its plan and its comparison show as a picture.

    python -m docs.notebook_picture

It needs the test tools and a Chromium.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs/images/notebook.png"
WIDTH = 900  # pixels


def shown() -> list[str]:
    """Returns the HTML of the records that the notebook shows, in their order."""
    notebook = nbformat.read(ROOT / "examples/planning.ipynb", as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        NotebookClient(notebook, resources={"metadata": {"path": folder}}).execute()
    outputs = (output for cell in notebook.cells for output in cell.get("outputs", ()))
    pages = (output.get("data", {}).get("text/html", "") for output in outputs)
    return [page for page in pages if 'class="parplan"' in page]


def main() -> None:
    plan, comparison, _ = shown()
    body = f'<body style="margin:12px;font:14px sans-serif">{plan}<hr>{comparison}</body>'
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        page = browser.new_page(viewport={"width": WIDTH, "height": 400})
        page.set_content(f"<!doctype html>{body}")
        page.screenshot(path=PICTURE, full_page=True)
        browser.close()


if __name__ == "__main__":
    main()
