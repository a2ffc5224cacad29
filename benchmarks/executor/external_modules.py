"""External modules and configs, planned for two CPUs and trained beside one process.

    python benchmarks/executor/external_modules.py [NAME ...]

Each is planned with data parallelism and ZeRO 1, and in two pipeline stages. A cell is "equal" if
losses and gradients are those of one process, or the error with its hint. Each command has a
process of its own, with 8 GiB of address space and a minute. A traceback, a process that has to be
killed and a different result are failures; the exit code is 1 if there is one.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import transformers

import parplan.executor.traced.traced_parity  # loaded once for all children
import parplan.report.plans.summary  # noqa: F401
from parplan import cli
from parplan.profiles.units import GIB
from tests.helpers import zoo

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S, LIMIT_BYTES = 60, 8 * GIB
LAYOUTS = {"dp 2, ZeRO 1": ("--pp", "1", "--zero", "1"), "pp 2": ("--pp", "2")}
FIRST = ("error: ", "hint: ")
# Families by transformers' name, with the class if it is not the causal language model.
FAMILIES: dict[str, str | None] = dict.fromkeys(
    (
        "gpt2",
        "gptj",
        "gpt_neo",
        "gpt_neox",
        "gpt_bigcode",
        "opt",
        "bloom",
        "falcon",
        "mpt",
        "phi",
        "phi3",
        "phimoe",
        "gemma",
        "gemma2",
        "gemma3_text",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_moe",
        "mistral",
        "mixtral",
        "llama",
        "deepseek_v2",
        "deepseek_v3",
        "olmo",
        "olmo2",
        "olmoe",
        "stablelm",
        "starcoder2",
        "granite",
        "granitemoe",
        "cohere",
        "codegen",
        "ctrl",
        "biogpt",
        "xglm",
        "persimmon",
        "nemotron",
        "mamba",
        "mamba2",
        "falcon_mamba",
        "rwkv",
        "reformer",
        "xlnet",
        "gpt_oss",
        "jetmoe",
        "dbrx",
        "jamba",
        "recurrent_gemma",
        "openai-gpt",
        "glm4_moe",
        "ministral",
        "smollm3",
        "helium",
        "bitnet",
        "lfm2",
    )
) | {
    "bert": "BertForMaskedLM",
    "roberta": "RobertaForMaskedLM",
    "distilbert": "DistilBertForMaskedLM",
    "deberta": "DebertaForMaskedLM",
    "deberta-v2": "DebertaV2ForSequenceClassification",
    "electra": "ElectraForMaskedLM",
    "albert": "AlbertForMaskedLM",
    "modernbert": "ModernBertForMaskedLM",
    "longformer": "LongformerForMaskedLM",
    "big_bird": "BigBirdForMaskedLM",
    "funnel": "FunnelForMaskedLM",
    "t5": "T5ForConditionalGeneration",
    "mt5": "MT5ForConditionalGeneration",
    "umt5": "UMT5ForConditionalGeneration",
    "bart": "BartForConditionalGeneration",
    "pegasus": "PegasusForConditionalGeneration",
    "mbart": "MBartForConditionalGeneration",
    "led": "LEDForConditionalGeneration",
    "prophetnet": "ProphetNetForConditionalGeneration",
    "vit": "ViTForImageClassification",
    "deit": "DeiTForImageClassification",
    "swin": "SwinForImageClassification",
    "convnext": "ConvNextForImageClassification",
    "beit": "BeitForImageClassification",
    "resnet": "ResNetForImageClassification",
    "segformer": "SegformerForImageClassification",
    "whisper": "WhisperForConditionalGeneration",
    "clip": "CLIPModel",
    "wav2vec2": "Wav2Vec2ForCTC",
    "dinov2": "Dinov2ForImageClassification",
    "siglip": "SiglipModel",
    "llava": "LlavaForConditionalGeneration",
    "vit_mae": "ViTMAEForPreTraining",
}
SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "n_embd": 32,
    "d_model": 32,
    "dim": 32,
    "word_embed_proj_dim": 32,
    "embedding_size": 32,
    "intermediate_size": 48,
    "n_inner": 48,
    "ffn_dim": 48,
    "d_ff": 48,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "hidden_dim": 48,
    "ffn_hidden_size": 48,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_hidden_layers": 2,
    "n_layer": 2,
    "n_layers": 2,
    "num_layers": 2,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "num_decoder_layers": 2,
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "d_kv": 8,
    "rotary_dim": 4,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
    "state_size": 8,
    "max_position_embeddings": 64,
    "n_positions": 64,
    "max_seq_len": 64,
    "n_ctx": 64,
    "context_length": 64,
    "image_size": 16,
    "patch_size": 4,
    "num_mel_bins": 8,
    "max_source_positions": 16,
    "max_target_positions": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 0,
    "attention_window": 8,
    "block_size": 8,
    "attention_hidden_size": 32,
    "dff": 48,
    "relative_attention_num_buckets": 8,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The end of a command; `failed` is true for an end that is a bug."""

    code: int
    text: str
    seconds: float

    @property
    def failed(self) -> bool:
        said = all(
            any(line.startswith(first) for line in self.text.splitlines()) for first in FIRST
        )
        return (
            "Traceback" in self.text
            or self.code not in (0, 2, 3, 4)
            or (self.code != 0 and not said)
        )

    @property
    def what(self) -> str:
        if "Traceback" in self.text or self.code < 0:
            last = self.text.strip().splitlines()[-1:] or [""]
            return (
                f"KILLED by {-self.code} after {self.seconds:.0f} s"
                if self.code < 0
                else f"TRACEBACK {last[0]}"
            )
        said = [line for line in self.text.splitlines() if line.startswith(FIRST)]
        return " | ".join(said) or self.text.strip().replace("\n", " ")[-200:]


