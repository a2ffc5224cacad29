"""Logs of training runs in the formats of their launchers, with made-up times."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

_BEFORE = {  # of Llama 2 7B on 8 GPUs, as Megatron-LM at d98e8a64dd prints its namespace
    "add_bias_linear": False,
    "add_qkv_bias": False,
    "attention_backend": "AttnBackend.auto",
    "attention_dropout": 0.0,
    "bf16": True,
    "context_parallel_size": 1,
    "cp_comm_type": ["p2p"],
    "cpu_offloading_num_layers": 0,
    "data_parallel_sharding_strategy": "no_shard",
    "data_parallel_size": 4,
    "distribute_saved_activations": False,
    "encoder_num_layers": 32,
    "exp_avg_dtype": "torch.float32",
    "exp_avg_sq_dtype": "torch.float32",
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": 2,
    "ffn_hidden_size": 11008,
    "fp8": None,
    "fp8_recipe": "delayed",
    "global_batch_size": 128,
    "group_query_attention": False,
    "hidden_dropout": 0.0,
    "hidden_size": 4096,
    "kv_channels": 128,
    "max_position_embeddings": 4096,
    "micro_batch_size": 1,
    "moe_router_topk": 2,
    "moe_token_dispatcher_type": "allgather",
    "normalization": "RMSNorm",
    "num_attention_heads": 32,
    "num_distributed_optimizer_instances": 1,
    "num_experts": None,
    "num_layers": 32,
    "num_query_groups": 1,
    "optimizer": "adam",
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "pipeline_model_parallel_size": 1,
    "position_embedding_type": "rope",
    "rampup_batch_size": None,
    "recompute_granularity": None,
    "recompute_modules": ["core_attn"],
    "seq_length": 4096,
    "sequence_parallel": True,
    "swiglu": True,
    "tensor_model_parallel_size": 2,
    "untie_embeddings_and_output_weights": True,
    "use_distributed_optimizer": True,
    "vocab_size": None,
    "world_size": 8,
}


def megatron_log(
    steps_ms: Mapping[int, float], *, batch: int = 128, rank: str = "", **arguments: object
) -> str:
    """Returns the log of a run from its arguments to its steps, by iteration."""
    lines = ["------------------------ arguments ------------------------"]
    lines += [
        f"  {name} {'.' * (48 - len(name))} {value}"
        for name, value in sorted((_BEFORE | arguments).items())
    ]
    lines += [
        "-------------------- end of arguments ---------------------",
        "> building HuggingFaceTokenizer tokenizer ...",
        " > padded vocab (size: 32000) with 0 dummy tokens (new size: 32000)",
        "training ...",
    ]
    for iteration, ms in steps_ms.items():
        lines.append(
            f" [2026-08-22 15:22:22.123456] iteration {iteration:8d}/     100 |"
            f" consumed samples: {iteration * batch:12d} |"
            f" elapsed time per iteration (ms): {ms:.1f} |"
            f" throughput per GPU (TFLOP/s/GPU): 400.1 | learning rate: 1.500000E-05 |"
            f" global batch size: {batch:5d} | lm loss: 1.081795E+01 | loss scale: 1.0 |"
            f" grad norm: 1.378 | number of skipped iterations:   0 |"
            f" number of nan iterations:   0 |"
        )
        if iteration == min(steps_ms):
            lines += [
                f"[Rank {number}] (after {iteration} iterations) memory (MB) |"
                f" allocated: 21000.10 | max allocated: {41000 + number:.2f} |"
                f" reserved: 44000.00 | max reserved: {45000 + number:.2f}"
                for number in (0, 1)
            ]
    return "".join(f"{rank}{line}\n" for line in lines)


def titan_log(tokens_per_s: Mapping[int, int], *, ranks: Iterable[int] = (0,)) -> str:
    """Returns the log of Llama 3 8B on 8 GPUs under FSDP, with colours and lines of `ranks`."""
    head = "[titan] 2026-08-22 21:30:21,000 - root - INFO - "
    lines = [
        "CUDA capacity: NVIDIA H100 80GB HBM3 with 79.11GiB memory",
        "Building device mesh with parallelism: pp=1, dp_replicate=1, dp_shard=8, cp=1, tp=1, ep=1",
        "\x1b[34mModel llama3 8B \x1b[31msize: 8,030,261,248 total parameters\x1b[39m",
        "Applied SelectiveAC activation checkpointing to the model",
        "Applied FSDP to the model",
        "Trainer is initialized with local batch size 1, global batch size 8, gradient "
        "accumulation steps 1, sequence length 8192, total steps 100 (warmup 20)",
        "Training starts at step 1",
    ]
    for step, tps in tokens_per_s.items():
        lines.append(
            f"\x1b[31mstep: {step:2}  \x1b[32mloss: {8.1:8.5f}  \x1b[38;2;180;60;0m"
            f"grad_norm: {1.5:7.4f}  \x1b[36mmemory: {50.25:5.2f}GiB(63.52%)  "
            f"\x1b[34mtps: {tps:,}  \x1b[36mtflops: {370.1:,.2f}  \x1b[35mmfu: 37.42%\x1b[39m"
        )
    prefixes = [f"[rank{rank}]:" for rank in ranks]
    return "".join(f"{prefix}{head}{line}\n" for line in lines for prefix in prefixes)


def deepspeed_log(samples_per_s: Mapping[int, float]) -> str:
    """Returns the lines of DeepSpeed's throughput timer."""
    head = "[2026-08-22 12:19:04,123] [INFO] [timer.py:264:stop] "
    return "".join(
        f"{head}epoch=0/micro_step={step * 4}/global_step={step}, "
        f"RunningAvgSamplesPerSec={rate}, CurrSamplesPerSec={rate}, "
        f"MemAllocated=21.5GB, MaxMemAllocated=47.2GB\n"
        for step, rate in samples_per_s.items()
    )


def nemo_log(step_s: Mapping[int, float], batch: int = 128) -> str:
    """Returns the lines of NeMo's progress printer."""
    return "".join(
        f"Training epoch 0, iteration {step}/99 | lr: 4.498e-07 | global_batch_size: {batch} | "
        f"global_step: {step} | reduced_train_loss: 11.03 | train_step_timing in s: {each:.4} | "
        f"consumed_samples: {(step + 1) * batch}\n"
        for step, each in step_s.items()
    )


def trainer_log(step_s: Mapping[int, float]) -> str:
    """Returns the progress bar of the Trainer, whose states return to the start of the line."""
    bars = ["***** Running training *****\n", "  0%|          | 0/100 [00:00<?, ?it/s]"]
    bars += [
        f"\r {step:2d}%|#         | {step}/100 [00:{step:02d}<01:30,  {each:.2f}s/it]"
        for step, each in step_s.items()
    ]
    bars.append("\r 50%|#####     | 2/4 [00:01<00:01,  9.99it/s]")  # an evaluation
    return "".join(bars) + "\n"
