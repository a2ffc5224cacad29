"""A profile of one's own: the file."""

from __future__ import annotations

import pytest

from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.calibration_factors import Calibration, Factor
from parplan.profiles.machines.user_profile import (
    PROFILE_VERSION,
    ProfiledRun,
    UserProfile,
    profile_to_yaml,
    read_profile,
)

ODD = {
    "forward": 1.3,
    "backward": 0.7,
    "tensor": 5.0,
    "data": 3.0,
    "pipeline": 2.0,
    "optimizer": 4.0,
}


def calibration(**values: float) -> Calibration:
    return Calibration(
        stack="megatron-core",
        precision="bf16",
        **{
            cause: Factor(value=value, measured=True, source="run 0123")
            for cause, value in values.items()
        },
    )


PROFILE = UserProfile(
    profile_version=PROFILE_VERSION,
    fingerprint="0123456789abcdef",
    device="a100-80gb",
    calibration=calibration(**ODD),
    allocator_share=0.07,
    runs=(
        ProfiledRun(
            fingerprint="0123",
            date="2026-11-01",
            model="m",
            mesh="pp 1",
            measured_s=1.0,
            priced_s=2.0,
            calibrated_s=1.0,
        ),
    ),
)


def test_a_profile_comes_back_unchanged(tmp_path):
    (tmp_path / "mine.yaml").write_text(profile_to_yaml(PROFILE))

    assert read_profile(tmp_path / "mine.yaml") == PROFILE


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("a: [", r"mine.yaml:2: not YAML", id="not-yaml"),
        pytest.param(
            "name: x", "profile_version is missing, this parplan reads 2", id="a-cluster-file"
        ),
        pytest.param("- 1", "profile_version is missing", id="a-list"),
        pytest.param(
            profile_to_yaml(PROFILE).replace("profile_version: 2", "profile_version: 3"),
            "profile_version is 3",
            id="another-version",
        ),
        pytest.param(
            profile_to_yaml(PROFILE).replace("value: 5.0", "value: 0.0"),
            "a factor is 0.0, it must be a positive number",
            id="zero",
        ),
        pytest.param(
            profile_to_yaml(PROFILE).replace("tensor:", "tenser:"),
            "unknown key calibration.tenser",
            id="unknown-key",
        ),
    ],
)
def test_what_is_no_profile_is_refused(text, message, tmp_path):
    (tmp_path / "mine.yaml").write_text(text)

    with pytest.raises(ConfigError, match=message):
        read_profile(tmp_path / "mine.yaml")


def test_a_missing_profile_says_how_to_make_one(tmp_path):
    with pytest.raises(ConfigError, match="cannot read") as error:
        read_profile(tmp_path / "mine.yaml")

    assert (
        error.value.hint
        == "make one with: plan profile -o FILE, or of runs with: plan calibrate run.json -o FILE"
    )