def command(folder: Path, *arguments: str) -> Ended:
    """Run `plan` with these arguments in a child process."""
    started_s, log = time.monotonic(), folder / "log"
    child = os.fork()
    if child == 0:
        os.setsid()
        with log.open("w") as stream:
            os.dup2(stream.fileno(), 1)
            os.dup2(stream.fileno(), 2)
        resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES))
        os.chdir(ROOT)
        try:
            cli.main(args=list(arguments))
        except SystemExit as ended:
            sys.stdout.flush()
            os._exit(int(ended.code or 0))
        except BaseException:
            import traceback

            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        os._exit(0)
    code = _waited(child, started_s)
    return Ended(
        code=code, text=log.read_text(errors="replace"), seconds=time.monotonic() - started_s
    )


def _waited(child: int, started_s: float) -> int:
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() - started_s > LIMIT_S:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return -signal.SIGKILL
        time.sleep(0.02)


def model_of(name: str, folder: Path) -> str:
    """Return the value of --model."""
    if name not in FAMILIES:
        return f"tests.helpers.zoo:{name}"
    default = transformers.AutoConfig.for_model(name)
    values = _small(json.loads(default.to_json_string(use_diff=False)))
    values["model_type"], values["architectures"] = (
        name,
        [FAMILIES[name]] if FAMILIES[name] else None,
    )
    path = folder / "config.json"
    path.write_text(json.dumps(values))
    return str(path)


def _small(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values with small sizes and without dropout."""
    small = {}
    for key, value in values.items():
        if isinstance(value, dict):
            small[key] = _small(value) if key.endswith("config") else value
        elif (
            key in SMALL
            and isinstance(value, int | None)
            and not isinstance(value, bool)
            and value != 0
        ):
            small[key] = SMALL[key]
        elif ("drop" in key or "pdrop" in key) and isinstance(value, float):
            small[key] = 0.0
        elif key == "layer_types" and isinstance(value, list):
            small[key] = value[-2:]
        elif key == "attention_window":
            small[key] = [SMALL[key]] * 2
        elif not key.startswith("_") and key not in (
            "transformers_version",
            "id2label",
            "label2id",
            "torch_dtype",
        ):
            small[key] = value
    if "q_lora_rank" in small:  # latent attention has as many heads for keys
        small["num_key_value_heads"] = small["num_attention_heads"]
    return small


def tried(name: str) -> dict[str, Ended]:
    """Return by layout the end of planning, or of the check of the plan."""
    results: dict[str, Ended] = {}
    with tempfile.TemporaryDirectory() as at:
        folder = Path(at)
        try:
            model = model_of(name, folder)
        except (ValueError, KeyError, TypeError, ImportError, AttributeError) as error:
            return {"config": Ended(code=0, text=f"no config: {error}", seconds=0.0)}
        for layout, pins in LAYOUTS.items():
            plan = folder / "plan.yaml"
            traced = ("--trace",) if model.endswith(".json") else ()
            arguments = (
                "--model",
                model,
                *traced,
                "--gpus",
                "2",
                "--gpu",
                "cpu",
                "--precision",
                "fp32",
                "--global-batch-size",
                "8",
                "--seq-length",
                "16",
                "--time-limit",
                "20",
                *pins,
                "-o",
                str(plan),
            )
            ended = command(folder, *arguments)
            if "hint: use --attention unfused" in ended.text:
                ended = command(folder, *arguments, "--attention", "unfused")
            if ended.code == 0 and not ended.failed:
                ended = command(folder, "check", str(plan), "--execute")
            results[layout] = ended
    return results


def main() -> int:
    torch.set_num_threads(1)
    names, failures = sys.argv[1:] or [*zoo.NAMES, *FAMILIES], 0
    for name in names:
        for layout, ended in tried(name).items():
            failures += ended.failed
            mark = "refused" if ended.text.count("error: ") else "DIFFERENT"
            if ended.failed:
                mark = "FAILED"
            elif ended.code == 0:
                mark = "equal"
            print(
                f"{name:36} {layout:13} {mark:8} {ended.seconds:5.1f} s  "
                f"{'' if mark == 'equal' else ended.what}",
                flush=True,
            )
    print(f"{failures} failures")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
