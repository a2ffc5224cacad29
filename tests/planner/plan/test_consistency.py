"""A plan that parses but does not fit together is refused when it is read, by whoever reads it."""

import copy
from dataclasses import replace

import pytest

from parplan.costmodels.schedules.schedule import Schedule
from parplan.planner.plan.pipeline_plan import LayerRange
from parplan.planner.plan.plan import PLAN_VERSION
from parplan.planner.plan.plan_file import any_plan_from_document, plan_to_document
from parplan.planner.plan.traced_plan import ShardPlan, ShardStage, TracedPlan, TracedSummary
from parplan.profiles.errors import ConfigError
from parplan.profiles.models.module_source import ModuleSource
from tests.helpers.cases import mostly_slow
from tests.helpers.executor_plans import make_plan
from tests.helpers.synthetic_runs import estimated

# a choice or a description by itself: with another value it is the plan of another request, which
# fits together as well
FREE = {
    "model": {
        "hidden_size",
        "num_heads",
        "num_kv_heads",
        "head_dim",
        "ffn_hidden_size",
        "vocab_size",
        "max_seq_length",
        "vocab_multiple",
    },
    "training": {"seq_length"},
    "layer_plans": {"zero"},
    "pipeline": {"tp_overlap"},
    "stages": {"zero"},
    "traced": {"num_parameters", "flops_per_sequence"},
    "shards": {"parameters"},
}
DESCRIPTIONS = {
    "device",
    "link",
    "nic",
    "nics",
    "host_memory_gib",
    "pcie_gb_per_s",
    "pcie_node_gb_per_s",
    "host_gb_per_s",
    "stack",
    "numa_domains",
    "gpus_per_numa",
}
OTHERS = (
    lambda value: value + 1,
    lambda value: 0,
    lambda value: -1,
    lambda value: 7,
    lambda value: 10**12,
    lambda value: 2**62,
)


def module_plan(pp: int = 2) -> TracedPlan:
    """Returns a plan with two shards of three operators a stage, of a module that nobody traces."""
    like = make_plan(pp=pp, dp=2, global_batch_size=8)
    return TracedPlan(
        plan_version=PLAN_VERSION,
        module=ModuleSource(factory="a.b:c"),
        traced=TracedSummary(
            name="m", num_parameters=5, num_operators=6 * pp, flops_per_sequence=7, unit="tokens"
        ),
        cluster=like.cluster,
        training=like.training,
        mesh=like.mesh,
        pipeline=like.pipeline,
        shards=tuple(
            ShardPlan(name=f"s{i}", layer="A", first=3 * i, end=3 * i + 3, starts="x", parameters=1)
            for i in range(2 * pp)
        ),
        stages=tuple(
            ShardStage(
                rank=i,
                layers=(LayerRange(first=2 * i, last=2 * i + 1),),
                zero=1,
                recompute=(2 * i,),
            )
            for i in range(pp)
        ),
        predicted=like.predicted,
        search=like.search,
    )


PLANS = {
    "one-device": lambda: estimated(),
    "pipeline": lambda: estimated(pp=2, dp=2, zero=1),
    "tensor": lambda: estimated(tp=2),
    "interleaved": lambda: estimated(pp=2, virtual_stages=3),
    "zbv": lambda: make_plan(pp=2, virtual_stages=2, schedule=Schedule.ZBV),
    "module": module_plan,
}


def integers(value, path=()):
    """Yields the paths of all integers in a document."""
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from integers(inner, (*path, key))
    elif type(value) is int:
        yield path


def changed(body, path, value):
    body = copy.deepcopy(body)
    inner = body
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return body


def is_free(path) -> bool:
    if path[0] in ("predicted", "search") or (
        path[0] in ("cluster", "training") and set(path) & DESCRIPTIONS
    ):
        return True
    return (
        path[-1] in FREE.get(path[0], ()) or "recompute" in path
    )  # any shards of a stage may recompute


@pytest.mark.parametrize("name", mostly_slow(PLANS, {"zbv", "module"}))
def test_every_other_integer_is_refused_or_is_a_prediction_or_a_description(name):
    plan = PLANS[name]()
    body = plan_to_document(plan)
    assert any_plan_from_document(body, "f") == plan
    taken = set()
    for path in integers(body):
        before = plan if path[0] in ("predicted", "search") else None
        for value in {change(_at(body, path)) for change in OTHERS} - {_at(body, path)}:
            try:
                reread = any_plan_from_document(changed(body, path, value), "f")
            except ConfigError:
                continue
            taken.add(path)
            if before is not None:
                assert replace(reread, predicted=plan.predicted, search=plan.search) == plan

    assert [path for path in taken if not is_free(path)] == []


def _at(body, path):
    for key in path:
        body = body[key]
    return body


