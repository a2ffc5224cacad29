"""Consistency of a plan's document, from the document alone, without any import of the planner.

This is the oracle of the fuzzer: a plan that breaks one of these rules must not end with exit code
0 in any command.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

ONE_STAGE = ("gpipe", "1f1b", "early-recompute", "last-no-recompute", "scp")
BLOCK = (
    "norm1",
    "qkv",
    "attention",
    "attention_out",
    "residual1",
    "norm2",
    "fc1",
    "activation",
    "fc2",
    "residual2",
)
OF_EXPERTS = ("router", "choice", "dispatch", "combine")
ENDS = {"embedding": ("tokens",), "head": ("norm", "lm_head", "loss")}


def problem_of(plan: Any) -> str:
    """Return the inconsistency of a plan whose values have the right types, or ""."""
    return next(_problems(plan), "")


def _problems(plan: Mapping[str, Any]) -> Iterator[str]:
    yield from _mesh(plan)
    yield from _micro_batches(plan)
    yield from _predicted(plan)
    yield from _stages(plan)
    if "traced" in plan:
        yield from _shards(plan)
        return
    yield from _model(plan)
    yield from _kinds(plan)
    yield from _layer_plans(plan)
    yield from _chunks(plan)


def _mesh(plan: Mapping[str, Any]) -> Iterator[str]:
    mesh, cluster = plan["mesh"], plan["cluster"]
    pp, dp = mesh["pp"], mesh["dp"]
    tp, ep = mesh["tp"], mesh.get("ep", 1)
    if min(pp, dp, tp, ep) < 1:
        yield "a degree of the mesh is below 1"
        return
    devices = cluster.get("nodes", 1) * cluster["node"]["gpus"]
    if pp * dp * tp != devices:
        yield f"the mesh has {pp * dp * tp} ranks, the cluster {devices} devices"
    if dp % ep:
        yield f"ep {ep} does not divide dp {dp}"


def _micro_batches(plan: Mapping[str, Any]) -> Iterator[str]:
    pipeline = plan["pipeline"]
    pp, dp = plan["mesh"]["pp"], plan["mesh"]["dp"]
    size = pipeline["micro_batch_size"]
    count = pipeline["num_micro_batches"]
    virtual = pipeline["virtual_stages"]
    schedule = pipeline["schedule"]
    if min(size, count, virtual) < 1:
        yield "a count of the pipeline is below 1"
        return
    shares = pipeline.get("micro_batches_of_replicas") or [count] * dp
    if len(shares) != dp or max(shares) != count:
        yield f"the shares {shares} are not those of dp {dp}, with {count} at most"
    if size * sum(shares) != plan["training"]["global_batch_size"]:
        yield f"{shares} micro-batches of {size} on dp {dp} are not the global batch"
    if pipeline.get("tp_overlap") and size % 2:
        yield f"a micro-batch of {size} is run as two halves"
    if pp > 1 and schedule in ONE_STAGE and virtual != 1:
        yield f"{schedule} has {virtual} virtual stages"
    if pp > 1 and schedule == "zbv" and virtual != 2:
        yield f"zbv has {virtual} virtual stages"
    if pp > 1 and schedule == "interleaved" and (virtual < 2 or count % pp):
        yield f"interleaved has {virtual} virtual stages, {count} micro-batches on pp {pp}"


def _predicted(plan: Mapping[str, Any]) -> Iterator[str]:
    pp = plan["mesh"]["pp"]
    if [memory["stage"] for memory in plan["predicted"]["memory_gib"]] != list(range(pp)):
        yield "predicted.memory_gib is not of the pipeline's ranks"


def _stages(plan: Mapping[str, Any]) -> Iterator[str]:
    stages = plan["stages"]
    num_stages = plan["mesh"]["pp"] * plan["pipeline"]["virtual_stages"]
    if len(stages) != num_stages:
        yield f"{len(stages)} stages, pp x virtual stages is {num_stages}"
    elif plan["pipeline"]["schedule"] != "custom" and [stage["rank"] for stage in stages] != [
        _rank_of(plan, k) for k in range(num_stages)
    ]:
        yield "stages are not on their ranks"
    if not all(stage["layers"] for stage in stages):
        yield "a stage holds no layer"
    num_layers = len(plan["shards"]) if "traced" in plan else plan["model"]["num_layers"] + 2
    runs = [(run["first"], run["last"] + 1) for stage in stages for run in stage["layers"]]
    yield from _gapless(runs, num_layers, "layers")


def _shards(plan: Mapping[str, Any]) -> Iterator[str]:
    shards = [(shard["first"], shard["end"]) for shard in plan["shards"]]
    yield from _gapless(shards, plan["traced"]["num_operators"], "shards")
    for stage in plan["stages"]:
        first, last = stage["layers"][0]["first"], stage["layers"][-1]["last"]
        if stage["zero"] not in range(4) or not all(
            first <= layer <= last for layer in stage["recompute"]
        ):
            yield "a stage has no such zero, or recomputes a layer of another"


def _gapless(spans: list[tuple[int, int]], size: int, what: str) -> Iterator[str]:
    last = 0
    for first, end in spans:
        if first != last or end <= last:
            yield f"{what} leave a gap at {last}"
            return
        last = end
    if last != size:
        yield f"{what} end at {last} of {size}"


def _model(plan: Mapping[str, Any]) -> Iterator[str]:
    model, mesh = plan["model"], plan["mesh"]
    training = plan["training"]
    if (
        min(
            model["num_layers"],
            model["hidden_size"],
            model["num_heads"],
            model["num_kv_heads"],
            model["head_dim"],
        )
        < 1
    ):
        yield "a size of the model is below 1"
        return
    if model["num_heads"] % model["num_kv_heads"]:
        yield "num_kv_heads does not divide num_heads"
    if training["seq_length"] < 1 or (
        model["positions"] == "learned" and training["seq_length"] > model["max_seq_length"]
    ):
        yield f"seq_length {training['seq_length']} of a model with {model['max_seq_length']}"
    ep, experts = mesh.get("ep", 1), model.get("num_experts", 0)
    if ep > 1 and (not experts or experts % ep):
        yield f"ep {ep} of {experts} experts"


def _rank_of(plan: Mapping[str, Any], stage: int) -> int:
    pp = plan["mesh"]["pp"]
    return min(stage, 2 * pp - 1 - stage) if plan["pipeline"]["schedule"] == "zbv" else stage % pp


def _kinds(plan: Mapping[str, Any]) -> Iterator[str]:
    layer_plans, head = plan["layer_plans"], plan["model"]["num_layers"] + 1
    for run in (run for stage in plan["stages"] for run in stage["layers"]):
        if run["plan"] not in layer_plans:
            yield f"layer plan {run['plan']} is not defined"
            return
        kind = layer_plans[run["plan"]]["layer"]
        for layer in (run["first"], run["last"]):
            if kind != {0: "embedding", head: "head"}.get(layer, "block"):
                yield f"layer {layer} runs on {run['plan']}, which is of {kind}"


def _operators(model: Mapping[str, Any], layer: str) -> tuple[str, ...]:
    learned = model["positions"] == "learned"
    if layer != "block":
        return (*ENDS[layer], *(("positions",) if learned and layer == "embedding" else ()))
    return (
        *BLOCK,
        *(() if learned else ("rotary",)),
        *(OF_EXPERTS if model.get("num_experts") else ()),
    )


def _layer_plans(plan: Mapping[str, Any]) -> Iterator[str]:
    dp, tp = plan["mesh"]["dp"], plan["mesh"]["tp"]
    model = plan["model"]
    for name, layer_plan in plan["layer_plans"].items():
        operators, ranks = layer_plan["operators"], layer_plan.get("zero_ranks")
        if layer_plan["zero"] not in range(4):
            yield f"{name} has zero {layer_plan['zero']}"
        if layer_plan["zero"] and ranks and dp % ranks:
            yield f"{name} has zero_ranks {ranks} of dp {dp}"
        for key in ("recompute", "keep_on_host"):
            unknown = [
                each
                for each in layer_plan.get(key, ())
                if each not in _operators(model, layer_plan["layer"])
            ]
            if unknown:
                yield f"{name} has {key} {unknown[0]}"
        attention = operators.get("attention", {})
        if tp > 1 and "Shard(2)@tp" in attention.get("input", ()) and model["num_heads"] % tp:
            yield f"tp {tp} does not divide {model['num_heads']} heads"


def _chunks(plan: Mapping[str, Any]) -> Iterator[str]:
    chunks = plan.get("chunks")
    pp, dp = plan["mesh"]["pp"], plan["mesh"]["dp"]
    if chunks is None:
        if any(
            set(layer_plan.get("offload", ())) & {"optimizer", "parameters"}
            for layer_plan in plan["layer_plans"].values()
        ):
            yield "offload in chunks of a plan without chunks"
        return
    if [rank["stage"] for rank in chunks["ranks"]] != list(range(pp)):
        yield "chunks.ranks is not of the pipeline's ranks"
    for group in chunks["groups"]:
        if (
            group["stage"] not in range(pp)
            or group["num_chunks"] < 1
            or group["num_chunks"] % dp
            or group["chunk_elements"] < 1
        ):
            yield f"a group of {group['num_chunks']} chunks on stage {group['stage']}, dp {dp}"
