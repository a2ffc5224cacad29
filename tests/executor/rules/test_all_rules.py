"""Every rule of the executor refuses plans that would go wrong.

Run all the same, they fail, train something else, or hold other bytes.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.host.offload import Offload
from parplan.costmodels.operators.plan_placements import placements
from parplan.costmodels.operators.sharding import Sharding, Split
from parplan.costmodels.schedules.schedule import Schedule
from parplan.executor.rules.all_rules import RULES, nearest_legal, refusals, validate
from parplan.planner.plan.plan import LayerRun, OperatorPlacement, Plan, StagePlan
from parplan.planner.search.estimate import ChunkRequest
from parplan.profiles.errors import ConfigError
from parplan.profiles.models.blocks import BlockRun, QkNorm
from parplan.profiles.models.documents import Documents
from parplan.profiles.models.fine_tuning import FineTuning
from parplan.profiles.models.spec import ModelSpec, Optimizer, Precision
from parplan.profiles.models.towers import Projection, Tower
from parplan.profiles.models.transformer import build_graph
from parplan.profiles.product_formats import ProductFormat
from parplan.profiles.stack import NEUTRAL, AttentionKernel, ContextForm
from parplan.profiles.state_precision import StatePrecision
from tests.helpers.chunked_runs import chunked_plan
from tests.helpers.executor_plans import GPT, LLAMA, MIXTRAL, make_plan
from tests.helpers.executor_world import (
    GRADIENT_TOLERANCE,
    LOSS_TOLERANCE,
    attempt,
    run_reference,
    worst_gradient,
)
from tests.helpers.external_modules import family_plan

pytestmark = [
    pytest.mark.multiproc,
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning"),
]

BF16 = Precision.BF16
GPIPE = Schedule.GPIPE
INTERLEAVED = Schedule.INTERLEAVED


def with_pipeline(plan: Plan, **changes: object) -> Plan:
    return dataclasses.replace(plan, pipeline=dataclasses.replace(plan.pipeline, **changes))


def with_training(plan: Plan, **changes: object) -> Plan:
    return dataclasses.replace(plan, training=dataclasses.replace(plan.training, **changes))


def with_layer_plan(plan: Plan, name: str, **changes: object) -> Plan:
    changed = dataclasses.replace(plan.layer_plans[name], **changes)
    return dataclasses.replace(plan, layer_plans={**plan.layer_plans, name: changed})


def with_operator(plan: Plan, name: str, operator: str, **changes: object) -> Plan:
    operators = plan.layer_plans[name].operators
    changed = dataclasses.replace(operators[operator], **changes)
    return with_layer_plan(plan, name, operators={**operators, operator: changed})


def with_stages(plan: Plan, *stages: StagePlan) -> Plan:
    return dataclasses.replace(plan, stages=stages)


def starved(plan: Plan) -> Plan:
    """One byte less than it needs on every rank."""
    ranks = tuple(
        dataclasses.replace(rank, device_bytes=rank.smallest_bytes - 1)
        for rank in plan.chunks.ranks
    )
    return dataclasses.replace(plan, chunks=dataclasses.replace(plan.chunks, ranks=ranks))


Effect = Literal["fails", "other gradients", "other bytes", "no effect"]


@dataclass(frozen=True, slots=True)
class Broken:
    """A plan that `rule` refuses with `message`.

    It comes with the change that the hint asks for, and the result of running it: without effect
    it trains as the plan `like` does, which is the nearest legal one if there is none.
    """

    rule: str
    plan: Plan
    message: str
    hint: str
    effect: Effect
    like: Plan | None = None


GPT1 = make_plan(GPT)
GPT2 = make_plan(GPT, dp=2)
FC1_OVER_DATA = Sharding(data=2, own=(("fc1", (Split("ffn"), Split())),))
PP2 = make_plan(GPT, pp=2)
TP2, DROPOUT = make_plan(GPT, tp=2), dataclasses.replace(GPT, dropout=0.5)
FIRST, LAST = PP2.stages
AMPLE = ChunkRequest(host_blocks=2, optimizer_blocks=1, device_bytes=10**9)
CHUNKED = chunked_plan(AMPLE)
ZBV = {"schedule": Schedule.ZBV, "virtual_stages": 2}
ZERO_APART = with_layer_plan(make_plan(GPT, pp=2, dp=2, zero=(0, 1)), "head-0", zero=1)

TOWER = Tower(
    num_layers=3,
    hidden_size=24,
    num_heads=4,
    ffn_hidden_size=48,
    patches=16,
    patch_features=12,
    projector=(Projection(width=LLAMA.hidden_size),),
)


def seeing(**changes: object) -> ModelSpec:
    """A model with a tower."""
    return dataclasses.replace(LLAMA, tower=dataclasses.replace(TOWER, merged=4, **changes))


BROKEN = {
    "a-grid-of-tensor-parallel-ranks": Broken(
        "grid",
        dataclasses.replace(make_plan(GPT, tp=4), mesh=Mesh(pp=1, dp=1, tp=4, tp_rows=2)),
        "its operators are not placed over tp_rows 2",
        "set every operator to its placement over tp_rows and tp_columns",
        "fails",
    ),
    "muon-on-a-grid": Broken(
        "grid",
        with_training(make_plan(LLAMA, tp=4, tp_rows=2), optimizer=Optimizer.MUON),
        "tp_rows 2 with optimizer muon",
        "set tp_rows to 1",
        "fails",
    ),
    "images-without-text": Broken(
        "images",
        make_plan(seeing(images=4)),
        "seq_length is 16, the images of a sequence have 16 tokens",
        "set seq_length to 17",
        "fails",
    ),
    "rotated-thirds-of-heads": Broken(
        "images",
        make_plan(seeing(rotary=True)),
        "the vision tower rotates heads of 6 features",
        "set tower.rotary to false",
        "fails",
    ),
    "windows-across-images": Broken(
        "images",
        make_plan(seeing(blocks=(BlockRun(window=9),))),
        "the vision tower has windows of 9 patches in images of 4 x 4",
        "set the windows of tower.blocks to 0",
        "fails",
    ),
    "images-by-batch-among-all-sequences": Broken(
        "placements",
        with_operator(
            make_plan(seeing(), tp=2),
            "vision-projector-0",
            "image_tokens",
            input=("Shard(0)@tp",),
            output=("Shard(0)@tp",),
        ),
        "image_tokens: it cannot be divided by batch: the places of images are those of all",
        r"set input to \['Shard\(2\)@tp'\]",
        "fails",
    ),
    "images-over-half-a-sequence": Broken(
        "context alone",
        make_plan(seeing(), cp=2, form=ContextForm.RING),
        "cp is 2 with a vision tower, whose images no rank divides",
        "set cp to 1, context_form to null and dp to 2",
        "fails",
    ),
    "layers-missing": Broken(
        "layers",
        with_stages(PP2, FIRST),
        "they hold layers 0-2, the model has 6",
        r"give the stages \[3, 3\] layers",
        "fails",
    ),
    "wrong-order": Broken(
        "layers",
        with_stages(PP2, dataclasses.replace(LAST, rank=0), dataclasses.replace(FIRST, rank=1)),
        "they hold layers 3-5, 0-2",
        r"give the stages \[3, 3\]",
        "fails",
    ),
    "empty-stage": Broken(
        "layers",
        with_stages(
            PP2, StagePlan(rank=0, layers=FIRST.layers + LAST.layers), StagePlan(rank=1, layers=())
        ),
        "stage 1 of 2 holds no layer",
        r"give the stages \[3, 3\]",
        "fails",
    ),
    "wrong-rank": Broken(
        "stage ranks",
        with_stages(PP2, FIRST, dataclasses.replace(LAST, rank=0)),
        r"their ranks are \[0, 0\]",
        r"to \[0, 1\]",
        "fails",
    ),
    "one-stage-too-few": Broken(
        "stage ranks",
        with_pipeline(PP2, schedule=INTERLEAVED, virtual_stages=2),
        "there are 2, pp 2 with 2 virtual stages has 4",
        "into 4 stages",
        "fails",
    ),
    "virtual-stages-of-gpipe": Broken(
        "virtual stages",
        make_plan(LLAMA, pp=2, virtual_stages=2, schedule=GPIPE),
        "gpipe with virtual_stages 2",
        "to interleaved",
        "fails",
    ),
    "half-a-micro-batch": Broken(
        "batch",
        with_training(PP2, global_batch_size=9),
        "are 8 sequences",
        "set micro_batch_size to 3 and num_micro_batches to 3",
        "other gradients",
    ),
    "no-share-for-every-rank": Broken(
        "batch",
        with_training(GPT2, global_batch_size=9),
        "on 2 data-parallel ranks are 8 sequences",
        "global_batch_size to 8",
        "other gradients",
    ),
    "images-in-unequal-shares": Broken(
        "unequal shares",
        make_plan(seeing(), dp=2, zero=(3,), shares=(3, 1)),
        "micro_batches_of_replicas with a tower",
        "set micro_batch_size to 2 and num_micro_batches to 2",
        "fails",
    ),
    "uneven-rounds": Broken(
        "micro batches",
        make_plan(
            LLAMA,
            pp=2,
            schedule=INTERLEAVED,
            virtual_stages=2,
            num_micro_batches=5,
            global_batch_size=5,
        ),
        "interleaved needs micro-batches in multiples of the 2 pipeline ranks, found 5",
        "set num_micro_batches to 6 and global_batch_size to 6",
        "fails",
    ),
    "one-virtual-stage-of-zbv": Broken(
        "virtual stages",
        make_plan(LLAMA, pp=2, schedule=Schedule.ZBV),
        "zbv with virtual_stages 1",
        "to 1f1b",
        "fails",
    ),
    "one-virtual-stage-of-interleaved": Broken(
        "virtual stages",
        make_plan(LLAMA, pp=2, schedule=INTERLEAVED),
        "interleaved with virtual_stages 1",
        "to 1f1b",
        "fails",
    ),
    "lists-that-wait-for-each-other": Broken(
        "action lists",
        make_plan(
            LLAMA, pp=2, schedule=Schedule.CUSTOM, actions=("0F0,0B0,0F1,0B1", "1F0,1F1,1B0,1B1")
        ),
        "wait for each other for ever: rank 0 at 0B0",
        "change the order there",
        "fails",
    ),
    "a-list-without-a-pipeline": Broken(
        "action lists",
        make_plan(LLAMA, schedule=Schedule.CUSTOM, actions=("0F0,0B0,0F1,0B1",)),
        "a custom schedule on 1 pipeline rank",
        "set schedule to 1f1b",
        "no effect",
    ),
    "zero-3-split": Broken(
        "split zero",
        make_plan(LLAMA, pp=2, dp=2, zero=(3,), **ZBV),
        "splits the backward pass of a layer of zero 3",
        "set zero to 2 on layer plan embedding-3",
        "fails",
    ),
    # what it costs is counted in tests/executor/pipeline/test_schedule_runs.py
    "full-recompute-split": Broken(
        "split recompute",
        make_plan(LLAMA, pp=2, recompute="full", **ZBV),
        "of a layer that is recomputed in full",
        r"set recompute to \[\] on layer plan block-0",
        "no effect",
    ),
    "a-last-stage-that-recomputes": Broken(  # in time that the schedule has not
        "last stage",
        make_plan(LLAMA, pp=2, recompute="full", schedule=Schedule.SCP, num_micro_batches=4),
        "under scp the last stage has layers of block-0, which are recomputed",
        r"plans with recompute \[\]",
        "no effect",
    ),
    "tokens-that-read-those-behind-them": Broken(
        "model parts",
        make_plan(dataclasses.replace(GPT, bidirectional=True)),
        "tiny-gpt has bidirectional",
        "set bidirectional to false",
        "no effect",
    ),
    "further-tokens-of-a-tied-table-in-split-passes": Broken(
        "further tokens",
        make_plan(
            dataclasses.replace(GPT, mtp_layers=1),
            pp=2,
            schedule=Schedule.ZBV,
            virtual_stages=2,
            num_micro_batches=4,
        ),
        "tiny-gpt has mtp_layers with a tied table under zbv",
        "set mtp_layers to 0",
        "fails",
    ),
    "scores-dropped-beside-sinks": Broken(
        "dropped scores",
        make_plan(dataclasses.replace(LLAMA, sinks=True, dropout=0.5)),
        "dropout is 0.5 with sinks",
        "set dropout to 0.0",
        "other gradients",
    ),
    "tokens-of-experts-are-dropped": Broken(
        "dropless",
        dataclasses.replace(
            make_plan(MIXTRAL),
            training=dataclasses.replace(make_plan(MIXTRAL).training, expert_capacity=1.25),
        ),
        "expert_capacity is 1.25",
        "set expert_capacity to 0",
        "no effect",
    ),
    "packed-sequences-in-halves": Broken(
        "packed sequences",
        with_training(
            with_pipeline(make_plan(LLAMA, tp=2), tp_overlap=2), documents=Documents(mean=4)
        ),
        "documents of 4 tokens on average, with tp_overlap 2",
        "leave out documents",
        "fails",
    ),
    "three-experts-on-two-ranks": Broken(
        "expert parallel",
        make_plan(dataclasses.replace(MIXTRAL, num_experts=3), dp=2, ep=2),
        "ep 2 does not divide the 3 experts",
        "set ep to 1",
        "fails",
    ),
    "a-dispatch-that-runs-again": Broken(
        "mixture",
        make_plan(MIXTRAL, recompute=("dispatch",)),
        "of the experts only activation can run again",
        r"set recompute to \[\] on layer plan block-0",
        "fails",
    ),
    "operators-on-the-host-that-are-not-there": Broken(
        "kept on host",
        with_layer_plan(GPT1, "block-0", keep_on_host=("fc1", "fc3")),
        "keep_on_host: it names fc3, the layer has norm1,",
        r"set keep_on_host to \['fc1'\]",
        "no effect",
    ),
    "divided-rows-on-the-host": Broken(
        "lookup",
        with_layer_plan(make_plan(LLAMA, tp=2), "embedding-0", offload=(Offload.LOOKUP,)),
        "offload has lookup: tp 2 divides the rows of the token table",
        r"set offload to \[\]",
        "fails",
    ),
    "half-of-a-tied-table-on-the-host": Broken(
        "tied",
        with_layer_plan(GPT1, "embedding-0", offload=(Offload.LOOKUP,)),
        "embedding has zero 0 with its table on the host and the head zero 0:",
        r"offload to \['lookup'\] on layer plan head-0",
        "no effect",
    ),
    "half-of-a-foreign-block-again": Broken(
        "modules",
        family_plan("llama", recompute=("norm1",)),
        "recompute names norm1, it is all operators of a block or none",
        r"set recompute to \[\] on layer plan block-0",
        "no effect",
    ),
    "adapters-of-a-foreign-module": Broken(
        "fine tuning",
        with_training(
            family_plan("llama"), fine_tuning=FineTuning(lora_rank=2, lora_targets=("qkv",))
        ),
        "fine_tuning of a module that is not the executor's own",
        "module to null",
        "fails",
    ),
    "8-bit-base-of-zero-3": Broken(
        "eight bits",
        make_plan(
            GPT,
            dp=2,
            zero=(3,),
            fine_tuning=FineTuning(lora_rank=2, lora_targets=("qkv",), base_bits=8),
        ),
        "layer_plans.block-3: zero is 3 with base_bits 8",
        "set zero to 2 on layer plan block-3",
        "other bytes",
    ),
    "product formats": Broken(
        "product formats",
        with_training(make_plan(GPT, precision=BF16), products=ProductFormat.FP8_CURRENT),
        "products is fp8-current",
        "products",
        "no effect",
    ),
    "bf16-states": Broken(
        "state precision",
        with_training(
            make_plan(GPT, precision=BF16),
            stack=NEUTRAL.keeping(StatePrecision.BF16_MOMENTS),
            optimizer=Optimizer.ADAFACTOR,
        ),
        "4 bytes of a copy and 2 of a moment, with the optimizer adafactor",
        "master_bytes and moment_bytes to 4",
        "other bytes",
    ),
    "fp8-moments": Broken(
        "state precision",
        with_training(
            make_plan(GPT, precision=BF16),
            stack=NEUTRAL.keeping(StatePrecision.FP8_MOMENTS),
        ),
        "4 bytes of a copy and 1 of a moment, with moments in fp8",
        "master_bytes and moment_bytes to 4",
        "other bytes",
    ),
    "bf16-gradients": Broken(
        "gradient precision",
        with_training(make_plan(GPT, precision=BF16), gradient_precision=BF16),
        "gradient_precision is bf16",
        "to fp32",
        "other bytes",
    ),
    "muon-with-states-on-the-host": Broken(
        "optimizer",
        with_layer_plan(
            with_training(GPT1, optimizer=Optimizer.MUON), "block-0", offload=(Offload.STATES,)
        ),
        "optimizer is muon, and the host has states",
        "set optimizer to adam",
        "no effect",
        like=with_training(GPT1, optimizer=Optimizer.MUON),  # only the time has no price
    ),
    "long-sequences": Broken(
        "positions",
        with_training(GPT1, seq_length=17),
        "seq_length is 17, the model's max_seq_length 16",
        "seq_length to 16",
        "fails",
    ),
    "odd-rotary": Broken(
        "rotary pairs",
        make_plan(dataclasses.replace(LLAMA, rotary_fraction=0.4)),
        "0.4 of head_dim 8 is 3 features",
        "to 0.5",
        "fails",
    ),
    "no-placement": Broken(
        "placements",
        with_layer_plan(
            TP2,
            "block-0",
            operators={
                name: placement
                for name, placement in TP2.layer_plans["block-0"].operators.items()
                if name != "norm1"
            },
        ),
        "operator norm1: it has no placement",
        r"set input to \[\], output to \[\]",
        "fails",
    ),
    "partial-sums-called-whole": Broken(
        "placements",
        with_operator(
            TP2, "block-0", "fc2", parameters={"weight": ("Shard(1)@tp",), "bias": ("Shard(0)@tp",)}
        ),
        r"operator fc2: bias Shard\(0\) with weight Shard\(1\)",
        r"bias to \[\]",
        "fails",
    ),
    "attention-over-half-a-sequence": Broken(
        "placements",
        with_layer_plan(
            TP2,
            "block-0",
            operators={
                **TP2.layer_plans["block-0"].operators,
                "attention": OperatorPlacement(input=("Shard(1)@tp",), output=("Shard(1)@tp",)),
            },
        ),
        "attention: it cannot be divided by sequence: queries need every key",
        r"set input to \[.*, output to \[",
        "other gradients",
    ),
    "norm-over-the-batch-of-both-ranks": Broken(
        "over data",
        with_layer_plan(
            GPT2,
            "block-0",
            operators={
                operator.name: OperatorPlacement(
                    **dataclasses.asdict(placements(operator, FC1_OVER_DATA))
                )
                for operator in build_graph(GPT, GPT2.training, 1).block.operators
            }
            | {"norm1": OperatorPlacement()},
        ),
        "operator norm1 has placements that dp 2 x tp 1 cannot give it",
        "set every operator to Megatron's placement",
        "other gradients",
    ),
    "kv-heads": Broken(
        "divisible",
        make_plan(dataclasses.replace(LLAMA, num_kv_heads=1), tp=2),
        "tp 2 does not divide num_kv_heads 1",
        "tp 1, dp 2",
        "fails",
    ),
    "ffn": Broken(
        "divisible",
        make_plan(dataclasses.replace(GPT, ffn_hidden_size=61), tp=2),
        r"tp 2 does not divide fc1.weight of shape \(61, 32\)",
        "tp 1, dp 2",
        "other bytes",
    ),
    "odd-sequence": Broken(
        "divisible",
        with_training(make_plan(GPT, tp=2, sp=True), seq_length=15),
        "does not divide seq_length 15",
        "tp 1, dp 2",
        "fails",
    ),
    "tied-on-one-stage": Broken(
        "tied",
        with_layer_plan(make_plan(GPT, dp=2, zero=(1,)), "head-1", zero=2),
        "embedding has zero 1 over 2 ranks and the head zero 2",
        r"set zero to 2, zero_ranks to 2 and offload to \[\] on layer plan embedding-1",
        "other bytes",
    ),
    "tied-half-on-the-host": Broken(
        "tied",
        with_layer_plan(GPT1, "embedding-0", offload=(Offload.STATES,)),
        "embedding has zero 0 on the host and the head zero 0:",
        r"offload to \['states'\] on layer plan head-0",
        "other bytes",
    ),
    "zero-ranks": Broken(
        "zero ranks",
        with_layer_plan(make_plan(LLAMA, dp=2, zero=(3,)), "block-3", zero_ranks=3),
        "zero_ranks 3 does not divide dp 2",
        "set zero_ranks to 2 on layer plan block-3",
        "fails",
    ),
    "zero-by-operator-of-a-mixture": Broken(
        "zero by operator",
        with_layer_plan(make_plan(MIXTRAL, dp=2, zero=(1,)), "block-1", own_zero={"fc1": 3}),
        "own_zero names operators of a mixture of experts",
        "leave own_zero out of layer plan block-1",
        "no effect",
    ),
    "tied-on-two-stages": Broken(
        "tied",
        ZERO_APART,
        "tied embedding has zero 0 and the head zero 1 over 2",
        r"set zero to 1, zero_ranks to 2 and offload to \[\] on layer plan embedding-0",
        "fails",
    ),
    "tied-columns-and-rows": Broken(
        "tied tables",
        with_operator(
            TP2,
            "embedding-0",
            "tokens",
            parameters={"weight": ("Shard(1)@tp",)},
            output=("Shard(2)@tp",),
        ),
        "embedding-0 divides the tied table in another way than head head-0",
        r"set tokens of layer plan embedding-0 to weight \['Shard\(0\)@tp'\] and output \[\]",
        "fails",
    ),
    "recompute-what-is-not-there": Broken(
        "recompute names",
        make_plan(GPT, recompute=("rotary", "norm1")),
        "it names rotary, the layer has norm1, qkv",
        r"set recompute to \['norm1'\]",
        "fails",
    ),
    "recompute-a-dropout": Broken(
        "recomputed dropout",
        make_plan(DROPOUT, recompute=("residual1", "norm2")),
        "residual1 draws a dropout mask",
        r"set recompute to \['norm2'\]",
        "fails",
    ),
    "a-budget-that-is-too-small": Broken(
        "chunks",
        starved(CHUNKED),
        r"has device_bytes \d+, it needs",
        r"set device_bytes to \d+",
        "fails",
    ),
    "blocks-in-chunks-as-halves": Broken(
        "chunks",
        with_pipeline(chunked_plan(AMPLE, tp=2), tp_overlap=3),
        "tp_overlap 3 with chunks",
        "set tp_overlap to 0",
        "fails",
    ),
    "an-optimizer-on-the-host-without-chunks": Broken(
        "homes",
        with_layer_plan(GPT1, "block-0", offload=(Offload.OPTIMIZER,)),
        "offload has optimizer, of no block in chunks",
        r"set offload to \[\] on layer plan block-0",
        "no effect",
    ),
    "pieces-of-unequal-length": Broken(
        "context pieces",
        with_training(make_plan(GPT, cp=2, form=ContextForm.RING), seq_length=14),
        "seq_length is 14, which has no 4 equal pieces for cp 2",
        "set seq_length to 12",
        "other gradients",
    ),
    "fewer-heads-than-ranks": Broken(
        "context heads",
        make_plan(
            dataclasses.replace(GPT, num_heads=2, num_kv_heads=2, head_dim=16),
            cp=4,
            form=ContextForm.ALL_TO_ALL,
        ),
        "all-to-all: cp 4 does not divide the 2 heads of a rank",
        "set context_form to ring",
        "fails",
    ),
    "keys-of-one-and-a-half-ranks": Broken(
        "context heads",
        make_plan(
            dataclasses.replace(LLAMA, num_heads=6, num_kv_heads=3, hidden_size=48),
            cp=2,
            form=ContextForm.ALL_TO_ALL,
        ),
        "all-to-all: 2 ranks cannot have equal parts of the 3 heads of keys",
        "set context_form to ring",
        "fails",
    ),
    "scores-that-are-kept": Broken(
        "context attention",
        make_plan(GPT, cp=2, form=ContextForm.RING, attention=AttentionKernel.UNFUSED),
        "attention is unfused with cp 2",
        "set attention to flash",
        "other gradients",
    ),
    "a-mask-on-each-rank": Broken(
        "context attention",
        make_plan(DROPOUT, cp=2, form=ContextForm.RING),
        "dropout is 0.5 with cp 2",
        "set dropout to 0.0",
        "other gradients",
    ),
    "a-foreign-module-with-half-a-sequence": Broken(
        "context alone",
        family_plan("llama", cp=2, form=ContextForm.RING),
        "cp is 2 with a module that is not the executor's own",
        "set cp to 1, context_form to null and dp to 2",
        "other gradients",
    ),
    "norms-behind-halves": Broken(
        "halves",
        with_pipeline(
            make_plan(dataclasses.replace(LLAMA, qk_norm=QkNorm.HEAD), tp=2), tp_overlap=2
        ),
        "tp_overlap 2 with blocks that have qk_norm",
        "set tp_overlap to 0",
        "other gradients",
    ),
    "half-a-sequence": Broken(
        "halves",
        with_pipeline(make_plan(GPT, tp=2, num_micro_batches=8), tp_overlap=2),
        "micro-batches of 1, which have no two equal",
        "set tp_overlap to 0",
        "fails",
    ),
}


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(make_plan(), id="one-rank"),
        pytest.param(make_plan(pp=2, dp=2, tp=2, sp=True, zero=(1,)), id="all-axes"),
        pytest.param(make_plan(pp=4, num_micro_batches=4), id="pp4"),
    ],
)
def test_a_good_plan_is_accepted(plan):
    validate(plan)


@pytest.mark.parametrize("name", BROKEN)
def test_a_plan_that_cannot_run_is_refused_with_what_is_wrong_and_the_nearest_one_that_can(name):
    broken = BROKEN[name]

    with pytest.raises(ConfigError, match=broken.message) as refused:
        validate(broken.plan)

    rule, refusal = next(refusals(broken.plan))
    assert rule.name == broken.rule
    assert rule.why in refused.value.message
    assert refused.value.hint == refusal.action
    assert re.search(broken.hint, refusal.action)
    nearest = nearest_legal(broken.plan)
    assert nearest is not None
    validate(nearest)


def test_all_rules_are_asked_where_no_number_of_micro_batches_is_legal():
    plan = with_pipeline(PP2, schedule=Schedule.ZBV, virtual_stages=3)

    assert [
        refusal.nearest for rule, refusal in refusals(plan) if rule.name == "micro batches"
    ] == [None]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:To construct DTensor from torch.Tensor:UserWarning")
@pytest.mark.parametrize("name", BROKEN)
def test_a_refused_plan_does_not_train_what_it_says(name):
    broken = BROKEN[name]

    if broken.effect == "fails":
        assert isinstance(attempt(broken.plan), str)
        return
    attempted = attempt(broken.plan, limit_s=60.0)
    assert not isinstance(attempted, str), attempted
    if broken.effect == "other bytes":
        assert any(predicted != measured for predicted, measured in attempted.states.values())
    elif broken.effect == "no effect":
        like = attempt(broken.like or _less_wrong(broken.plan), limit_s=60.0)
        assert attempted.losses == like.losses
    else:
        expected = run_reference(_alone(broken.plan))
        assert worst_gradient(attempted, expected)[0] > 1000 * GRADIENT_TOLERANCE


def _alone(plan: Plan) -> Plan:
    return dataclasses.replace(plan, mesh=Mesh(pp=1, dp=1, tp=1))


def _less_wrong(plan: Plan) -> Plan:
    nearest = nearest_legal(plan)
    assert nearest is not None
    return nearest


def test_halves_of_blocks_of_several_classes_are_refused_before_all_rules():
    model = dataclasses.replace(LLAMA, blocks=(BlockRun(window=4), BlockRun()))
    plan = with_pipeline(make_plan(model, tp=2), tp_overlap=2)

    validate(make_plan(model, tp=2))
    with pytest.raises(ConfigError, match="of 2 classes, window-4, full, with tp_overlap 2: chunk"):
        validate(plan)

    assert [rule.name for rule, _ in refusals(plan)] == ["alike blocks"]
    assert nearest_legal(plan) is None


def test_every_rule_has_a_plan_that_it_refuses():
    assert {broken.rule for broken in BROKEN.values()} == {rule.name for rule in RULES}


def test_the_documentation_lists_the_rules_as_they_are():
    text = (Path(__file__).parents[3] / "docs" / "design" / "executor.md").read_text(
        encoding="utf-8"
    )
    table = text.partition("| rule | why | what to do |\n|---|---|---|\n")[2]

    assert table == "".join(f"| {rule.name} | {rule.why} | {rule.action} |\n" for rule in RULES)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("nope", id="no-layer-plan"),
        pytest.param("block-0", id="wrong-kind"),
    ],
)
def test_stages_of_unknown_or_wrong_layer_plans_are_refused(name):
    stage = StagePlan(rank=0, layers=(LayerRun(plan=name, first=0, last=0),))
    with pytest.raises(ConfigError, match=r"'nope' is not among|its plan block-0 is of kind block"):
        validate(with_stages(PP2, stage))


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(
            make_plan(GPT, pp=2, num_micro_batches=1, schedule=GPIPE),
            id="gpipe",
            marks=pytest.mark.slow,
        ),
        pytest.param(make_plan(LLAMA, pp=2, num_micro_batches=1), id="1f1b"),
        pytest.param(
            with_layer_plan(
                make_plan(MIXTRAL, dp=2, ep=2, zero=(1,)), "block-1", offload=(Offload.STATES,)
            ),
            id="experts-on-the-host",
        ),
    ],
)
def test_what_looks_wrong_and_is_not_refused_trains_right(plan):
    validate(plan)

    attempted, expected = attempt(plan), run_reference(_alone(plan))

    assert worst_gradient(attempted, expected)[0] <= GRADIENT_TOLERANCE
    assert attempted.losses == pytest.approx(expected.losses, rel=LOSS_TOLERANCE)
    assert all(predicted == measured for predicted, measured in attempted.states.values())
