"""Plan files are read back equal, equal plans write equal bytes, broken files say where and why."""

from __future__ import annotations

import os
import re
from dataclasses import replace

import pytest
import yaml

from parplan.planner.objective import Objective
from parplan.planner.plan.plan import Plan
from parplan.planner.plan.plan_file import plan_to_yaml, read_plan, write_plan
from parplan.planner.plan.prediction import Band, ErrorBand
from parplan.profiles.errors import ConfigError
from parplan.profiles.models.documents import Documents
from parplan.profiles.stack import NEUTRAL, AvailableKernel, Stack
from parplan.report.plan_documents import plan_document, plan_schema
from tests.helpers.cases import mostly_slow
from tests.helpers.instances import PINS, random_instance
from tests.helpers.planning import find_plan

SEEDS = mostly_slow((0, 1, 5, 8), {5})


def plan_of(seed: int, objective: Objective = Objective.THROUGHPUT) -> Plan:
    instance = random_instance(seed)
    return find_plan(
        instance.model, instance.cluster, instance.training, objective, constraints=PINS
    )


@pytest.fixture(scope="module")
def plan() -> Plan:
    plans = map(plan_of, range(20))
    return next(
        plan for plan in plans if plan.mesh.tp > 1 and len(plan.stages[0].layers) > 1
    )  # placements, and blocks in stage 0


@pytest.mark.parametrize("objective", list(Objective))
@pytest.mark.parametrize("seed", SEEDS)
def test_a_plan_is_read_back_equal_and_written_with_the_same_bytes(seed, objective, tmp_path):
    plan, path = plan_of(seed, objective), tmp_path / "plan.yaml"

    write_plan(plan, path)

    assert read_plan(path) == plan
    assert (
        plan_to_yaml(read_plan(path)) == path.read_text() == plan_to_yaml(plan_of(seed, objective))
    )
    assert path.read_text().isascii()


@pytest.mark.slow
@pytest.mark.parametrize(
    "documents",
    [Documents(mean=20.5), Documents(lengths=((7, 2), (64, 0.5)))],
    ids=["mean", "lengths"],
)
def test_the_lengths_of_documents_are_in_the_file_where_there_are_any(documents, plan, tmp_path):
    packed = replace(plan, training=replace(plan.training, documents=documents))
    path = tmp_path / "plan.yaml"

    write_plan(packed, path)

    assert read_plan(path) == packed
    assert "\n  documents:" not in plan_to_yaml(plan)


def test_a_document_beyond_the_sequence_is_an_error_of_the_file(plan, tmp_path):
    body = yaml.safe_load(plan_to_yaml(plan))
    body["training"]["documents"] = {"lengths": [[9, 1], [9999, 1]]}
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump(body))

    with pytest.raises(ConfigError, match=r"plan.yaml: training: a document has 9,999 tokens"):
        read_plan(path)


def test_the_file_holds_no_dates_paths_or_durations_of_the_search(plan):
    assert not re.search(r"20\d\d-\d\d-\d\d|/home/|/tmp/|elapsed", plan_to_yaml(plan))


def broken(plan, path, change):
    body = yaml.safe_load(plan_to_yaml(plan))
    change(body)
    path.write_text(yaml.safe_dump(body, sort_keys=False))
    return path


def put(*keys_and_value):
    *keys, last, value = keys_and_value

    def change(body):
        for key in keys:
            body = body[key]
        if value is None:
            del body[last]
        else:
            body[last] = value

    return change


