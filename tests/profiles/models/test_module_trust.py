"""Plan files run code of the current folder and of packages, unless --trust-module is given."""

from __future__ import annotations

import ast
import dataclasses
import re
import sys
from pathlib import Path

import pytest

from parplan.executor.__main__ import run as run_executor
from parplan.planner.plan.plan_file import write_plan
from parplan.profiles.errors import ConfigError
from parplan.profiles.models.module_source import ModuleSource
from parplan.profiles.models.module_trust import (
    HERE,
    INSTALLED,
    STANDARD,
    origin_of,
    trusted_module_note,
)
from tests.helpers.command_runs import fail, run, succeed
from tests.helpers.external_modules import factory_plan
from tests.helpers.traced_plans import hand_plan

ROOT = Path(__file__).parents[3]


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Returns the current folder and one on the path; code of both says that it was imported."""
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    for place in (here, elsewhere):
        (place / "loose").mkdir(parents=True)
        (place / "loose" / f"of_{place.name}.py").write_text("raise SystemError('imported')\n")
        (place / f"{place.name}_models.py").write_text(
            "from pathlib import Path\nPath(__file__).with_name('touched').touch()\n"
        )
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "path", [str(here), str(elsewhere), *sys.path])
    yield here, elsewhere
    for name in ("here_models", "elsewhere_models"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("here_models", HERE),
        ("loose.of_here", HERE),
        ("numpy.linalg", INSTALLED),
        ("subprocess", STANDARD),
        ("json.decoder", STANDARD),
        ("os", STANDARD),
        ("sys", STANDARD),
        ("builtins", STANDARD),
        ("elsewhere_models", "neither"),
        ("loose.of_elsewhere", "neither"),
    ],
)
def test_a_name_is_found_where_its_import_would_begin_and_nothing_is_imported(name, place, folders):
    before = set(sys.modules)

    origin = origin_of(name)

    assert origin is not None
    assert origin.place == place
    assert set(sys.modules) == before


@pytest.mark.parametrize("name", ["nowhere", "nowhere.models", "loose", "loose.nothing"])
def test_what_is_not_there_is_left_to_the_import_which_says_so(name, folders):
    assert origin_of(name) is None


def test_a_package_that_is_installed_to_be_edited_is_installed(folders, monkeypatch):
    monkeypatch.setattr(
        "parplan.profiles.models.module_trust._editable_folders", lambda: iter([str(folders[1])])
    )

    assert origin_of("elsewhere_models").place == INSTALLED


@pytest.mark.parametrize(
    "factory",
    [
        "os:abort",
        "subprocess:getoutput",
        "os.path:getcwd",
        "builtins:breakpoint",
        "elsewhere_models:build",
        "loose.of_elsewhere:build",
    ],
)
def test_a_plan_of_code_from_elsewhere_is_refused_unless_it_is_trusted(factory, folders):
    source = ModuleSource(factory=factory)

    with pytest.raises(
        ConfigError,
        match=rf"plan\.yaml: module: {factory} is (in the standard library|outside of the current)",
    ) as error:
        trusted_module_note(source, "plan.yaml", trust=False)

    assert "--trust-module" in error.value.hint
    assert trusted_module_note(source, "plan.yaml", trust=True).startswith(
        f"plan.yaml runs code: {factory}, imported from "
    )


@pytest.mark.parametrize(
    "factory",
    [
        "package:attr.__class__",
        "package:a.b",
        "package:__import__",
        "package.__main__:f",
        "__main__:f",
        ".models:build",
        "..models:build",
        "a..b:c",
        "a.:b",
        "1a:b",
        "a:1b",
        "a b:c",
        "a:b()",
        "a:b\n",
        "a:",
        ":b",
        "a",
        "a/b:c",
        "a:b:c",
    ],
)
def test_what_is_no_name_of_a_function_in_a_module_is_refused(factory):
    with pytest.raises(ConfigError, match=r"it must be huggingface or package\.module:function"):
        ModuleSource(factory=factory)


@pytest.fixture(scope="module")
def plans():
    """Returns plans of a traced module and of a described model, both with code from elsewhere."""
    source = ModuleSource(factory="elsewhere_models:build")
    return (
        dataclasses.replace(hand_plan("tests.helpers.traced_modules:shares"), module=source),
        dataclasses.replace(factory_plan("small"), module=source),
    )


@pytest.fixture
def files(plans, folders):
    for plan, name in zip(plans, ("traced.yaml", "described.yaml"), strict=True):
        write_plan(plan, folders[0] / name)
    return folders[1] / "touched"


def test_commands_that_show_a_plan_import_nothing(files):
    for name in ("traced.yaml", "described.yaml"):
        succeed("show", name)
    succeed("trace", "described.yaml", "-o", "trace.json")
    run("trace", "traced.yaml")
    run("compare", "described.yaml")
    run("check", "traced.yaml")
    run("check", "described.yaml", "--execute")

    assert not files.exists()
    assert "elsewhere_models" not in sys.modules


@pytest.mark.parametrize("arguments", [("traced.yaml", "--execute"), ("described.yaml",)])
def test_a_check_refuses_code_from_elsewhere_and_says_what_it_runs_where_it_is_trusted(
    arguments, files
):
    message = fail(2, "check", *arguments)
    refused = not files.exists()
    trusted = run("check", *arguments, "--trust-module")

    assert (
        f"{arguments[0]}: module: elsewhere_models:build is outside of the current folder "
        "and of installed packages"
    ) in message
    assert refused
    assert trusted.stderr.startswith(
        f"note: {arguments[0]} runs code: elsewhere_models:build, imported from {files.parent}"
    )
    assert files.exists()


@pytest.mark.parametrize("name", ["traced.yaml", "described.yaml"])
def test_a_run_refuses_code_from_elsewhere_and_says_what_it_runs_where_it_is_trusted(
    name, files, monkeypatch, capsys
):
    monkeypatch.setattr(sys, "argv", ["executor", name])
    code, refused = run_executor(), not files.exists()
    message = capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["executor", name, "--trust-module"])
    run_executor()

    assert (code, refused) == (2, True)
    assert message.startswith(
        f"error: {name}: module: elsewhere_models:build is outside of the current folder"
    )
    assert (
        f"note: {name} runs code: elsewhere_models:build, imported from {files.parent}"
        in capsys.readouterr().err
    )
    assert files.exists()


SUSPICIOUS = re.compile(
    r"\b(pickle|marshal|shelve|dill|eval|exec|__import__|system|popen|shell|trust_remote_code|\w*load)"
    r"\b *[.(=]"
)


def _calls(tree: ast.AST) -> list[tuple[str, dict[str, object]]]:
    return [
        (
            ast.unparse(node.func),
            {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords},
        )
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
    ]


def test_nothing_that_ships_unpickles_evaluates_or_starts_a_shell():
    """SECURITY.md says so."""
    folders = ("executor", "planner", "costmodels", "profiles", "examples", "benchmarks")
    files = [
        *ROOT.glob("*.py"),
        *(path for folder in folders for path in (ROOT / folder).rglob("*.py")),
    ]
    wrong = []
    texts = {path: text for path in files if SUSPICIOUS.search(text := path.read_text())}
    for path, text in texts.items():
        for name, keywords in _calls(ast.parse(text)):
            unsafe = name in (
                "eval",
                "exec",
                "__import__",
                "os.system",
                "os.popen",
                "yaml.unsafe_load",
                "yaml.full_load",
            )
            unsafe |= name.startswith(("pickle.", "marshal.", "shelve.", "dill."))
            unsafe |= name == "torch.load" and keywords.get("weights_only") != "True"
            unsafe |= name == "np.load" and keywords.get("allow_pickle") != "False"
            unsafe |= name == "yaml.load" and "SafeLoader" not in keywords.get("Loader", "")
            unsafe |= "shell" in keywords or keywords.get("trust_remote_code") == "True"
            wrong += [f"{path.relative_to(ROOT)}: {name}"] if unsafe else []

    assert len(texts) > 10
    assert wrong == []
