"""The installed package owns one name: a user's folders and files of any other name stay theirs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = pytest.mark.multiproc

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("commands", "configs", "costmodels", "executor", "planner", "profiles", "report")
NOT_SHIPPED = ("tests", "benchmarks", "docs", "examples")
DATA = (
    "report/page/page.*",
    "configs/*/*.yaml",
    "profiles/data/*.yaml",
    "profiles/data/*.csv",
    "parplan/py.typed",
)
SOURCES = ("parplan", *PACKAGES, "cli.py", "setup.cfg", "pyproject.toml", "README.md", "LICENSE")
# A module of the user's that runs on two ranks.
USERS_MODEL = """
import torch


class Classifier(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(64, 32)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(4))
        self.head = torch.nn.Linear(32, 64)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + torch.nn.functional.gelu(layer(x))
        return self.head(x)


def make():
    return Classifier()
"""
PYTHON_API = """
from configs.base import X
from parplan.commands.options.target_options import TargetOptions
from parplan.commands.requests.requests import request_of
from parplan.planner.search.find_plan import find_plan

print(X, find_plan(request_of(TargetOptions(model="gpt-tiny", gpus=2, gpu="cpu"))).mesh)
"""


@dataclass(frozen=True, slots=True)
class Installed:
    """An environment that holds the wheel; other packages are those of the tests' environment."""

    wheel: Path
    environment: Path

    @property
    def packages(self) -> Path:
        paths = {"base": str(self.environment), "platbase": str(self.environment)}
        return Path(sysconfig.get_path("purelib", scheme="venv", vars=paths))

    def run(self, *command: str, folder: Path) -> str:
        """Returns what a command of the environment prints in a folder; the command succeeds."""
        program = self.environment / "bin" / command[0]
        variables = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(
            [program, *command[1:]],
            capture_output=True,
            text=True,
            cwd=folder,
            env=variables,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr


def pip(*arguments: str | Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pip", *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """Returns the wheel of a copy of the clone in a new environment, made without network."""
    folder = tmp_path_factory.mktemp("installed")
    source = folder / "source"
    source.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(ROOT / name, source / name)
    pip("wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", folder, source)
    [wheel] = folder.glob("*.whl")
    result = Installed(wheel, folder / "environment")
    venv.create(result.environment, with_pip=False, symlinks=True)
    python = result.environment / "bin" / "python"
    pip("--python", python, "install", "--quiet", "--no-compile", "--no-deps", "--no-index", wheel)
    others = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (result.packages / "others.pth").write_text("\n".join(sorted(others)))
    return result


@pytest.fixture
def users_folder(tmp_path: Path) -> Path:
    """Returns a folder with packages and files named like the product's, none of them its own."""
    for name in PACKAGES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("")
    (tmp_path / "configs" / "base.py").write_text("X = 'the user'\n")
    (tmp_path / "cli.py").write_text("raise SystemError('the cli.py of the user')\n")
    (tmp_path / "my_model.py").write_text(USERS_MODEL)
    return tmp_path


@pytest.mark.slow
def test_the_wheel_holds_every_file_of_the_product_once_and_nothing_else(installed):
    names = zipfile.ZipFile(installed.wheel).namelist()
    code = [path for name in PACKAGES for path in (ROOT / name).rglob("*.py")]
    data = [path for pattern in DATA for path in ROOT.glob(pattern)]
    files = [path.relative_to(ROOT).as_posix() for path in (*code, *data, ROOT / "cli.py")]
    expected = {f"parplan/{file.removeprefix('parplan/')}" for file in files}

    shipped = [name for name in names if not name.startswith("parplan-0")]

    assert len(names) == len(set(names))
    assert set(shipped) == expected | {"parplan/__init__.py"}


@pytest.mark.slow
def test_nothing_but_parplan_can_be_imported(installed, tmp_path):
    names = [*PACKAGES, *NOT_SHIPPED, "cli", "parplan"]
    code = f"from importlib.util import find_spec as f; print([n for n in {names} if f(n)])"

    assert installed.run("python", "-c", code, folder=tmp_path).strip() == "['parplan']"
    top = {path.name for path in installed.packages.iterdir() if path.suffix != ".dist-info"}
    assert top == {"others.pth", "parplan"}


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(["plan"], id="plan"),
        pytest.param(["python", "-m", "parplan.cli"], id="module", marks=pytest.mark.slow),
    ],
)
def test_plan_works_in_a_folder_with_the_same_names(installed, users_folder, command):
    request = ["--model", "gpt-tiny", "--gpus", "2", "--gpu", "cpu"]

    printed = installed.run(*command, *request, folder=users_folder)

    assert "-m parplan.executor plan.yaml" in printed
    assert (users_folder / "plan.yaml").exists()


@pytest.mark.slow
def test_a_users_configs_win_beside_the_python_api(installed, users_folder):
    (users_folder / "search.py").write_text(PYTHON_API)

    assert installed.run("python", "search.py", folder=users_folder).startswith("the user ")


@pytest.mark.slow
def test_a_users_module_is_planned_and_trained_on_two_ranks(installed, users_folder):
    target = ["--model", "my_model:make", "--gpus", "2", "--gpu", "cpu", "--precision", "fp32"]
    batch = ["--seq-length", "16", "--global-batch-size", "4"]
    executor = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "parplan.executor"]

    planned = installed.run("plan", *target, *batch, folder=users_folder)
    trained = installed.run("python", *executor, "plan.yaml", "--steps", "1", folder=users_folder)

    assert "torchrun --nproc-per-node 2 -m parplan.executor plan.yaml" in planned
    assert f"imported from {users_folder / 'my_model.py'}" in trained
    assert (users_folder / "run.json").exists()