@pytest.mark.parametrize(
    ("change", "message", "hint"),
    [
        pytest.param(put("meshh", {}), "unknown key meshh", "did you mean 'mesh'?", id="top-level"),
        pytest.param(
            put("pipeline", "micro_batchsize", 1),
            "unknown key pipeline.micro_batchsize",
            "did you mean 'micro_batch_size'?",
            id="nested",
        ),
        pytest.param(
            put("layer_plans", "A", "zeroo", 1),
            "unknown key layer_plans.A.zeroo",
            "did you mean 'zero'?",
            id="in-a-mapping",
        ),
        pytest.param(
            put("stages", 0, "layers", 1, "frist", 1),
            "unknown key stages.0.layers.1.frist",
            "did you mean 'first'?",
            id="in-lists",
        ),
        pytest.param(
            put("cluster", "device", "memory_gb", 1),
            "cluster: unknown key device.memory_gb",
            "did you mean 'memory_gib'?",
            id="cluster",
        ),
        pytest.param(put("mesh", None), "mesh is missing", "add mesh", id="missing"),
        pytest.param(
            put("cluster", None), "cluster is missing", "add cluster", id="missing-cluster"
        ),
        pytest.param(
            put("mesh", "pp", "two"),
            "mesh.pp: .*valid integer.*'two'",
            "correct that value",
            id="type",
        ),
        pytest.param(
            put("predicted", "mfu", 0.5),
            "predicted.mfu must be a mapping, found a number",
            "correct that value",
            id="number-without-kind",
        ),
        pytest.param(
            put("pipeline", "schedule", "1f1bb"),
            "pipeline.schedule: .*'gpipe', '1f1b', .*'scp', 'zbv', 'dualpipev' or 'custom'",
            "correct that value",
            id="choice",
        ),
        pytest.param(
            put("layer_plans", "A", "zero", 7),
            "zero is 7, it must be 0, 1, 2 or 3",
            None,
            id="range",
        ),
        pytest.param(
            put("plan_version", 3),
            "plan_version is 3, this parplan reads 1 and 2",
            "make the plan again with this version",
            id="version",
        ),
        pytest.param(
            put("plan_version", None),
            "plan_version is missing, this parplan reads 1 and 2",
            "make the plan again",
            id="no-version",
        ),
        pytest.param(
            put("stages", 0, "layers", 1, "plan", "Q"),
            "unknown layer plan 'Q' in .*stages.0",
            "known: A, ",
            id="unknown-layer-plan",
        ),
        pytest.param(
            put("predicted", "memory_gib", []),
            "predicted.memory_gib has 0 stages",
            "make the plan again",
            id="memory-of-no-stage",
        ),
    ],
)
def test_a_broken_file_names_itself_the_place_and_a_way_out(plan, tmp_path, change, message, hint):
    path = broken(plan, tmp_path / "plan.yaml", change)

    with pytest.raises(ConfigError, match=message) as error:
        read_plan(path)

    assert str(path) in error.value.message
    assert hint is None or hint in error.value.hint


def test_a_file_from_before_there_were_stacks_and_bands_reads_as_neutral(plan, tmp_path):
    def older(body):
        del body["training"]["stack"], body["predicted"]["error_band"]
        for runner_up in body["search"]["runners_up"]:
            del runner_up["inside_error_band"]

    reread = read_plan(broken(plan, tmp_path / "plan.yaml", older))

    assert reread.training.stack == NEUTRAL
    assert reread.predicted.error_band is None
    assert not any(runner_up.inside_error_band for runner_up in reread.search.runners_up)
    assert (
        replace(reread, training=plan.training, predicted=plan.predicted, search=plan.search)
        == plan
    )


def test_a_file_with_the_single_attention_kernel_of_older_stacks_reads_as_a_list_of_one(
    plan, tmp_path
):
    def older(body):
        del body["training"]["stack"]["flash_kernels"]
        body["training"]["stack"]["flash_kernel"] = "cudnn"
        body["cluster"]["device"].pop("compute_capability", None)

    old_plan = read_plan(broken(plan, tmp_path / "plan.yaml", older))

    kernels = (AvailableKernel(kernel="cudnn"),)
    stack = replace(plan.training.stack, flash_kernels=kernels)
    assert old_plan.training == replace(plan.training, stack=stack)
    assert old_plan.cluster.device.compute_capability is None
    assert "flash_kernel:" not in plan_to_yaml(old_plan)


def test_a_file_with_the_old_and_the_new_key_of_attention_kernels_is_refused(plan, tmp_path):
    both = put("training", "stack", "flash_kernel", "cudnn")

    with pytest.raises(ConfigError, match=r"unknown key training\.stack\.flash_kernel"):
        read_plan(broken(plan, tmp_path / "plan.yaml", both))


