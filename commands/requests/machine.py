"""The cluster and the training of a request, with a phrase for every default."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import gcd
from pathlib import Path
from typing import TYPE_CHECKING

from parplan.commands.options.target_options import TargetOptions
from parplan.commands.requests.document_lengths import documents_of_option
from parplan.profiles.divisors import divisors
from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.hardware import Cluster, Device
from parplan.profiles.machines.machine_catalog import load_cluster, load_stack, with_gpus
from parplan.profiles.machines.pool_documents import load_machine, pools_of_text
from parplan.profiles.machines.unequal_cluster import require_equal
from parplan.profiles.models.fine_tuning import FineTuning
from parplan.profiles.models.spec import Optimizer, Precision, TrainingSpec
from parplan.profiles.product_formats import FORMATS, ProductFormat
from parplan.profiles.stack import AttentionKernel, Stack
from parplan.profiles.state_precision import StatePrecision
from parplan.profiles.units import parse_size

if TYPE_CHECKING:
    from parplan.profiles.machines.user_profile import UserProfile

DEFAULT_GPU = "a100-80gb"
DEFAULT_STACK = "megatron-core"
ASSUMED_JOIN_PHRASE = "the pools meet at the slower of their NICs"
_OF_THE_PROFILE = " (the profile's)"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingDefaults:
    """Values for options that were left open, and their owner for the phrases.

    most_stages    pipeline stages that the model can have, None where that is not known
    """

    global_batch_size: int
    seq_length: int
    whose: str = "the model's"
    stack: str = DEFAULT_STACK
    most_stages: int | None = None

    def batch_for(self, seq_length: int, num_gpus: int) -> tuple[int, str]:
        """Returns the default sequences of a step on a number of GPUs, and their owner.

        An odd part of the number of GPUs divides the batch, or the layers into stages. Where it
        does neither, the batch is the next one that it divides.
        """
        batch, whose = self.batch_of(seq_length)
        odd = num_gpus // (num_gpus & -num_gpus)
        if self.most_stages is None or odd // gcd(odd, batch) <= self.most_stages:
            return batch, whose
        return odd * -(-batch // odd), f"{whose} {batch}, more for {num_gpus} GPUs"

    def batch_of(self, seq_length: int) -> tuple[int, str]:
        """Returns the default sequences of a step with sequences of a length, and their owner.

        Longer sequences keep the tokens of a step: of the divisors of the default batch, the one
        with the nearest number of tokens is taken. It divides over the same numbers of ranks.
        """
        batch = self.global_batch_size
        if seq_length <= self.seq_length:
            return batch, self.whose
        wanted = batch * self.seq_length / seq_length
        nearest = min(divisors(batch), key=lambda count: max(count / wanted, wanted / count))
        return nearest, f"{self.whose} {batch} x {self.seq_length} tokens"


def cluster_and_training(
    target: TargetOptions,
    defaults: TrainingDefaults,
    require: Callable[[Device, TrainingSpec], None] = lambda device, training: None,
    *,
    pools: bool = False,
) -> tuple[Cluster, TrainingSpec, tuple[str, ...]]:
    """Returns the machine, the training, and a phrase for every default that was taken.

    require: a further check, before the user's profile is applied
    pools: the machine may have unequal pools
    Raises ConfigError.
    """
    profile = _profile(target)
    cluster, assumed_cluster = cluster_of(target, profile)
    if not pools or profile or target.host_memory is not None:
        require_equal(cluster, "this request")
    training, assumed_training = training_of(target, defaults, profile, cluster)
    cluster.device.peak(training.precision)
    require(cluster.device, training)
    if profile and target.profile is not None:
        from parplan.profiles.machines.applied_profile import apply_profile

        cluster, training = apply_profile(
            profile, cluster, training, target.profile, force=target.force_profile
        )
    return cluster, training, (*assumed_cluster, *assumed_training)


def _profile(target: TargetOptions) -> UserProfile | None:
    if target.profile is None:
        return None
    from parplan.profiles.machines.user_profile import read_profile

    return read_profile(Path(target.profile))


def cluster_of(
    target: TargetOptions, profile: UserProfile | None
) -> tuple[Cluster, tuple[str, ...]]:
    """Returns the machine to plan for, and the defaults that were taken. Raises ConfigError."""
    cluster, assumed = _cluster(target, profile)
    if target.host_memory is None or cluster.pool_names:
        return cluster, assumed
    return replace(
        cluster, host_memory_bytes=parse_size("--host-memory", target.host_memory)
    ), assumed


def _cluster(target: TargetOptions, profile: UserProfile | None) -> tuple[Cluster, tuple[str, ...]]:
    if target.cluster is not None:
        return _cluster_of_file(target, target.cluster), ()
    if target.gpu is not None and (":" in target.gpu or "+" in target.gpu):
        return pools_of_text(target.gpu, target.gpus, target.gpus_per_node), (ASSUMED_JOIN_PHRASE,)
    if target.gpus is None and (target.gpu or "").isdecimal():
        raise ConfigError(
            f"--gpus is missing, and --gpu {target.gpu} names no GPU",
            hint=f"did you mean --gpus {target.gpu}?",
        )
    if target.gpus is None:
        raise ConfigError(
            "--gpus is missing",
            hint="say how many: --gpus 64, or describe the machine with --cluster FILE",
        )
    whole, assumed = _device(target, profile)
    cluster = with_gpus(whole, target.gpus, target.gpus_per_node)
    return cluster, assumed if target.gpus_per_node else (
        *assumed,
        f"--gpus-per-node {cluster.gpus_per_node}",
    )


def _device(target: TargetOptions, profile: UserProfile | None) -> tuple[Cluster, tuple[str, ...]]:
    if profile is not None and not target.gpu:
        from parplan.profiles.machines.applied_profile import profile_cluster

        measured_on = profile_cluster(profile, str(target.profile))
        if measured_on is not None:
            return measured_on, (f"--gpu {measured_on.device.name}{_OF_THE_PROFILE}",)
    return load_cluster(target.gpu or DEFAULT_GPU, what="GPU"), () if target.gpu else (
        f"--gpu {DEFAULT_GPU}",
    )


def _cluster_of_file(target: TargetOptions, name: str) -> Cluster:
    if target.gpu is not None:
        raise ConfigError("--gpu and --cluster both name the device", hint="leave out --gpu")
    cluster = load_machine(name)
    if target.gpus is None and target.gpus_per_node is None:
        return cluster
    require_equal(cluster, "--gpus or --gpus-per-node beside --cluster")
    return with_gpus(
        cluster, cluster.num_gpus if target.gpus is None else target.gpus, target.gpus_per_node
    )


def _products(target: TargetOptions, stack: Stack, device: Device) -> ProductFormat | None:
    """Returns the narrow format of the products that the options name, or None.

    Raises ConfigError for one that the stack or the device does not run.
    """
    named = target.precision if target.precision in list(ProductFormat) else None
    if target.fp8 and named:
        raise ConfigError(
            f"--fp8 and --precision {named} both name a format", hint="leave out --fp8"
        )
    runs = stack.product_formats
    narrow = ProductFormat(named) if named else None
    if target.fp8:
        narrow = next((each for each in runs if FORMATS[each].peak == "fp8"), None)
        named = "fp8"
    if named is None:
        return None
    if narrow is None or narrow not in runs:
        raise ConfigError(
            f"stack {stack.name} runs no products in {named}",
            hint=f"use one of {', '.join(runs)}"
            if runs
            else "choose another --stack or --precision",
        )
    _require_format(device, narrow)
    return narrow


def _with_states(stack: Stack, target: TargetOptions) -> Stack:
    """Returns the stack with the states that the options name. Raises ConfigError for others'."""
    if target.state_precision is None:
        return stack
    precision = StatePrecision(target.state_precision)
    if precision not in stack.state_precisions:
        raise ConfigError(
            f"stack {stack.name} keeps no states in {precision}",
            hint=f"use one of {', '.join(stack.state_precisions)}, or another --stack",
        )
    return stack.keeping(precision)


