"""The house rules that imports can break: direction, and the places of third-party packages."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# each may import itself and those before it
LAYERS = (
    "profiles",
    "costmodels",
    "planner",
    "cli_style",
    "executor",
    "cli_options",
    "cli_output",
    "cli_largest",
    "cli_profile",
    "cli_module",
    "cli_run",
    "cli_show",
    "cli",
)
# of the planner: the plan, the account of a run, and reports
EXECUTOR_USES = ("parplan.planner.plan.", "parplan.planner.runs.", "parplan.report.")
ALLOWED = {  # package -> where it may be named: a file, or a folder with its slash
    "torch": (
        "executor/",
        "commands/traced_module.py",
        "commands/profile.py",
        "commands/run_commands.py",
        "profiles/tracing/",
        "profiles/profile_comm.py",
        "profiles/profiler/",
    ),
    "click": (
        "cli.py",
        "commands/largest.py",
        "commands/traced_module.py",
        "commands/common_options.py",
        "commands/output.py",
        "commands/profile.py",
        "commands/run_commands.py",
        "commands/show.py",
        "commands/style.py",
        "executor/__main__.py",
        "profiles/profile_comm.py",
    ),
    "yaml": (
        "profiles/documents/reader.py",
        "profiles/machines/user_profile.py",
        "profiles/build/__main__.py",
        "profiles/profiler/communication/comm_file.py",
        "planner/plan/plan_file.py",
        "planner/validation/term_fit.py",
    ),
    "pydantic": ("profiles/",),
    "transformers": (
        "executor/external/external_source.py",
        "profiles/tracing/",
        "executor/data/tokens.py",
    ),
    "matplotlib": (
        "report/plots/scatter_plot.py",
        "report/plots/chunk_plot.py",
        "report/plots/front_plot.py",
        "report/plots/profile_plot.py",
    ),
}


def modules() -> list[Path]:
    return sorted(
        path.relative_to(ROOT)
        for layer in LAYERS
        for path in (ROOT / f"{layer}.py", *(ROOT / layer).rglob("*.py"))
        if path.exists()
    )


@cache
def imports(path: Path) -> tuple[str, ...]:
    """Returns every module that a file imports, at its top or inside a function.

    `from a import b` counts as a.b; relative imports are resolved.
    """
    return tuple(_imports(path))


def _imports(path: Path) -> Iterator[str]:
    package = path.parent.parts
    for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            start = ".".join(part for part in (base, node.module) if part)
            yield from (f"{start}.{alias.name}" for alias in node.names)


def layer_of(name: str) -> int | None:
    top = name.split(".")[0].removesuffix(".py")
    return LAYERS.index(top) if top in LAYERS else None


@pytest.mark.parametrize("path", modules(), ids=str)
def test_imports_go_down_only(path):
    importing = layer_of(path.parts[0])
    assert importing is not None
    for name in imports(path):
        layer = layer_of(name)
        assert layer is None or layer <= importing, f"{path} imports {name}: upward"
        if LAYERS[importing] == "executor" and layer == LAYERS.index("planner"):
            assert f"{name}.".startswith(EXECUTOR_USES), (
                f"{path} imports {name}: of the planner only {', '.join(EXECUTOR_USES)}"
            )


@pytest.mark.parametrize("package", list(ALLOWED))
def test_a_third_party_package_is_named_only_in_its_place(package):
    places = ALLOWED[package]
    users = [
        path.as_posix()
        for path in modules()
        if package in {name.split(".")[0] for name in imports(path)}
    ]
    strangers = [
        user
        for user in users
        if not any(
            user == place or (place.endswith("/") and user.startswith(place)) for place in places
        )
    ]

    assert strangers == []


def test_the_milp_library_is_named_in_one_planner_module():
    users = [
        path.as_posix()
        for path in modules()
        if {"pulp", "highspy"} & {name.split(".")[0] for name in imports(path)}
    ]

    assert len(users) <= 1
    assert all(user.startswith("planner/") for user in users)


def test_nothing_imports_the_tests_the_benchmarks_or_the_examples():
    for path in modules():
        assert not {name.split(".")[0] for name in imports(path)} & {
            "tests",
            "benchmarks",
            "examples",
            "docs",
        }, path


def run_cli(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs the command line in a fresh interpreter, which lists loaded heavy modules on stderr."""
    code = (
        "import sys\n"
        "from parplan.cli import main\n"
        f"main({arguments!r}, standalone_mode=False)\n"
        "heavy = {'torch', 'transformers', 'matplotlib'} & set(sys.modules)\n"
        "print('loaded:', sorted(heavy), file=sys.stderr)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(["--help"], id="help"),
        pytest.param(
            ["--model", "gpt-tiny", "--gpus", "2", "--gpu", "cpu"], id="planning-a-named-model"
        ),
    ],
)
def test_torch_is_never_imported_for(arguments, tmp_path):
    done = run_cli(arguments, tmp_path)

    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == "loaded: []"
