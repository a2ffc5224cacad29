"""The example notebook: it is committed without outputs, and every cell of it runs."""

from __future__ import annotations

import json
import sys

import nbformat
import pytest
from nbclient import NotebookClient

from tests.helpers.documented import ROOT

NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_is_committed_without_outputs(path):
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]

    assert all(not cell["outputs"] for cell in cells if cell["cell_type"] == "code")
    assert all(cell["execution_count"] is None for cell in cells if cell["cell_type"] == "code")


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_every_cell_of_a_notebook_runs_and_its_records_show_themselves(path, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    notebook = nbformat.read(path, as_version=4)
    notebook.metadata.kernelspec = {"name": "python3", "display_name": sys.version}

    NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()

    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    pages = [output["data"].get("text/html", "") for output in outputs if "data" in output]
    assert sum('<div class="parplan">' in page for page in pages) == 3
    assert sum('class="dataframe"' in page for page in pages) == 3
    assert not any(output.get("name") == "stderr" for output in outputs)
