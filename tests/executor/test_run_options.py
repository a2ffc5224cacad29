from __future__ import annotations

import pytest

from parplan.executor.run_options import LearningRateSchedule, Options
from parplan.profiles.errors import ConfigError


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        pytest.param({"steps": 0}, "--steps is 0, it must be at least 1", id="steps"),
        pytest.param(
            {"warmup_steps": -1}, "--warmup-steps is -1, it must be at least 0", id="warm-up"
        ),
        pytest.param(
            {"weight_decay": -0.1}, "--weight-decay is -0.1, it must be at least 0", id="decay"
        ),
        pytest.param(
            {"clip_gradients": float("nan")},
            "--clip-gradients is nan, it must be at least 0",
            id="clipping",
        ),
        pytest.param(
            {"learning_rate": 0.0}, "--learning-rate is 0, it must be positive", id="no-rate"
        ),
        pytest.param(
            {"learning_rate": float("inf")},
            "--learning-rate is inf, it must be positive",
            id="infinite-rate",
        ),
        pytest.param({"betas": (0.9, 1.0)}, r"--betas has 1, both must be in \[0, 1\)", id="betas"),
        pytest.param(
            {"min_learning_rate": 1.0, "lr_schedule": "cosine"},
            "--min-learning-rate 1 is above --learning-rate 0.0003",
            id="least",
        ),
        pytest.param(
            {"min_learning_rate": 1e-5},
            "the rate never falls to it",
            id="a-least-rate-of-a-constant",
        ),
        pytest.param(
            {"lr_schedule": "cosin"}, "unknown lr_schedule 'cosin' in --lr-schedule", id="schedule"
        ),
    ],
)
def test_a_wrong_value_is_an_error_that_names_the_option(wrong, message):
    with pytest.raises(ConfigError, match=message):
        Options(**wrong)


def test_a_schedule_may_be_named_by_a_string():
    assert Options(lr_schedule="cosine").lr_schedule is LearningRateSchedule.COSINE
