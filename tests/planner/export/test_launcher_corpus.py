"""Files of launchers as people write them are read right, or refused by the name at fault."""

from __future__ import annotations

import re

import pytest

from parplan.costmodels.layers.recompute import Recompute
from parplan.planner.export.launcher_file import read_launcher_file
from parplan.planner.export.targets import READERS
from parplan.profiles.errors import ConfigError
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.spec import Optimizer, Precision
from parplan.profiles.stack import AttentionKernel
from tests.helpers.launcher_corpus import (
    BRIDGE,
    FSDP2,
    GALVATRON,
    MEGATRON,
    NEMO,
    NEMO_YAML,
    NEOX,
    SWIFT,
    TITAN,
    TOML,
    Case,
)

NONE, SELECTIVE, FULL = Recompute.NONE, Recompute.SELECTIVE, Recompute.FULL
MESH = {"tp": 4, "pp": 2, "dp": 4, "zero": 1, "sequence_parallel": True, "seq_length": 8192}
TITANS = {"gpus": 64, "model": "llama3-8b"}


def megatron(extra: str, **rest) -> Case:
    return Case(name="train.sh", text=MEGATRON, extra=extra, gpus=32, **rest)


def nemo(extra: str, **rest) -> Case:
    return Case(name="nemo.sh", text=NEMO, extra=extra, gpus=16, vocab_size=32000, **rest)


def titan(extra: str, **rest) -> Case:
    return Case(name="titan.sh", text=TITAN, extra=extra, gpus=64, **rest)


def neox(extra: str, **rest) -> Case:
    return Case(name="neox.yml", text=NEOX, extra=extra, gpus=8, vocab_size=50304, **rest)


