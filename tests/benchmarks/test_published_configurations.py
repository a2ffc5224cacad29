"""A published configuration is priced, or listed with the reason why it is not."""

from __future__ import annotations

from benchmarks.launchers.published import Published, measured_steps, outcome
from tests.helpers.launcher_scripts import SCRIPT


def test_a_configuration_is_priced_beside_its_measurement(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/train.sh").write_text(SCRIPT)
    one = Published(repository="mine", path="train.sh", gpu="h100-80gb", gpus=128, measured="a-row")

    found = outcome(one, tmp_path, {"a-row": 1e9})

    assert found.refused == ""
    assert found.step_s is not None
    assert found.step_s > 0.0
    assert found.inside is False


def test_a_file_that_is_not_there_is_listed_with_the_reason(tmp_path):
    one = Published(repository="mine", path="gone.sh", gpu="h100-80gb", gpus=8)

    assert outcome(one, tmp_path, {}).refused.startswith("cannot read")


def test_a_measured_step_is_the_stated_or_the_derived_one(tmp_path):
    table = tmp_path / "steps.csv"
    table.write_text("id,step_time_s,derived_step_time_s\na,1.5,2\nb,,3\nc,,\n")

    assert measured_steps(table) == {"a": 1.5, "b": 3.0}
