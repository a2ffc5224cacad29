"""Galvatron's JSON says the ZeRO stage and the recompute of each block."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from parplan.costmodels.layers.recompute import Recompute
from parplan.planner.export.exported import export_plan
from parplan.planner.export.launcher_file import read_launcher_file
from parplan.planner.export.targets import TARGETS, target_named
from parplan.profiles.errors import ConfigError
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.stack import ContextForm
from tests.helpers.laid_out_plans import laid_out

EXACT = 1e-9  # share of a step
STACK = {"stack": "galvatron"}
# PKU-DAIR/Hetu-Galvatron at cea12ff, galvatron/models/gpt/configs/
# galvatron_config_llama2-7b_1nodes_8gpus_per_node_36GB_bf16.json
PUBLISHED = {
    "pp_deg": 1,
    "tp_sizes_enc": ",".join(["1"] * 32),
    "tp_consecutive_flags": ",".join(["1"] * 32),
    "dp_types_enc": ",".join(["1"] * 32),
    "use_sp": ",".join(["0"] * 32),
    "checkpoint": ",".join(["1"] * 20 + ["0"] * 12),
    "global_bsz": 16,
    "chunks": 1,
    "pp_division": "32",
    "pipeline_type": "pipedream_flush",
    "default_dp_type": "zero2",
    "vtp": 2,
    "vsp": 1,
    "embed_sdp": 1,
}


def block_plan(plan):
    return next(each for each in plan.layer_plans.values() if each.layer == "block")


def mixed():
    """A plan with ZeRO 3 on the first of its blocks and full recompute on the last."""
    plan = laid_out(dp=4, zero=2, **STACK)
    again = block_plan(laid_out(dp=4, zero=2, recompute=Recompute.FULL, **STACK)).recompute
    (_name,) = (name for name, each in plan.layer_plans.items() if each.layer == "block")
    head, body, tail = plan.stages[0].layers
    own = block_plan(plan)
    runs = (
        head,
        replace(body, last=body.first, plan="Z"),
        replace(body, first=body.first + 1, last=body.last - 1),
        replace(body, first=body.last, plan="R"),
        tail,
    )
    layer_plans = {
        **plan.layer_plans,
        "Z": replace(own, zero=3),
        "R": replace(own, recompute=again),
    }
    return replace(plan, layer_plans=layer_plans, stages=(replace(plan.stages[0], layers=runs),))


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(mixed, id="unlike-blocks"),
        pytest.param(lambda: laid_out(pp=2, dp=2, tp=4, zero=2, **STACK), id="three-axes"),
        pytest.param(
            lambda: laid_out(
                "llama3-8b",
                dp=2,
                cp=4,
                context_form=ContextForm.ALL_TO_ALL,
                seq_length=8192,
                zero=3,
                **STACK,
            ),
            id="exchanged-sequences",
        ),
    ],
)
def test_galvatron_says_all_of_such_a_plan(plan):
    one = export_plan(plan(), target_named("galvatron"), "plan.yaml")

    assert one.losses == ()
    assert one.configured.price.step_s == pytest.approx(one.plan.price.step_s, rel=EXACT)
    assert one.configured.peak_bytes == pytest.approx(one.plan.peak_bytes, rel=EXACT)


def read(tmp_path, **changes):
    path = tmp_path / "galvatron.json"
    path.write_text(json.dumps(PUBLISHED | changes))
    file = read_launcher_file(path, TARGETS).with_stated({"--seq-length": 2048})
    return file, file.settings(load_model("llama2-7b").spec, 8)


def test_a_published_strategy_is_read(tmp_path):
    file, settings = read(tmp_path)

    assert (settings.dp, settings.tp, settings.zero, settings.micro_batch_size) == (8, 1, 3, 2)
    assert settings.recompute_of_blocks == (Recompute.FULL,) * 20 + (Recompute.NONE,) * 12
    assert list(file.not_understood) == ["vtp, which the prices take from tp_sizes_enc"]


def test_blocks_of_unlike_degrees_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"tp_sizes_enc .*: blocks of unlike degrees"):
        read(tmp_path, tp_sizes_enc=",".join(["2"] * 16 + ["1"] * 16))


def test_a_strategy_of_another_model_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="dp_types_enc has 30 blocks, the model has 32"):
        read(tmp_path, dp_types_enc=",".join(["1"] * 29 + ["0"]))


@pytest.mark.parametrize(
    ("override", "refused"), [("train.lr=1e-4", ""), ("parallel.use_ulysses=true", "parallelism")]
)
def test_an_override_is_harmless_by_its_table_or_refused_by_its_name(override, refused, tmp_path):
    (tmp_path / "galvatron.json").write_text(json.dumps(PUBLISHED | {"vtp": 1}))
    path = tmp_path / "galvatron.sh"
    path.write_text(
        "torchrun train_dist.py train_dist.yaml "
        f"runtime.parallel.galvatron_config_path=./galvatron.json runtime.{override}\n"
    )

    if refused:
        with pytest.raises(ConfigError, match=f"use_ulysses true: galvatron's .* about {refused}"):
            read_launcher_file(path, TARGETS)
    else:
        assert read_launcher_file(path, TARGETS).not_understood == ()
