"""The house rules that imports and names can break, read from every file of the product."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# Each layer may import those before it. Packages of one layer do not import each other.
LAYERS = (
    ("configs",),
    ("profiles",),
    ("costmodels",),
    ("planner",),
    ("executor", "report"),
    ("commands",),
    ("cli",),
)
LAYER_OF = {package: number for number, layer in enumerate(LAYERS) for package in layer}
# The entry point of `python -m parplan.executor` lies below the command that it starts.
ENTRY_POINT = ("executor/__main__.py", "parplan.commands.train")
EXECUTOR_USES = ("parplan.planner.plan.", "parplan.planner.runs.")
CLASS = re.compile(r"^ *class (\w+)[:(]", re.MULTILINE)
# Finds sentences of docstrings too: a file that has one is parsed.
IMPORT_OF_A_FOLDER = re.compile(rf"^ *(?:from|import) +(?:{'|'.join(LAYER_OF)})\b", re.MULTILINE)
NOT_PRODUCT = ("tests", "benchmarks", "examples", "docs")
ALLOWED = {  # package -> the files, or folders with their slash, that may import it
    "altair": ("report/page/",),
    "click": ("commands/", "profiles/profile_comm.py"),
    "highspy": ("planner/solver.py",),
    "jinja2": ("report/page/",),
    "markupsafe": ("report/page/",),
    "matplotlib": ("report/plots/",),
    "networkx": ("profiles/models/",),
    "pandas": ("report/notebook/",),
    "peft": ("profiles/tracing/partly_trained.py",),
    "pulp": ("planner/solver.py",),
    "pydantic": ("profiles/",),
    "rich": ("commands/output.py", "report/"),
    "torch": (
        "commands/check.py",
        "commands/profile.py",
        "commands/user_modules.py",
        "configs/launchers/",
        "executor/",
        "profiles/profile_comm.py",
        "profiles/profiler/",
        "profiles/tracing/",
    ),
    "transformers": (
        "executor/data/tokens.py",
        "executor/external/external_source.py",
        "profiles/tracing/",
    ),
    "uniplot": ("report/searches/drawn_points.py",),
    "vl_convert": ("report/page/",),
    "yaml": (
        "configs/launchers/",
        "planner/plan/plan_file.py",
        "planner/validation/term_fit.py",
        "profiles/build/__main__.py",
        "profiles/documents/reader.py",
        "profiles/documents/yaml_text.py",
        "profiles/inventory/cluster_draft.py",
        "profiles/machines/user_profile.py",
        "profiles/profiler/communication/comm_file.py",
    ),
}
# A command and the module or room beside it that does its work.
SAME_NAMES = {
    "estimate": ("commands/estimate.py", "planner/search/estimate.py"),
    "plan": ("commands/plan.py", "planner/plan/plan.py"),
    "schema": ("commands/schema.py", "profiles/documents/schema.py"),
    "trace": ("commands/trace.py", "profiles/tracing/trace.py"),
    "train": ("commands/train.py", "executor/training/train.py"),
}


@cache
def product_files() -> tuple[str, ...]:
    folders = (path for package in LAYER_OF for path in (ROOT / package).rglob("*.py"))
    return tuple(sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "cli.py", *folders)))


@cache
def files_at_once() -> frozenset[str]:
    """Returns the files of the product to look one up among."""
    return frozenset(product_files())


def text_of(file: str) -> str:
    return (ROOT / file).read_text(encoding="utf-8")


@cache
def imports(file: str) -> tuple[str, ...]:
    """Returns every name that a file imports, at its top, inside functions and for types only.

    `from a import b` is `a.b`; relative imports are resolved.
    """
    return tuple(_imports(file))


def _imports(file: str) -> Iterator[str]:
    package = ("parplan", *Path(file).parent.parts)
    for node in ast.walk(ast.parse(text_of(file))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            start = ".".join(part for part in (base, node.module) if part)
            yield from (f"{start}.{alias.name}" for alias in node.names)


@cache
def imported_files(file: str) -> set[str]:
    """Returns the files of the product that a file imports, itself and the entry point left out."""
    names = (name for name in imports(file) if (file, module_of(name)) != ENTRY_POINT)
    targets = {file_of(name.split(".")) for name in names if name.startswith("parplan.")}
    return targets - {None, file}


def module_of(name: str) -> str:
    return name.rpartition(".")[0]


def file_of(parts: list[str]) -> str | None:
    """Returns the file of the longest part of a dotted name that is a module or a package."""
    files = files_at_once()
    for end in range(len(parts), 1, -1):
        path = "/".join(parts[1:end])
        for file in (f"{path}.py", f"{path}/__init__.py"):
            if file in files:
                return file
    return None


def cycles(folder: str) -> list[str]:
    """Returns a cycle among the files and sub-folders of a folder as its parts in order, or []."""
    prefix = f"{folder}/" if folder else ""
    uses = defaultdict(set)
    for file in product_files():
        for target in imported_files(file) if file.startswith(prefix) else ():
            if target.startswith(prefix):
                uses[file[len(prefix) :].split("/")[0]].add(target[len(prefix) :].split("/")[0])
    graph = {user: used - {user, "__init__.py"} for user, used in uses.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return [f"{prefix}{part}" for part in error.args[1]]
    return []


def strangers(users: Iterable[str], places: tuple[str, ...]) -> list[str]:
    """Returns the users that are none of the places and lie in none of them."""
    folders = tuple(place for place in places if place.endswith("/"))
    return [user for user in users if user not in places and not user.startswith(folders or ("/",))]


def layer_of(name: str) -> int | None:
    """Returns the layer of a name of the product, None for any other name."""
    parts = name.split(".")
    return LAYER_OF.get(parts[1]) if parts[0] == "parplan" and len(parts) > 1 else None


def test_packages_import_downwards_only():
    offences = []
    for file in product_files():
        package = file.removesuffix(".py").split("/")[0]
        for name in imports(file):
            layer = layer_of(name)
            inside = name.startswith(f"parplan.{package}.") or name == f"parplan.{package}"
            below = layer is None or layer < LAYER_OF[package]
            if not inside and not below and (file, module_of(name)) != ENTRY_POINT:
                offences.append(f"{file} imports {name}")

    assert offences == []


def test_the_executors_entry_point_imports_only_the_command_that_it_starts():
    file, module = ENTRY_POINT

    assert {module_of(name) for name in imports(file) if name.startswith("parplan")} == {module}


def test_no_folder_or_file_imports_one_that_imports_it_at_any_level():
    folders = {parent.as_posix() for file in product_files() for parent in Path(file).parents}

    found = {folder: cycles("" if folder == "." else folder) for folder in sorted(folders)}

    assert {folder: cycle for folder, cycle in found.items() if cycle} == {}


def test_no_package_imports_its_parts_when_it_is_imported():
    packages = [file for file in product_files() if file.endswith("__init__.py")]

    assert [file for file in packages if imports(file)] == []


def test_the_executor_knows_the_planner_by_its_plans_and_runs_only():
    offences = [
        f"{file} imports {name}"
        for file in product_files()
        if file.startswith("executor/")
        for name in imports(file)
        if name.startswith("parplan.planner") and not name.startswith(EXECUTOR_USES)
    ]

    assert offences == []


@pytest.mark.parametrize("package", ALLOWED)
def test_a_third_party_package_is_imported_only_in_its_place(package):
    users = [
        file
        for file in product_files()
        if package in {name.split(".")[0] for name in imports(file)}
    ]

    assert strangers(users, ALLOWED[package]) == []


def test_no_other_third_party_package_is_imported_but_numpy():
    known = {*ALLOWED, *sys.stdlib_module_names, "parplan", "numpy", "pydantic_core", "_typeshed"}
    named = {name.split(".")[0] for file in product_files() for name in imports(file)}
    beside = {Path(file).stem for file in product_files() if file.startswith("configs/launchers/")}

    assert named - known - beside == set()


def test_nothing_is_imported_by_another_name_than_parplan():
    """A folder of the repository that is imported by its own name is another one once installed."""
    users = [
        path.relative_to(ROOT).as_posix()
        for folder in (*LAYER_OF, *NOT_PRODUCT)
        for path in (ROOT / f"{folder}.py", *(ROOT / folder).rglob("*.py"))
        if path.exists() and IMPORT_OF_A_FOLDER.search(path.read_text(encoding="utf-8"))
    ]

    offences = [
        f"{file} imports {name}"
        for file in users
        for name in imports(file)
        if name.split(".")[0] in LAYER_OF
    ]

    assert offences == []


def test_nothing_imports_the_tests_the_benchmarks_the_examples_or_the_docs():
    offences = [
        f"{file} imports {name}"
        for file in product_files()
        for name in imports(file)
        if name.split(".")[0] in NOT_PRODUCT
    ]

    assert offences == []


def test_a_file_name_stands_for_one_thing():
    files = defaultdict(list)
    for file in product_files():
        files[Path(file).stem].append(file)

    repeated = {
        stem: tuple(same)
        for stem, same in files.items()
        if len(same) > 1 and stem not in ("__init__", "__main__")
    }

    assert repeated == SAME_NAMES


def test_a_class_name_stands_for_one_thing():
    files = defaultdict(list)
    for file in product_files():
        for name in CLASS.findall(text_of(file)):
            files[name].append(file)

    assert {name: same for name, same in files.items() if len(same) > 1} == {}


def run_cli(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs the command line in a new interpreter; stderr's last line lists heavy modules."""
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