def _require_16_bits(target: TargetOptions, precision: Precision) -> None:
    """Raises ConfigError for states in 16 bits beside parameters that are not in bf16."""
    asked = target.state_precision
    if asked in (None, StatePrecision.FP32) or precision is Precision.BF16:
        return
    raise ConfigError(
        f"--state-precision {asked} is of parameters in bf16, they are in {precision}",
        hint="use --precision bf16, or leave out --state-precision",
    )


def _require_format(device: Device, narrow: ProductFormat) -> None:
    """Raises ConfigError for a device without the arithmetic or the scales of a format."""
    needed = FORMATS[narrow]
    device.peak(needed.peak)
    if (device.compute_capability or 0.0) < needed.from_capability:
        raise ConfigError(
            f"{device.name} has no products in {narrow}, which need a compute capability of "
            f"{needed.from_capability:g}",
            hint="use fp8-current, or plan for a later device",
        )


def fine_tuning_of(target: TargetOptions) -> FineTuning | None:
    """Returns the trained part that the options name, None for all of it. Raises ConfigError."""
    if not (target.lora_rank or target.lora_targets or target.freeze):
        if target.base_weights is not None:
            raise ConfigError(
                f"--base-weights {target.base_weights} is of frozen weights, here none is frozen",
                hint="add --lora-rank or --freeze",
            )
        return None
    return FineTuning(
        lora_rank=target.lora_rank or 0,
        lora_targets=target.lora_targets,
        freeze=target.freeze,
        base_bits=8 if target.base_weights == "int8" else 16,
    )


