"""Numbers and sizes of launchers' files that no run has are errors with their line."""

from __future__ import annotations

import pytest

from parplan.commands.launcher_plans import launcher_file
from parplan.planner.export.launcher_file import MAX_CHARACTERS, read_launcher_file
from parplan.planner.export.targets import TARGETS
from parplan.profiles.errors import ConfigError
from tests.helpers.launcher_scripts import SCRIPT


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("--num-layers 80", "--num-layers 1000000000", "it must be from 1 to 4,096"),
        ("--num-layers 80", "--num-layers \u00b2", "\u00b2 is no number"),
        ("--num-layers 80", f"--num-layers {'9' * 5000}", "9999.* is no number"),
        ("--num-layers 80", "--num-layers 8 8", "one number is needed"),
        ("--hidden-size 8192", "--hidden-size nan", "nan is no number"),
        ("--hidden-size 8192", "--hidden-size 1e999", "1e999 is no number"),
    ],
)
def test_a_number_of_a_model_is_in_the_range_of_its_quantity(tmp_path, old, new, message):
    path = tmp_path / "run.sh"
    path.write_text(SCRIPT.replace(old, new))

    with pytest.raises(ConfigError, match=rf"run\.sh:4: --[a-z-]+ .*{message}"):
        read_launcher_file(path, TARGETS).model()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("--micro-batch-size 1 ", "--micro-batch-size 0 ", "it must be from 1 to"),
        ("--seq-length 4096", "--seq-length 0", "it must be from 1 to"),
        ("--pipeline-model-parallel-size 8", "--pipeline-model-parallel-size 0", "it must be from"),
        ("-parallel-size 8 ", "-parallel-size 8 --context-parallel-size 0 ", "it must be from 1"),
        (
            "--pipeline-model-parallel-size 8",
            "--pipeline-model-parallel-size 8 --pipeline-model-parallel-layout 'Et*99999999|L'",
            "has more than 20,000 letters",
        ),
    ],
)
def test_a_number_of_a_layout_is_in_the_range_of_its_quantity(tmp_path, old, new, message):
    path = tmp_path / "run.sh"
    path.write_text(SCRIPT.replace(old, new))
    file = read_launcher_file(path, TARGETS)

    with pytest.raises(ConfigError, match=message):
        file.settings(file.model(), 128)


def test_the_options_to_read_a_file_back_with_are_numbers(tmp_path):
    path = tmp_path / "run.sh"
    path.write_text(f"# read back with --gpus x --gpus-per-node 8\n{SCRIPT}")

    with pytest.raises(ConfigError, match="--gpus is 'x', needed is a whole number from 1"):
        _ = read_launcher_file(path, TARGETS).num_gpus


def test_processes_that_are_no_numbers_are_not_counted(tmp_path):
    path = tmp_path / "run.sh"
    path.write_text(SCRIPT.replace("--nnodes 16", "--nnodes \u00b2"))

    assert read_launcher_file(path, TARGETS).num_gpus is None


def test_a_script_of_megabytes_is_refused_and_so_large_a_document_is_no_launchers(tmp_path):
    script, document = tmp_path / "run.sh", tmp_path / "run.yaml"
    script.write_text(SCRIPT + "x" * MAX_CHARACTERS)
    document.write_text("a: 1\n" * (MAX_CHARACTERS // 4))

    with pytest.raises(ConfigError, match="characters, at most 524,288 are read as a script"):
        launcher_file(script)
    assert launcher_file(document) is None