CASES = {
    "megatron-slurm-arrays": megatron("", said=MESH | {"recompute": NONE, "precision": "bf16"}),
    "megatron-full": megatron(
        "--recompute-granularity full --recompute-method block --recompute-num-layers 4",
        said=MESH | {"recompute": FULL, "recompute_blocks": 4},
    ),
    "megatron-interleaved": megatron(
        "--num-layers-per-virtual-pipeline-stage 4", said={"virtual_stages": 4, "pp": 2}
    ),
    "megatron-fsdp": megatron(
        "--use-custom-fsdp --data-parallel-sharding-strategy optim_grads_params",
        said={"zero": 3},
    ),
    "megatron-local": megatron(
        "--transformer-impl local", said={"attention": AttentionKernel.UNFUSED}
    ),
    "megatron-frozen": megatron("--freeze-LM --freeze-ViT", refused="--freeze-LM: .*--freeze-ViT"),
    "megatron-offload": megatron("--optimizer-cpu-offload", refused="--optimizer-cpu-offload"),
    "megatron-underscores": megatron(
        "--context_parallel_size 2", refused="--context_parallel_size 2: .* parallelism"
    ),
    "megatron-adapters": megatron(
        "--lora-rank 16", refused="train.sh:1\\d: --lora-rank .*adapters"
    ),
    "megatron-zero": megatron(
        "--micro-batch-size 0", refused="--micro-batch-size 0: it must be from 1"
    ),
    "nemo-overrides": nemo(
        "", said={"tp": 2, "dp": 8, "zero": 1, "seq_length": 4096, "micro_batch_size": 1}
    ),
    "nemo-cp": nemo("++model.context_parallel_size=2", said={"cp": 2, "tp": 2, "dp": 4}),
    "nemo-peft": nemo("model.peft.peft_scheme=lora", refused="model.peft.peft_scheme"),
    "nemo-offload": nemo("model.cpu_offloading=True", refused="model.cpu_offloading"),
    "nemo-llama": Case(
        name="llama.sh",
        text=NEMO.replace("megatron_gpt_config", "megatron_llama_config").replace(
            "model.encoder_seq_length=4096 model.data.seq_length=4096", ""
        ),
        gpus=16,
        vocab_size=32000,
        said={"tp": 2, "dp": 8, "seq_length": 4096},
    ),
    "nemo-unknown-base": Case(
        name="t5.sh",
        text=NEMO.replace("megatron_gpt", "megatron_t5"),
        gpus=16,
        refused="megatron_t5_config, which is not in the repository",
    ),
    "nemo-yaml": Case(
        name="nemo.yaml",
        text=NEMO_YAML,
        gpus=32,
        vocab_size=50257,
        said={"tp": 4, "pp": 2, "dp": 4, "recompute": SELECTIVE, "seq_length": 2048},
    ),
    "nemo-yaml-rampup": Case(
        name="nemo.yaml",
        text=NEMO_YAML,
        gpus=32,
        extra="rampup_batch_size: [32, 32, 100]",
        vocab_size=50257,
        refused="rampup_batch_size",
    ),
    "bridge-overrides": Case(
        name="bridge.sh",
        text=BRIDGE,
        gpus=16,
        model="llama3-8b",
        said={"tp": 2, "cp": 2, "dp": 4, "zero": 1, "seq_length": 8192},
    ),
    "bridge-peft": Case(
        name="bridge.sh", text=BRIDGE, gpus=16, extra="peft=lora peft.dim=8", refused="peft"
    ),
    "bridge-zero": Case(
        name="bridge.sh",
        text=BRIDGE.replace("context_parallel_size=2", "context_parallel_size=0"),
        gpus=16,
        model="llama3-8b",
        refused="context_parallel_size 0: it must be from 1",
    ),
    "titan-shipped": titan(
        "", said={"seq_length": 8192, "micro_batch_size": 1, "zero": 3, "recompute": SELECTIVE}
    ),
    "titan-shipped-70b": Case(
        name="titan.sh",
        text=TITAN.replace("llama3_8b", "llama3_70b"),
        gpus=64,
        said={"tp": 8, "dp": 8, "micro_batch_size": 8, "recompute": FULL},
    ),
    "titan-tokens": titan(
        "--training.max_context_length 4096 --training.num_tokens_per_microbatch_per_dp_rank=8192",
        said={"seq_length": 4096, "micro_batch_size": 2},
    ),
    "titan-mode": titan("--activation_checkpoint.mode full", said={"recompute": FULL}),
    "titan-subcommand": titan(
        "--parallelism.pipeline_parallel_degree 2 activation_checkpoint:none",
        said={"pp": 2, "recompute": NONE, "zero": 2},
    ),
    "titan-float8": titan(
        "--model.converters float8", refused="--model.converters float8: .* no price"
    ),
    "titan-narrow-configuration": Case(
        name="titan.sh",
        text=TITAN.replace("llama3_8b", "llama3_8b_mxfp8"),
        refused="llama3_8b_mxfp8: .*precision",
        **TITANS,
    ),
    "titan-toml": Case(
        name="llama3_8b.toml",
        text=TOML,
        gpus=16,
        said={"tp": 2, "dp": 8, "micro_batch_size": 2, "seq_length": 4096, "zero": 3},
    ),
    "titan-toml-layers": Case(
        name="a.toml",
        text=TOML,
        gpus=16,
        extra='[activation_checkpoint]\nmode = "selective"\nselective_ac_option = "1"',
        said={"recompute": FULL},
    ),
    "titan-toml-unknown": Case(
        name="a.toml", text=TOML, gpus=16, extra="zero_bubble = true", refused="zero_bubble"
    ),
    "titan-toml-override": Case(
        name="run.sh",
        text='CONFIG_FILE="./a.toml" NGPU=8 ./run_train.sh --training.seq_len 2048\n',
        gpus=8,
        beside={"a.toml": TOML.replace("EXTRA", "")},
        said={"seq_length": 2048, "tp": 2, "dp": 4},
    ),
    "swift-defaults": Case(
        name="sft.sh",
        text=SWIFT,
        gpus=8,
        said={"tp": 4, "dp": 2, "zero": 1, "recompute": SELECTIVE, "seq_length": 4096},
    ),
    "swift-off": Case(
        name="sft.sh",
        text=SWIFT,
        gpus=8,
        extra="--use_distributed_optimizer false --recompute_granularity none --optimizer sgd",
        said={"zero": 0, "recompute": NONE, "optimizer": Optimizer.SGD_MOMENTUM},
    ),
    "swift-lora": Case(
        name="sft.sh", text=SWIFT, gpus=8, extra="--tuner_type lora", refused="--tuner_type lora"
    ),
    "swift-rlhf": Case(
        name="dpo.sh", text=SWIFT.replace("sft", "rlhf"), gpus=8, refused="megatron rlhf"
    ),
    "neox": neox(
        "",
        said={"pp": 2, "tp": 2, "dp": 2, "recompute": FULL, "precision": Precision.FP16, "zero": 1},
    ),
    "neox-offload": neox(', "checkpoint_in_cpu": true', refused="checkpoint_in_cpu"),
    "neox-experts": neox(', "moe_num_experts": 8', refused="moe_num_experts"),
    "galvatron": Case(
        name="g.json",
        text=GALVATRON.replace('"TP"', '"2,2,2,2"'),
        gpus=8,
        model="gpt-tiny",
        said={"pp": 2, "tp": 2, "dp": 2},
    ),
    "galvatron-unlike": Case(
        name="g.json",
        text=GALVATRON.replace('"TP"', '"2,2,1,1"'),
        gpus=8,
        model="gpt-tiny",
        refused="tp_sizes_enc 2,2,1,1: blocks of unlike degrees",
    ),
    "fsdp2-unknown": Case(
        name="fsdp2.yaml",
        text=FSDP2,
        gpus=8,
        extra="lora_rank: 8",
        model="gpt-tiny",
        refused="lora_rank",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_file_is_read_right_or_refused_by_name(name, tmp_path):
    case = CASES[name]
    path = tmp_path / case.name
    path.write_text(case.text.replace("EXTRA", case.extra))
    for other, text in case.beside.items():
        (tmp_path / other).write_text(text)

    def settings():
        file = read_launcher_file(path, READERS)
        assert file is not None
        file = file.with_stated({"--seq-length": 128} if case.model == "gpt-tiny" else {})
        file = file if case.vocab_size is None else file.with_vocabulary(case.vocab_size)
        spec = load_model(case.model).spec if case.model else file.model()
        return file.settings(spec, case.gpus)

    if case.refused:
        with pytest.raises(ConfigError) as refusal:
            settings()
        assert re.search(case.refused, str(refusal.value)), refusal.value
    else:
        found = settings()
        assert {fact: getattr(found, fact) for fact in case.said} == dict(case.said)