def training_of(
    target: TargetOptions,
    defaults: TrainingDefaults,
    profile: UserProfile | None,
    cluster: Cluster,
) -> tuple[TrainingSpec, tuple[str, ...]]:
    """Returns the training of one step, and a phrase for every default. Raises ConfigError.

    The precision is bf16 by default, and fp16 on a device that has no bf16.
    """
    device = cluster.device
    measured_at, run_by = None, None
    if profile is not None:
        from parplan.profiles.machines.applied_profile import precision_of, stack_of

        measured_at, run_by = precision_of(profile, str(target.profile)), stack_of(profile)
    stack = load_stack(target.stack or run_by or defaults.stack)
    stack = _with_states(stack, target)
    narrow = _products(target, stack, device)
    attention = stack.attention_on(device.compute_capability)
    whose_attention = (
        "the stack's"
        if attention is stack.attention
        else "the stack has no fused kernel for the device"
    )
    has_bf16 = (
        Precision.BF16 in device.peak_flops_per_s or Precision.FP16 not in device.peak_flops_per_s
    )
    usual, why = (Precision.BF16, "") if has_bf16 else (Precision.FP16, " (the device has no bf16)")
    seq_length = defaults.seq_length if target.seq_length is None else target.seq_length
    batch, whose_batch = defaults.batch_for(seq_length, cluster.num_gpus)
    precision = Precision.BF16 if narrow else Precision(target.precision or measured_at or usual)
    _require_16_bits(target, precision)
    training = TrainingSpec(
        global_batch_size=target.global_batch_size or batch,
        seq_length=seq_length,
        precision=precision,
        gradient_precision=Precision(
            target.gradient_precision or (Precision.FP32 if stack.master_bytes else precision)
        ),
        attention=AttentionKernel(target.attention or attention),
        overlap_grad_reduce=stack.overlap_grad_reduce,
        optimizer=Optimizer(target.optimizer or Optimizer.ADAM),
        products=narrow,
        narrow_weights=target.narrow_weights,
        fine_tuning=fine_tuning_of(target),
        expert_imbalance=target.expert_imbalance,
        expert_capacity=target.expert_capacity,
        documents=documents_of_option(target.document_lengths, seq_length),
        stack=stack,
    )
    taken = {
        "global_batch_size": f"{training.global_batch_size} ({whose_batch})",
        "seq_length": f"{training.seq_length} ({defaults.whose})",
        "precision": f"{training.precision}{_OF_THE_PROFILE if measured_at else why}",
        "gradient_precision": training.gradient_precision,
        "optimizer": training.optimizer,
        "stack": f"{stack.name}{_OF_THE_PROFILE if run_by else ''}",
        "attention": f"{training.attention} ({whose_attention})",
    }
    return training, tuple(
        f"--{name.replace('_', '-')} {value}"
        for name, value in taken.items()
        if getattr(target, name) is None
    )
