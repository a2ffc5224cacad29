"""Valid files of every kind, made once by the program itself; every mutation starts from one."""

from __future__ import annotations

import functools
import json
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from benchmarks.commands.fuzzing.inputs import Input, Program
from benchmarks.commands.fuzzing.server import ROOT, Server

SMALL = "--global-batch-size 4 --seq-length 16 --gpu cpu --precision fp32 --stack parplan"
TRACED = "--gpu cpu --precision fp32 --global-batch-size 4 --seq-length 16 --stack parplan"
GPT = "gpt-tiny"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The making of a seed.

    It is `make`, or a command that writes `output` from the seeds in `needs` and the files in
    `files`.
    """

    command: str = ""
    output: str = ""
    make: Callable[[], bytes] | None = None
    program: Program = Program.PLAN
    needs: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)
    more_outputs: tuple[str, ...] = ()
    torch: bool = False


def _estimate(
    line: str,
    *,
    model: str = GPT,
    needs: Mapping[str, str] | None = None,
    files: Mapping[str, bytes] | None = None,
) -> Recipe:
    return Recipe(
        command=f"estimate --model {model} {SMALL} {line} -o plan.yaml",
        output="plan.yaml",
        needs=needs or {},
        files=files or {},
    )


def _config(**values: object) -> bytes:
    return json.dumps(values, indent=1).encode()


_LLAMA = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
}
CONFIGS: Mapping[str, bytes] = {
    "llama": _config(model_type="llama", attention_bias=False, mlp_bias=False, **_LLAMA),
    "mistral": _config(model_type="mistral", sliding_window=None, **_LLAMA),
    "qwen2": _config(model_type="qwen2", use_sliding_window=False, **_LLAMA),
    "mixtral": _config(
        model_type="mixtral",
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=None,
        **_LLAMA,
    ),
    "gemma": _config(
        model_type="gemma",
        head_dim=16,
        hidden_activation="gelu_pytorch_tanh",
        **{**_LLAMA, "hidden_act": "gelu_pytorch_tanh"},
    ),
    "phi3": _config(model_type="phi3", pad_token_id=0, **_LLAMA),
    "gpt2": _config(
        model_type="gpt2",
        n_embd=64,
        n_layer=2,
        n_head=4,
        n_positions=64,
        vocab_size=256,
        activation_function="gelu_new",
        resid_pdrop=0.1,
    ),
    "gpt_neox": _config(
        model_type="gpt_neox",
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=256,
        vocab_size=256,
        max_position_embeddings=64,
        rotary_pct=0.25,
        hidden_act="gelu",
        use_parallel_residual=True,
    ),
    "opt": _config(
        model_type="opt",
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        ffn_dim=256,
        vocab_size=256,
        max_position_embeddings=64,
        activation_function="relu",
        word_embed_proj_dim=64,
        do_layer_norm_before=True,
    ),
}
TRACED_CONFIGS: Mapping[str, bytes] = {
    **{name: CONFIGS[name] for name in ("llama", "gpt2", "mixtral")},
    "t5": _config(
        model_type="t5",
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=4,
        vocab_size=256,
        decoder_start_token_id=0,
        feed_forward_proj="relu",
    ),
    "bert": _config(
        model_type="bert",
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        vocab_size=256,
        max_position_embeddings=64,
    ),
    "vit": _config(
        model_type="vit",
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        image_size=16,
        patch_size=8,
        num_channels=3,
    ),
    "deepseek_v3": _config(
        model_type="deepseek_v3",
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        first_k_dense_replace=1,
        vocab_size=256,
        max_position_embeddings=64,
    ),
}

_RANKS = "\n".join(
    f"#  Rank {rank:2d} Group  0 Pid   {1000 + rank} on     node-0 device {rank:2d} [0x0f] GPU"
    for rank in range(8)
)
_HALF = "{time:>9}  {alg:6.2f}  {bus:6.2f}"


def _nccl_row(n_bytes: int, time_us: float) -> str:
    half = _HALF.format(
        time=time_us, alg=n_bytes / time_us / 1e3, bus=1.75 * n_bytes / time_us / 1e3
    )
    return f"{n_bytes:>12}  {n_bytes // 4:>12}  float     sum      -1{half}      0{half}      0"


NCCL = (
    "\n".join(
        (
            "# Collective test starting: all_reduce_perf",
            (
                "# nThread 1 nGpus 1 minBytes 1048576 maxBytes 268435456 step: "
                "256(factor) warmup iters: 5 iters: 30 agg iters: 1 validation: 1"
            ),
            "#",
            "# Using devices",
            _RANKS,
            "#",
            (
                "#       size         count      type   redop    root     time   algbw   "
                "busbw #wrong     time   algbw   busbw #wrong"
            ),
            (
                "#        (B)    (elements)                               (us)  (GB/s)  "
                "(GB/s)            (us)  (GB/s)  (GB/s)       "
            ),
            _nccl_row(2**20, 40.0),
            _nccl_row(2**24, 150.0),
            _nccl_row(2**28, 2000.0),
        )
    ).encode()
    + b"\n"
)
SCHEDULES: tuple[tuple[int, bytes], ...] = (
    (2, b"0F0,0F1,0B0,0F2,0B1,0F3,0B2,0B3\n1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3\n"),
    (2, b"0F0,0F1,0F2,0F3,0B0,0B1,0B2,0B3\n1F0,1F1,1F2,1F3,1B0,1B1,1B2,1B3\n"),
    (
        2,
        b"0F0,0F1,2F0,2F1,0F2,0F3,2F2,2F3,2B0,2B1,0B0,0B1,2B2,2B3,0B2,0B3\n"
        b"1F0,1F1,3F0,3B0,3F1,3B1,1F2,1F3,3F2,3B2,3F3,3B3,1B0,1B1,1B2,1B3\n",
    ),
    (
        2,
        b"0F0,0F1,0I0,0W0,0F2,0I1,0W1,0F3,0I2,0W2,0I3,0W3\n1F0,1I0,1F1,1I1,1W0,1W1,1F2,1I2,1F3,1I3,1W2,1W3\n",
    ),
)
DESCRIBED: Mapping[str, Recipe] = {
    "plan-one": _estimate("--gpus 1 --zero 0"),
    "plan-pp2-tp2": _estimate(
        "--gpus 4 --gpus-per-node 2 --pp 2 --tp 2 --sequence-parallel --recompute selective"
    ),
    "plan-dp4-zero3": _estimate("--gpus 4 --dp 4 --zero 3 --zero-ranks 2 --recompute full"),
    "plan-interleaved": _estimate("--gpus 2 --pp 2 --virtual-stages 2"),
    "plan-zbv": _estimate("--gpus 2 --pp 2 --schedule zbv"),
    "plan-early": _estimate("--gpus 2 --pp 2 --schedule early-recompute --recompute full"),
    "plan-chunks": _estimate(
        "--gpus 2 --dp 2 --offload optimizer,parameters --host-blocks 2 --zero 3"
    ),
    "plan-experts": _estimate("--gpus 4 --dp 4 --ep 2 --zero 1", model="mixtral-tiny"),
    "plan-overlap": _estimate("--gpus 2 --tp 2 --micro-batch-size 2 --tp-overlap 2"),
    "plan-custom": _estimate(
        "--gpus 2 --pp 2 --schedule-file lists.csv", files={"lists.csv": SCHEDULES[0][1]}
    ),
    "plan-host": _estimate("--gpus 2 --dp 2 --offload states,activations --zero 1"),
    "plan-llama": _estimate(
        "--gpus 2 --tp 2 --module huggingface",
        model="config.json",
        files={"config.json": CONFIGS["llama"]},
    ),
}
TRACED_PLANS: Mapping[str, Recipe] = {
    "traced-one": Recipe(
        command=f"--model config.json --trace --gpus 1 {TRACED} -o plan.yaml --time-limit 5",
        output="plan.yaml",
        files={"config.json": CONFIGS["gpt2"]},
        torch=True,
    ),
    "traced-two": Recipe(
        command=f"--model config.json --trace --gpus 2 --pp 2 {TRACED} -o plan.yaml --time-limit 5",
        output="plan.yaml",
        files={"config.json": CONFIGS["gpt2"]},
        torch=True,
    ),
}


def _own_profile() -> bytes:
    """Return the profile of an invented machine, with a few records of every kind."""
    from parplan.profiles.machines.machine_catalog import cluster_document
    from parplan.profiles.machines.shipped_profiles import shipped_profile
    from parplan.profiles.machines.user_profile import (
        PROFILE_VERSION,
        ProfileEnvironment,
        UserProfile,
        profile_to_yaml,
    )
    from tests.helpers.synthetic_profiles import CLUSTER, Machine

    here = ProfileEnvironment(
        date="2026-11-21",
        device="NVIDIA A100-SXM4-80GB",
        num_devices=8,
        torch="2.13.0+cu130",
        num_sms=108,
        driver="580.10",
        cuda="13.0",
        gpu_links={"NV12": 28},
        nic_links={"PXB": 16},
        max_sm_clock_mhz=1410.0,
    )
    return profile_to_yaml(
        UserProfile(
            profile_version=PROFILE_VERSION,
            device="a100-80gb",
            precision="bf16",
            environment=here,
            cluster=cluster_document(CLUSTER),
            profile=shipped_profile("a100-80gb"),
            records=Machine().every()[::9],
        )
    ).encode()


def _comm_file() -> bytes:
    """Return a file of parplan.profiles.profile_comm with the records of nccl-tests."""
    from parplan.profiles.documents.schema import document
    from parplan.profiles.profiler.communication.comm_file import COMM_VERSION, CommFile
    from parplan.profiles.profiler.communication.nccl_tests import nccl_tests_records

    file = CommFile(
        comm_version=COMM_VERSION,
        date="2026-11-21",
        device="NVIDIA A100-SXM4-80GB",
        backend="nccl",
        torch="2.13.0",
        nodes=1,
        ranks_per_node=8,
        records=tuple(nccl_tests_records(NCCL.decode())),
    )
    return yaml.safe_dump(document(file), sort_keys=False, width=120).encode()


_EXPORTED = "estimate --model gpt-tiny --gpus 8 --gpu a100-80gb --global-batch-size 8"
RECIPES: Mapping[str, Recipe] = {
    **DESCRIBED,
    "plan-exported": Recipe(
        command=f"{_EXPORTED} --dp 8 --zero 3 --stack torchtitan -o plan.yaml", output="plan.yaml"
    ),
    "plan-exported-pp": Recipe(
        command=f"{_EXPORTED} --dp 2 --tp 2 --pp 2 --stack megatron-core -o plan.yaml",
        output="plan.yaml",
    ),
    **TRACED_PLANS,
    "run": Recipe(
        command="plan.yaml --steps 4 --run-json run.json",
        output="run.json",
        program=Program.EXECUTOR,
        needs={"plan.yaml": "plan-one"},
        torch=True,
    ),
    "calibrated": Recipe(
        command="calibrate run.json -o mine.yaml",
        output="mine.yaml",
        needs={"run.json": "run"},
        torch=True,
    ),
    "profile": Recipe(make=_own_profile),
    "comm": Recipe(make=_comm_file),
    "checkpoint": Recipe(
        command="plan.yaml --steps 2 --checkpoint-dir saved --checkpoint-every 1 --no-record",
        output="saved/step-000002/checkpoint.json",
        program=Program.EXECUTOR,
        needs={"plan.yaml": "plan-one"},
        torch=True,
        more_outputs=("saved/step-000002/.metadata", "saved/step-000002/__0_0.distcp"),
    ),
    "plan-profiled": _estimate(
        "--gpus 2 --dp 2 --profile mine.yaml --force-profile", needs={"mine.yaml": "profile"}
    ),
}


class Seeds:
    """The seeds in a folder; missing ones are made."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def missing(self, names: Iterable[str]) -> set[str]:
        """Return the missing seeds among these and their ingredients."""
        known = {name for name in names if not (self.folder / name).exists()}
        return known | (
            self.missing(needed for name in known for needed in RECIPES[name].needs.values())
            if known
            else set()
        )

    def make(self, name: str, server: Server) -> None:
        """Make a seed and its ingredients. Raises RuntimeError if the program fails."""
        recipe = RECIPES[name]
        if (self.folder / name).exists():
            return
        if recipe.make:
            (self.folder / name).write_bytes(recipe.make())
            return
        files = dict(recipe.files)
        for file_name, needed in recipe.needs.items():
            self.make(needed, server)
            files[file_name] = (self.folder / needed).read_bytes()
        given = Input(
            kind="seed",
            number=0,
            program=recipe.program,
            arguments=tuple(shlex.split(recipe.command)),
            files=files,
        )
        ended = server.run(given, (recipe.output, *recipe.more_outputs))
        if ended.code or recipe.output not in ended.files:
            raise RuntimeError(
                f"{name}: {recipe.command}: {ended.code}\n{ended.stdout}{ended.stderr}{ended.stack}"
            )
        for number, output in enumerate(recipe.more_outputs):
            (self.folder / f"{name}-{number}").write_bytes(ended.files[output])
        (self.folder / name).write_bytes(ended.files[recipe.output])

    @functools.cache  # noqa: B019 - a run has one of these
    def content(self, name: str) -> bytes:
        """Return the bytes of a seed."""
        return (self.folder / name).read_bytes()

    @functools.cache  # noqa: B019
    def tree(self, name: str) -> Any:
        """Return the document of a seed, which no caller changes."""
        return parsed(self.content(name))


def parsed(content: bytes) -> Any:
    """Return a YAML or JSON document."""
    return yaml.load(content, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))


@functools.cache
def shipped(folder: str, name: str) -> bytes:
    """Return a packaged YAML file."""
    return (ROOT / "configs" / folder / f"{name}.yaml").read_bytes()


@functools.cache
def shipped_tree(folder: str, name: str) -> Any:
    """Return the document of a packaged YAML file."""
    return parsed(shipped(folder, name))


@functools.cache
def measured_steps() -> bytes:
    """Return the head of the shipped table of measured steps, of several sources."""
    rows = (
        (ROOT / "profiles" / "data" / "published_steps.csv").read_bytes().splitlines(keepends=True)
    )
    return b"".join((rows[0], *rows[1::90]))


def tokens(dtype: str = "uint16", count: int = 400) -> bytes:
    """Return token ids below 100."""
    return (np.arange(count) % 100).astype(dtype).tobytes()
