"""A module that nobody described, on the command line: objectives, estimate, compare and check."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from tests.helpers.command_runs import fail, run, succeed

pytest.importorskip("torch")

ROOT = Path(__file__).parents[2]
MODEL = ("--model", "tests.helpers.divided_modules:gpt")
ON_EIGHT = (*MODEL, "--gpus", "8", "--global-batch-size", "64", "--micro-batch-size", "8")
DIVIDED = (*MODEL, "--gpus", "8", "--global-batch-size", "64", "--tp", "2", "--pp", "2")


@pytest.fixture(autouse=True)
def from_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.fixture(scope="module")
def searched(tmp_path_factory):
    """The plan file of a search, with the text that it printed."""
    folder = tmp_path_factory.mktemp("searched")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        text = succeed("--explain", *DIVIDED, "-o", str(folder / "plan.yaml")).stdout
    return folder / "plan.yaml", text


def found(tmp_path, *options):
    succeed(*ON_EIGHT, *options, "-o", str(tmp_path / "plan.yaml"))
    return yaml.safe_load((tmp_path / "plan.yaml").read_text())["predicted"]


def fullest_gib(predicted):
    return max(each["total"] for each in predicted["memory_gib"])


def changed(plan_file, tmp_path, change):
    """Returns another file with a changed plan."""
    document = yaml.safe_load(plan_file.read_text())
    change(document)
    other = tmp_path / "changed.yaml"
    other.write_text(yaml.safe_dump(document))
    return str(other)


def check_of(code, plan_file):
    """Returns what the check of a changed plan prints, on one line."""
    result = run("check", plan_file)
    assert result.exit_code == code, result.output
    return " ".join(result.output.split())


@pytest.mark.slow
def test_the_leanest_plan_is_no_more_redundant_than_the_fastest_and_within_its_slowdown(tmp_path):
    fastest = found(tmp_path)
    lean = found(tmp_path, "--objective", "memory", "--max-slowdown", "0.2")

    assert lean["redundancy_gib"]["total"] <= fastest["redundancy_gib"]["total"]
    assert lean["step_time_s"]["value"] <= 1.2 * fastest["step_time_s"]["value"] * 1.01


@pytest.mark.slow
def test_the_plan_of_the_least_peak_is_no_fuller_than_the_fastest(tmp_path):
    assert fullest_gib(found(tmp_path, "--objective", "peak")) <= fullest_gib(found(tmp_path))


@pytest.mark.slow
def test_a_front_of_a_traced_module_has_no_point_that_another_beats(tmp_path):
    front = json.loads(
        succeed(
            *(*ON_EIGHT, "--objective", "pareto", "--points", "5", "--json"),
            *("--plot", str(tmp_path / "front.png"), "-o", str(tmp_path / "plan.yaml")),
        ).stdout
    )
    values = [
        (each["step_time_s"]["value"], each["peak_memory_gib"], each["redundancy_gib"])
        for each in front["points"]
    ]

    assert len(values) > 1
    assert not any(
        all(a <= b for a, b in zip(one, other, strict=True))
        for one in values
        for other in values
        if one is not other
    )
    assert (tmp_path / "front.png").stat().st_size > 0
    assert [Path(each["plan_file"]).name for each in front["points"]] == [
        f"plan-{number:02}.yaml" for number in range(1, len(values) + 1)
    ]
    # Every file is the plan of a traced module, which is priced as it was found.
    assert "every stage fits" in succeed("check", front["points"][-1]["plan_file"]).stdout


def test_the_host_may_have_states_of_a_traced_module_and_nothing_else():
    message = fail(2, *ON_EIGHT, "--offload", "activations")
    chunks = fail(2, *ON_EIGHT, "--offload", "optimizer", "--objective", "memory")

    assert "--offload activations is of described models" in message
    assert "this search has states, optimizer, parameters and none" in message
    assert "--offload optimizer is of chunks, which are searched for --objective" in chunks


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """Options of a module whose states are most of what its plans hold."""
    from tests.helpers.divided_modules import OPT  # loads torch

    path = tmp_path_factory.mktemp("large") / "config.json"
    sizes = {"vocab_size": 8192, "hidden_size": 1024, "word_embed_proj_dim": 1024, "ffn_dim": 4096}
    path.write_text(json.dumps({**OPT, **sizes, "num_hidden_layers": 4}))
    shape = ("--gpus", "2", "--tp", "1", "--global-batch-size", "8", "--seq-length", "64")
    return "--model", str(path), "--trace", *shape


@pytest.fixture(scope="module")
def leanest(large, tmp_path_factory):
    """The plan files of the least peak without and with the hosts, and the text of the latter."""
    folder = tmp_path_factory.mktemp("leanest")
    alone, hosted = str(folder / "alone.yaml"), str(folder / "hosted.yaml")
    aim = (*large, "--objective", "peak", "--max-slowdown", "50")
    succeed(*aim, "-o", alone)
    return alone, hosted, succeed(*aim, "--host-memory", "100GiB", "-o", hosted).stdout


def peak_gib(plan_file):
    return fullest_gib(yaml.safe_load(Path(plan_file).read_text())["predicted"])


@pytest.mark.slow
def test_a_plan_with_states_on_the_hosts_is_smaller_and_says_so(leanest):
    alone, hosted, text = leanest

    plan = yaml.safe_load(Path(hosted).read_text())
    assert plan["offload"] == ["states"]
    assert peak_gib(hosted) < peak_gib(alone)
    assert all("all states are there" in each for each in (text, succeed("show", hosted).stdout))
    check = json.loads(succeed("check", hosted, "--json").stdout)
    assert check["host_gib"] == pytest.approx(
        sum(plan["mesh"]["dp"] * each["host"] for each in plan["predicted"]["memory_gib"])
    )
    assert "GiB of host memory a node" in " ".join(succeed("check", hosted).stdout.split())
    document = json.loads(succeed("compare", hosted, "--json").stdout)
    assert all(each["peak_memory_gib"] > peak_gib(hosted) for each in document["baselines"])


@pytest.mark.slow
def test_the_host_has_states_without_being_asked_only_where_nothing_fits_without(
    leanest, large, tmp_path
):
    plan_file = str(tmp_path / "plan.yaml")
    between_gib = (peak_gib(leanest[0]) + peak_gib(leanest[1])) / 2
    within = (*large, "--memory-limit", f"{between_gib}GiB")

    text = succeed(*within, "-o", plan_file).stdout

    assumed = "--offload states,optimizer,parameters (nothing fits the devices alone)"
    assert assumed in " ".join(text.split())
    plan = yaml.safe_load(Path(plan_file).read_text())
    assert bool(plan["offload"]) != bool(plan["chunks"])
    assert "GiB short" in fail(3, *within, "--offload", "none")
    too_little = fail(3, *within, "--host-memory", "100MiB")
    assert "of host memory a node are enough (--host-memory)" in too_little
    assert "all states are there" not in succeed(*large, "-o", plan_file).stdout


@pytest.mark.slow
def test_an_estimate_with_states_on_the_hosts_is_slower_and_needs_their_memory(large):
    def estimated(*options):
        document = json.loads(succeed("estimate", *large, "--zero", "3", *options, "--json").stdout)
        return document["predicted"]

    alone, hosted = estimated(), estimated("--offload", "states")

    assert hosted["step_time_s"]["value"] > alone["step_time_s"]["value"]
    assert hosted["breakdown"]["host_comm_s"]["value"] > 0
    assert hosted["memory_gib"][0]["host"] > 0 == alone["memory_gib"][0]["host"]
    message = fail(
        3, "estimate", *large, "--offload", "states", "--host-memory", "100MiB", "--zero", "3"
    )
    assert "the host" in message


@pytest.mark.slow
def test_explain_lists_pruned_candidates_and_operators_that_stay_whole(searched):
    _, text = searched

    assert "excluded by --pp or --tp" in text
    assert "activations on the host: a traced module has only its states there" in text
    assert "the host, where something fits without it: --host-memory or --offload asks" in text
    assert "operators that each of the 2 tensor-parallel ranks computes whole:" in text
    assert "embedding#1 of table, positions: dim0: a norm is over the whole of it" in text


def test_an_estimate_of_the_choices_of_a_plan_has_its_price(searched):
    plan = yaml.safe_load(searched[0].read_text())
    stages, pipeline = plan["stages"], plan["pipeline"]
    assert {stage["zero"] for stage in stages} == {stages[0]["zero"]}
    sizes = [run["last"] - run["first"] + 1 for stage in stages for run in stage["layers"]]
    assert not any(stage["recompute"] for stage in stages)

    estimated = json.loads(
        succeed(
            *("estimate", *DIVIDED, "--zero", str(stages[0]["zero"])),
            *("--micro-batch-size", str(pipeline["micro_batch_size"])),
            *("--schedule", pipeline["schedule"]),
            *("--stages", ",".join(map(str, sizes))),
            "--json",
        ).stdout
    )

    assert estimated["predicted"] == plan["predicted"]
    assert estimated["search"]["status"] == "estimate"


def test_an_estimate_cuts_at_even_times_and_recomputes_every_block(tmp_path):
    plan = json.loads(succeed("estimate", *DIVIDED, "--recompute", "full", "--json").stdout)

    assert [stage["layers"] for stage in plan["stages"]] == [
        [{"first": 0, "last": 2}],
        [{"first": 3, "last": 5}],
    ]
    assert [stage["recompute"] for stage in plan["stages"]] == [[1, 2], [3, 4]]
    assert {stage["zero"] for stage in plan["stages"]} == {0}


def test_an_estimate_shards_fused_matrices_that_tp_divides_in_chunks():
    chunks = ("--offload", "optimizer,parameters", "--host-blocks", "1")
    plan = json.loads(succeed("estimate", *DIVIDED, *chunks, "--json").stdout)

    assert {stage["zero"] for stage in plan["stages"]} == {3}
    assert all(stage["homes"] for stage in plan["stages"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--pp", "8", "--tp", "1"), "pp 8 is more than the 6 shards"),
        (("--stages", "1,2,3"), "--stages gives 3 stages, not 2"),
        (("--offload", "lookup"), "--offload lookup is of described models"),
        (("--host-blocks", "2"), "--host-blocks is of chunks"),
        (("--keep-on-host", "all"), "--keep-on-host: the host holds the states of a traced module"),
        (("--sequence-parallel",), "--sequence-parallel: "),
        (("--ep", "2"), "--ep: "),
    ],
)
def test_an_estimate_that_no_traced_module_can_have_is_an_error(options, message):
    assert message in fail(2, "estimate", *DIVIDED, *options)


def test_a_plan_is_priced_again_without_a_run(searched):
    plan_file = str(searched[0])
    document = json.loads(succeed("check", plan_file, "--json").stdout)

    assert document["verdict"] == "every stage fits its device"
    assert document["step_time_s"]["now"] == document["step_time_s"]["file"]
    assert [stage["stage"] for stage in document["stages"]] == [0, 1]
    assert all(stage["now_gib"] == stage["file_gib"] for stage in document["stages"])
    one = json.loads(succeed("check", plan_file, "--rank", "1", "--json").stdout)
    assert one["stages"] == document["stages"][1:]


def test_states_that_the_host_of_a_node_cannot_hold_do_not_fit(searched, tmp_path):
    def keep_on_host(document):
        document["offload"] = ["states"]

    def on_a_small_host(document):
        keep_on_host(document)
        document["cluster"]["node"]["host_memory_gib"] = 1e-5

    assert (
        json.loads(
            succeed("check", str(changed(searched[0], tmp_path, keep_on_host)), "--json").stdout
        )["verdict"]
        == "every stage fits its device"
    )
    result = run("check", str(changed(searched[0], tmp_path, on_a_small_host)))
    assert result.exit_code == 3
    assert "the host of a node has too little memory" in result.stdout


def test_the_check_of_a_plan_for_other_shards_is_an_error(searched, tmp_path):
    def start_elsewhere(document):
        document["shards"][2]["starts"] = "another"

    other = changed(searched[0], tmp_path, start_elsewhere)

    assert "has other shards than the 6 of the plan" in check_of(2, other)


def test_the_check_of_a_plan_with_other_divisions_is_an_error(searched, tmp_path):
    def leave_whole(document):
        document["shardings"][document["shards"][1]["layer"]] = []

    other = changed(searched[0], tmp_path, leave_whole)

    assert "is divided over tp 2 in another way" in check_of(2, other)


def test_the_check_of_a_plan_that_does_not_fit_ends_with_3(searched, tmp_path):
    def shrink(document):
        document["cluster"]["device"]["memory_gib"] = 1.0

    other = changed(searched[0], tmp_path, shrink)

    assert "stage 0 does not fit its device" in check_of(3, other)


@pytest.mark.slow
def test_a_plan_is_compared_with_strategies_that_any_module_has(searched):
    document = json.loads(succeed("compare", str(searched[0]), "--json").stdout)

    names = [each["name"] for each in document["baselines"]]
    assert names == ["zero-0", "zero-1", "zero-2", "zero-3", "1f1b", "1f1b-recompute"]
    by_name = dict(zip(names, document["baselines"], strict=True))
    assert all(each["fits"] for each in document["baselines"])
    assert by_name["zero-3"]["redundancy_gib"] < by_name["zero-0"]["redundancy_gib"]
    assert by_name["1f1b-recompute"]["step_time_s"] > by_name["1f1b"]["step_time_s"]
    assert by_name["1f1b"]["mesh"]["pp"] > 1
    assert {each["mesh"]["tp"] for each in document["baselines"]} == {1}


@pytest.mark.slow
def test_no_baseline_is_faster_than_the_plan_of_a_free_search(tmp_path):
    plan_file = str(tmp_path / "plan.yaml")
    succeed(*MODEL, "--gpus", "8", "--global-batch-size", "64", "-o", plan_file)

    document = json.loads(succeed("compare", plan_file, "--json").stdout)

    assert min(each["slower"] for each in document["baselines"]) > -1e-4


def test_a_baseline_of_described_models_is_none_of_a_traced_module(searched):
    message = fail(2, "compare", str(searched[0]), "--baseline", "megatron")

    assert "megatron" in message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--stages", "h.9"), "--stages has 'h.9', Gpt has no such submodule"),
        (("--stages", "blocks.0,blocks.1"), "--stages gives 3 stages, not 2"),
        (("--recompute-first-stage", "0.5,0.5,0.5"), "has 3 shares, --pp has at most 2 stages"),
        (("--recompute-first-stage", "1", "--recompute", "full"), "none is excluded"),
    ],
)
def test_cuts_and_rules_that_a_search_cannot_have_are_errors(options, message):
    assert message in fail(2, *DIVIDED, *options)


def test_an_estimate_has_the_recompute_of_a_rule_for_its_stages():
    options = ("--recompute-first-stage", "1", "--json")
    plan = json.loads(succeed("estimate", *DIVIDED, *options).stdout)

    assert [stage["recompute"] for stage in plan["stages"]] == [[1, 2], []]


def test_a_plan_keeps_the_rules_of_its_tensor_parallelism(tmp_path):
    rules, plan_file = tmp_path / "rules.yaml", str(tmp_path / "plan.yaml")
    rules.write_text("replicated: [blocks.0]\ncolumn: [blocks.1.qkv]\n")

    succeed(*DIVIDED, "--tp-rules", str(rules), "-o", plan_file)

    plan = yaml.safe_load(Path(plan_file).read_text())
    layers = {shard["name"]: shard["layer"] for shard in plan["shards"]}
    whole = [layer for name, layer in layers.items() if name.startswith("blocks.0")]
    assert plan["tp_rules"]["replicated"] == ["blocks.0"]
    assert [plan["shardings"][layer] for layer in whole] == [[], []], "both halves"
    assert sum(map(len, plan["shardings"].values())) > 2
    checked = json.loads(succeed("check", plan_file, "--json").stdout)
    assert checked["step_time_s"]["now"] == checked["step_time_s"]["file"]


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("column: [blocks.7.qkv]", (), "column blocks.7.qkv names no matrix or table of Gpt"),
        ("column: [blocks.0.out]", (), "column blocks.0.out: blocks.0.out.linear at "),
        ("column: [blocks.0.qkv]", ("--tp", "8", "--pp", "1"), "--tp-rules divides blocks.0.qkv"),
        ("column: [blocks.0.qkv", (), "rules.yaml"),
    ],
)
def test_rules_that_the_module_cannot_have_are_errors(tmp_path, text, options, message):
    rules = tmp_path / "rules.yaml"
    rules.write_text(text)

    assert message in fail(2, *DIVIDED, *options, "--tp-rules", str(rules))


def test_rules_are_for_traced_modules(tmp_path):
    where = ("--model", "gpt-tiny", "--gpus", "2", "--tp-rules", str(tmp_path / "rules.yaml"))

    assert "--tp-rules is for traced modules" in fail(2, *where)


@pytest.mark.slow
@pytest.mark.multiproc
def test_a_plan_with_merged_shards_and_a_named_stage_trains_as_one_process_does(tmp_path):
    plan_file = str(tmp_path / "plan.yaml")
    where = ("--gpus", "2", "--pp", "2", "--global-batch-size", "16")
    succeed(*MODEL, *where, "--shards", "merge", "--stages", "blocks.1", "-o", plan_file)
    plan = yaml.safe_load(Path(plan_file).read_text())

    document = json.loads(succeed("check", plan_file, "--execute", "--json").stdout)

    second = plan["stages"][1]["layers"][0]["first"]
    assert plan["shards"][second]["name"].startswith("blocks.1")
    assert document["passed"]


@pytest.mark.slow
@pytest.mark.multiproc
def test_a_searched_plan_with_tensor_parallelism_trains_as_one_process_does(tmp_path):
    plan_file = str(tmp_path / "plan.yaml")
    where = ("--gpus", "4", "--tp", "2", "--pp", "2", "--global-batch-size", "16")
    succeed(*MODEL, *where, "-o", plan_file)

    document = json.loads(succeed("check", plan_file, "--execute", "--json").stdout)

    assert document["passed"]


@pytest.mark.slow
def test_a_plan_that_the_hosts_have_no_room_for_does_not_pass_the_check(large, tmp_path):
    plan_file = tmp_path / "plan.yaml"
    chunks = ("--offload", "optimizer,parameters", "--host-blocks", "2")
    succeed("estimate", *large, *chunks, "-o", str(plan_file))
    plan = yaml.safe_load(plan_file.read_text())
    assert [group["home"] for group in plan["chunks"]["groups"]] == ["optimizer", "host"]
    assert "moments of stage 0" in succeed("show", str(plan_file), "--chunks").stdout
    assert json.loads(succeed("check", str(plan_file), "--json").stdout)["host_fits"]

    plan["cluster"]["node"]["host_memory_gib"] = 0.1
    plan_file.write_text(yaml.safe_dump(plan, sort_keys=False))

    verdict = run("check", str(plan_file), "--json")
    assert verdict.exit_code == 3
    assert json.loads(verdict.stdout)["verdict"].startswith("the host of a node has too little")