def test_the_stack_and_the_band_travel_in_the_file(plan, tmp_path):
    path = tmp_path / "plan.yaml"
    band = ErrorBand(
        time=Band(share=0.04, rows=700, stack="mine"), memory=Band(share=0.1, rows=9, stack="all")
    )
    stack = Stack(
        name="mine",
        attention="unfused",
        flash_kernels=(AvailableKernel(kernel="flash3"),),
        kernel_slowdown=1.25,
        host_operator_s=1e-5,
    )
    plan = replace(
        plan,
        training=replace(plan.training, stack=stack),
        predicted=replace(plan.predicted, error_band=band),
    )

    write_plan(plan, path)

    assert read_plan(path) == plan
    assert yaml.safe_load(path.read_text())["predicted"]["error_band"] == {
        "time": {"share": 0.04, "rows": 700, "stack": "mine", "like": {}},
        "memory": {"share": 0.1, "rows": 9, "stack": "all", "like": {}},
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("mesh: {pp: 1\nother: [\n", r"plan.yaml:2: not YAML: ", id="with-the-line"),
        pytest.param(
            "plan_version: 1\nmesh: !!python/object:os.system {}\n",
            r"yaml:2: the tag tag:yaml.org,2002:python/object",
            id="no-code",
        ),
        pytest.param("- 1\n", "a plan is a mapping, found a list", id="a-list"),
        pytest.param("", "a plan is a mapping, found nothing", id="empty"),
        pytest.param(b"\xff\x00", "plan.yaml:1: a NUL byte", id="not-text"),
    ],
)
def test_what_is_no_plan_is_refused(text, message, tmp_path):
    path = tmp_path / "plan.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())

    with pytest.raises(ConfigError, match=message):
        read_plan(path)


def test_a_file_that_cannot_be_read_says_why(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read .*No such file") as error:
        read_plan(tmp_path / "none.yaml")
    assert "plan --model" in error.value.hint
    with pytest.raises(ConfigError, match=r"cannot read .*a folder, not a regular file"):
        read_plan(tmp_path)


@pytest.mark.parametrize("step", ["replace", "fsync"])
def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(plan, tmp_path, monkeypatch, step):
    path = tmp_path / "plan.yaml"
    path.write_text("old")

    def full(*arguments, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, step, full)
    with pytest.raises(ConfigError, match=r"cannot write .*No space left on device"):
        write_plan(plan, path)

    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_does_not_exist_is_an_error_of_the_request(plan, tmp_path):
    with pytest.raises(ConfigError, match=r"cannot write .*No such file or directory") as error:
        write_plan(plan, tmp_path / "none" / "plan.yaml")

    assert "--output" in error.value.hint


def conforms(value, schema, definitions, where="plan"):
    """Checks the JSON Schema keywords that our schema uses; fails with the place."""
    if "$ref" in schema:
        schema = definitions[schema["$ref"].removeprefix("#/$defs/")]
    if "anyOf" in schema:
        for option in schema["anyOf"]:
            try:
                return conforms(value, option, definitions, where)
            except AssertionError:
                continue
        raise AssertionError(f"{where}: none of {schema['anyOf']}")
    types = {
        "object": dict,
        "array": list,
        "string": str,
        "integer": int,
        "number": (int, float),
        "boolean": bool,
        "null": type(None),
    }
    assert "type" not in schema or isinstance(value, types[schema["type"]]), (
        f"{where}: {value!r} is no {schema.get('type')}"
    )
    assert value in schema.get("enum", [value]), (
        f"{where}: {value!r} is none of {schema.get('enum')}"
    )
    assert value == schema.get("const", value), f"{where}: {value!r} is not {schema.get('const')}"
    if isinstance(value, dict):
        assert set(schema.get("required", ())) <= set(value), where
        additional = schema.get("additionalProperties", True)
        for key, inner in value.items():
            inner_schema = schema.get("properties", {}).get(key, additional)
            assert inner_schema is not False, f"{where}: {key} is not in the schema"
            if isinstance(inner_schema, dict):
                conforms(inner, inner_schema, definitions, f"{where}.{key}")
    if isinstance(value, list):
        assert schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)), where
        for index, inner in enumerate(value):
            prefix = schema.get("prefixItems", ())
            conforms(
                inner,
                prefix[index] if index < len(prefix) else schema.get("items", {}),
                definitions,
                f"{where}.{index}",
            )
    return None


@pytest.mark.parametrize("seed", SEEDS)
def test_the_published_schema_takes_real_plans_with_and_without_the_time_of_their_search(seed):
    schema = plan_schema()

    for elapsed_s in (None, 1.5):
        conforms(plan_document(plan_of(seed), elapsed_s), schema, schema["$defs"])


def test_the_published_schema_refuses_what_the_reader_refuses(plan):
    schema = plan_schema()
    for change in (
        put("mesh", "sp", 1),
        put("mesh", None),
        put("mesh", "pp", "two"),
        put("plan_version", 1),
        put("layer_plans", "A", "zeroo", 1),
    ):
        body = plan_document(plan)
        body["mesh"], body["layer_plans"] = (
            dict(body["mesh"]),
            {name: dict(layer) for name, layer in body["layer_plans"].items()},
        )
        change(body)
        with pytest.raises(AssertionError):
            conforms(body, schema, schema["$defs"])