@pytest.mark.parametrize(
    ("name", "path", "value", "message"),
    [
        (
            "one-device",
            ("cluster", "nodes"),
            7,
            "mesh: pp 1 x dp 1 x tp 1 has 1 ranks, the cluster has 7 devices, nodes 7 x 1",
        ),
        ("tensor", ("mesh", "tp"), 1, "the cluster has 2 devices"),
        (
            "one-device",
            ("pipeline", "virtual_stages"),
            0,
            r"pipeline.virtual_stages is 0, it must be from 1 to 4,096",
        ),
        (
            "one-device",
            ("layer_plans", "A", "offload"),
            ["optimizer"],
            "layer_plans.A: offload is optimizer, and the plan has no chunks",
        ),
        ("interleaved", ("stages", 1, "layers"), [], "stages.1: it has no layers"),
        (
            "one-device",
            ("pipeline", "num_micro_batches"),
            3,
            "3 micro-batches of 2 on dp 1 are 6 sequences, global_batch_size is 8",
        ),
        (
            "interleaved",
            ("pipeline", "num_micro_batches"),
            3,
            "interleaved needs micro-batches in multiples of the 2 pipeline ranks",
        ),
        (
            "interleaved",
            ("stages", 0, "rank"),
            1,
            "stages.0: rank is 1, schedule interleaved runs it on 0",
        ),
        ("zbv", ("stages", 2, "rank"), 0, "stages.2: rank is 0, schedule zbv runs it on 1"),
        ("pipeline", ("mesh", "ep"), 2, "mesh: ep 2 divides experts, gpt-2.5b has none"),
        (
            "one-device",
            ("stages", 0, "layers", 1, "last"),
            10**12,
            "stages.0.layers.2: it has layers 55 to 55, it must begin with 1000000000001",
        ),
        (
            "one-device",
            ("stages", 0, "layers", 1, "first"),
            2,
            "stages.0.layers.1: it has layers 2 to 54, it must begin with 1",
        ),
        (
            "one-device",
            ("stages", 0, "layers", 0, "plan"),
            "head",
            "stages.0: layer 0 is of kind embedding, its plan head is of kind head",
        ),
        (
            "one-device",
            ("stages", 0, "layers", 2, "last"),
            56,
            "stages: they have 57 layers, there are 56",
        ),
        (
            "pipeline",
            ("layer_plans", "A", "zero_ranks"),
            3,
            "layer_plans.A: zero_ranks 3 does not divide dp 2",
        ),
        (
            "one-device",
            ("layer_plans", "A", "recompute"),
            ["fc9"],
            "layer_plans.A: recompute: it names fc9, the layer has norm1, qkv",
        ),
        (
            "one-device",
            ("layer_plans", "A", "own_zero"),
            {"fc9": 3},
            "layer_plans.A: own_zero: it names fc9, the layer has norm1, qkv",
        ),
        (
            "one-device",
            ("layer_plans", "A", "own_zero"),
            {"fc1": 4},
            "own_zero.fc1 is 4, it must be 0, 1, 2 or 3",
        ),
        (
            "one-device",
            ("layer_plans", "head", "own_zero"),
            {"lm_head": 3},
            "own_zero is of operators of a block, this is the head",
        ),
        (
            "one-device",
            ("layer_plans", "embedding", "keep_on_host"),
            ["fc1"],
            "keep_on_host: it names fc1, the layer has tokens",
        ),
        (
            "one-device",
            ("training", "seq_length"),
            10**6,
            "training: seq_length is 1000000, the model learns 1024 positions",
        ),
        (
            "one-device",
            ("predicted", "step_time_s", "value"),
            "1e999",
            "finite|predicted.step_time_s.value is inf",
        ),
        (
            "one-device",
            ("predicted", "step_time_s", "value"),
            1e200,
            r"predicted.step_time_s.value is 1e\+200, it must be from",
        ),
        (
            "one-device",
            ("training", "global_batch_size"),
            2**62,
            "global_batch_size is 4611686018427387904, it must be from 1 to 1,000,",
        ),
        (
            "module",
            ("shards", 1, "first"),
            4,
            "shards.1: it has operators 4 to 5, it must begin with 3",
        ),
        (
            "module",
            ("stages", 1, "layers", 0, "first"),
            1,
            "stages.1.layers.0: it has layers 1 to 3, it must begin with 2",
        ),
        ("module", ("mesh", "dp"), 1, "the cluster has 4 devices"),
    ],
)
def test_the_error_names_the_parts_that_differ(name, path, value, message):
    body = plan_to_document(PLANS[name]())

    with pytest.raises(ConfigError, match=message):
        any_plan_from_document(changed(body, path, value), "f")


def test_a_divided_module_without_its_divisions_is_refused():
    body = plan_to_document(module_plan())
    body["mesh"]["tp"], body["cluster"]["nodes"] = 2, 2

    with pytest.raises(
        ConfigError, match="nothing says how the operators of a traced module are divided"
    ):
        any_plan_from_document(body, "f")


def test_a_step_of_more_passes_than_can_be_simulated_is_refused():
    body = plan_to_document(estimated(pp=2))
    body["pipeline"]["num_micro_batches"], body["training"]["global_batch_size"] = 10**8, 2 * 10**8

    with pytest.raises(
        ConfigError, match="400,000,000 forward and backward passes, at most 2,000,000 are planned"
    ):
        any_plan_from_document(body, "f")
