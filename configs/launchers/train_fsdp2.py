"""Trains a GPT or a Llama model with PyTorch's own parallelism, as a YAML file of settings says.

It needs torch, numpy and PyYAML. It is a start for a program of your own: the model is in
fsdp2_model.py, its parallelism in `build_stage`, the training loop in `train`. One process a GPU:

    torchrun --nproc-per-node 8 train_fsdp2.py fsdp2.yaml --steps 100 --data tokens.bin

Tokens are random without --data. A token file is a flat row of unsigned integers. Without GPUs it
runs on CPUs over gloo. It was written for torch 2.13.
"""

from __future__ import annotations

import argparse
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from fsdp2_model import (
    InputEmbedding,
    ModelStage,
    OutputHead,
    TransformerBlock,
    init_weights,
)
from fsdp2_settings import Fsdp2Settings, MeshSettings, read_settings
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

# Parallelism


class RankMeshes:
    """The device meshes of a run, and this rank's place in them."""

    def __init__(self, mesh: MeshSettings, device: torch.device) -> None:
        self.device = device
        sharded = mesh.shard * mesh.context
        degrees = (mesh.pipeline, mesh.replicate, sharded, mesh.tensor)
        needed = mesh.pipeline * mesh.replicate * sharded * mesh.tensor
        if dist.get_world_size() != needed:
            raise ValueError(
                f"the mesh has {needed} ranks, torchrun started {dist.get_world_size()}"
            )
        self.whole = init_device_mesh(
            device.type, degrees, mesh_dim_names=("pp", "replicate", "shard", "tp")
        )
        self.tensor = self.whole["tp"] if mesh.tensor > 1 else None
        self.states = (
            self.whole["replicate", "shard"] if mesh.replicate > 1 else self.whole["shard"]
        )
        self.pipeline = self.whole["pp"].get_group()
        self.stage = self.whole.get_local_rank("pp")
        replica = self.whole.get_local_rank("replicate") * sharded
        replica += self.whole.get_local_rank("shard")
        self.data_rank, self.context_rank = divmod(replica, mesh.context)
        self.context = None
        if mesh.context > 1:
            by_context = init_device_mesh(
                device.type,
                (mesh.pipeline * mesh.replicate * mesh.shard, mesh.context, mesh.tensor),
                mesh_dim_names=("outer", "context", "tp"),
            )
            self.context = by_context["context"].get_group()


def block_styles(*, sequence_parallel: bool) -> dict[str, ParallelStyle]:
    """Returns the tensor parallelism of a block: columns of qkv and fc1, rows of the others."""
    tokens = Shard(1) if sequence_parallel else Replicate()
    styles: dict[str, ParallelStyle] = {
        "qkv": ColwiseParallel(input_layouts=tokens),
        "attention_out": RowwiseParallel(output_layouts=tokens),
        "fc1": ColwiseParallel(input_layouts=tokens),
        "fc2": RowwiseParallel(output_layouts=tokens),
    }
    if sequence_parallel:
        styles |= {"norm1": SequenceParallel(), "norm2": SequenceParallel()}
    return styles


def head_styles(*, sequence_parallel: bool) -> dict[str, ParallelStyle]:
    """Returns the tensor parallelism of the head, whose logits stay divided for the loss."""
    tokens = Shard(1) if sequence_parallel else Replicate()
    logits = ColwiseParallel(input_layouts=tokens, output_layouts=Shard(-1), use_local_output=False)
    return {"lm_head": logits} | ({"norm": SequenceParallel()} if sequence_parallel else {})


def build_embedding(settings: Fsdp2Settings, meshes: RankMeshes, seed: int) -> InputEmbedding:
    tokens = settings.batch.seq_length // settings.mesh.context
    embedding = InputEmbedding(settings.shape, meshes.context_rank * tokens)
    init_weights(embedding, seed)
    if meshes.tensor is not None:
        styles = {"tokens": RowwiseParallel(input_layouts=Replicate())}  # divides the vocabulary
        parallelize_module(embedding, meshes.tensor, styles)
        if settings.sharding.sequence_parallel:
            cut = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(1))
            parallelize_module(embedding, meshes.tensor, cut)
    return embedding


def build_block(
    settings: Fsdp2Settings, meshes: RankMeshes, number: int, seed: int
) -> TransformerBlock:
    block = TransformerBlock(settings.shape, settings.recompute[number], meshes.context)
    init_weights(block, seed + 1 + number)
    if meshes.tensor is not None:
        styles = block_styles(sequence_parallel=settings.sharding.sequence_parallel)
        parallelize_module(block, meshes.tensor, styles)
    return block


def build_head(settings: Fsdp2Settings, meshes: RankMeshes, seed: int) -> OutputHead:
    shape = settings.shape
    head = OutputHead(shape)
    init_weights(head, seed if shape.tied_embeddings else seed + 1 + shape.num_layers)
    if meshes.tensor is not None:
        styles = head_styles(sequence_parallel=settings.sharding.sequence_parallel)
        parallelize_module(head, meshes.tensor, styles)
    return head


def build_stage(settings: Fsdp2Settings, meshes: RankMeshes, index: int, seed: int) -> ModelStage:
    """Builds a pipeline stage layer by layer, so that one layer at most is whole on the device."""
    counts, sharding = settings.pipeline.stage_blocks, settings.sharding
    first = sum(counts[:index])
    numbers = range(first, first + counts[index])
    shard = sharding_of(settings, meshes)
    is_last = index == len(counts) - 1
    with torch.device(meshes.device):
        embedding = build_embedding(settings, meshes, seed) if index == 0 else None
        blocks = {}
        for each in numbers:
            block = build_block(settings, meshes, each, seed)
            blocks[f"{each}"] = shard(block, sharding.reshard_after_forward[each])
        head = build_head(settings, meshes, seed) if is_last else None
    ends = [end for end in (embedding, head) if end is not None]
    if settings.shape.tied_embeddings and embedding is not None and head is not None:
        head.lm_head.weight = embedding.tokens.weight
        shard(ends, sharding.reshard_ends)  # together, for they share the table
    else:
        for end in ends:
            shard(end, sharding.reshard_ends)
    return shard(ModelStage(embedding, blocks, head), sharding.reshard_ends)


def sharding_of(
    settings: Fsdp2Settings, meshes: RankMeshes
) -> Callable[[nn.Module | list[nn.Module], bool], nn.Module]:
    """Returns the function that shards a layer, or several as one, over data-parallel ranks.

    Its second argument is `reshard_after_forward`.
    """
    sharding, precision = settings.sharding, settings.precision
    states = getattr(torch, precision.states)
    policy = MixedPrecisionPolicy(
        param_dtype=getattr(torch, precision.compute),
        reduce_dtype=getattr(torch, precision.gradients),
    )
    offload = {}
    if sharding.cpu_offload:
        offload["offload_policy"] = CPUOffloadPolicy(pin_memory=meshes.device.type == "cuda")

    def shard(layers: nn.Module | list[nn.Module], reshard: bool) -> nn.Module:
        for layer in layers if isinstance(layers, list) else [layers]:
            layer.to(states)
        return fully_shard(
            layers,
            mesh=meshes.states,
            reshard_after_forward=reshard,
            mp_policy=policy,
            **offload,
        )

    return shard


# Data


def sequence(settings: Fsdp2Settings, index: int, seed: int, data: np.ndarray | None) -> Tensor:
    """Returns the ids of a sequence and one further id, by its number in the run."""
    length = settings.batch.seq_length
    if data is None:
        generator = torch.Generator().manual_seed((seed * 1_000_003 + index) % 2**64)
        return torch.randint(settings.shape.vocab_size, (length + 1,), generator=generator)
    start = index % ((len(data) - 1) // length) * length
    return torch.from_numpy(data[start : start + length + 1].astype(np.int64))


def batch(
    settings: Fsdp2Settings, meshes: RankMeshes, step: int, seed: int, data: np.ndarray | None
) -> tuple[Tensor, Tensor]:
    """Returns ids and targets of a step, [rows, tokens of this rank]."""
    mesh, sizes = settings.mesh, settings.batch
    rows = sizes.global_batch_size // (mesh.replicate * mesh.shard)
    first = step * sizes.global_batch_size + meshes.data_rank * rows
    ids = torch.stack([sequence(settings, first + row, seed, data) for row in range(rows)])
    tokens = sizes.seq_length // mesh.context
    here = slice(meshes.context_rank * tokens, (meshes.context_rank + 1) * tokens)
    ids = ids.to(meshes.device)
    return ids[:, :-1][:, here].contiguous(), ids[:, 1:][:, here].contiguous()


# Training


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Returns the mean cross entropy of a micro-batch."""
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class MicroBatches:
    """Runs the micro-batches of a step, one after the other or through a pipeline."""

    def __init__(self, settings: Fsdp2Settings, meshes: RankMeshes, seed: int) -> None:
        mesh, sizes = settings.mesh, settings.batch
        rows = sizes.global_batch_size // (mesh.replicate * mesh.shard)
        self.count = rows // sizes.micro_batch_size
        self.meshes = meshes
        num_stages = len(settings.pipeline.stage_blocks)
        self.indices = range(meshes.stage, num_stages, mesh.pipeline)
        self.parts = [build_stage(settings, meshes, index, seed) for index in self.indices]
        self.reads_targets = self.indices[-1] == num_stages - 1
        self.schedule = None
        if num_stages > 1:
            stages = [
                PipelineStage(part, index, num_stages, meshes.device, group=meshes.pipeline)
                for part, index in zip(self.parts, self.indices, strict=True)
            ]
            kind = get_schedule_class(settings.pipeline.schedule)
            one = issubclass(kind, PipelineScheduleSingle)
            self.schedule = kind(stages[0] if one else stages, self.count, loss_fn=token_loss)

    def run(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Adds up the gradients, and returns the mean loss; 0 where another rank has it."""
        with loss_parallel() if self.meshes.tensor is not None else nullcontext():
            losses = (
                self.through_pipeline(ids, targets) if self.schedule else self.in_turn(ids, targets)
            )
        if not losses:
            return torch.zeros((), device=self.meshes.device)
        return torch.stack([local(loss.detach()) for loss in losses]).mean()

    def through_pipeline(self, ids: Tensor, targets: Tensor) -> list[Tensor]:
        losses: list[Tensor] = []
        inputs = (ids,) if self.indices[0] == 0 else ()
        further = {"target": targets, "losses": losses} if self.reads_targets else {}
        self.schedule.step(*inputs, **further)
        return losses

    def in_turn(self, ids: Tensor, targets: Tensor) -> list[Tensor]:
        (model,) = self.parts
        losses = []
        pairs = zip(ids.chunk(self.count), targets.chunk(self.count), strict=True)
        for number, (some_ids, some_targets) in enumerate(pairs):
            model.set_requires_all_reduce(number == self.count - 1)  # of copies of the states
            loss = token_loss(model(some_ids), some_targets)
            (loss / self.count).backward()
            losses.append(loss)
        return losses


def local(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


class TiedTable:
    """Adds the gradients of a table that the first and the last stage both have."""

    def __init__(
        self, settings: Fsdp2Settings, meshes: RankMeshes, parts: list[ModelStage]
    ) -> None:
        self.weight = self.group = None
        self.is_copy = False
        if not settings.shape.tied_embeddings or settings.mesh.pipeline == 1:
            return
        ends = meshes.whole.mesh[[0, -1]].flatten(1).T.tolist()
        groups = [dist.new_group(pair) for pair in ends]  # every rank makes every group
        for part in parts:
            if part.embedding is not None or part.head is not None:
                self.group = next(
                    group
                    for pair, group in zip(ends, groups, strict=True)
                    if dist.get_rank() in pair
                )
                self.is_copy = part.embedding is None
                self.weight = (
                    part.head.lm_head.weight if self.is_copy else part.embedding.tokens.weight
                )

    def reduce(self) -> None:
        if self.weight is not None:
            dist.all_reduce(self.weight.grad.to_local(), group=self.group)

    def counted(self, parameters: list[nn.Parameter]) -> list[nn.Parameter]:
        """Returns the parameters without the second copy of the table."""
        return [each for each in parameters if not (self.is_copy and each is self.weight)]


def by_mesh(parameters: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Yields the parameters of every device mesh: torch's fused loops do not mix meshes."""
    groups = defaultdict(list)
    for parameter in parameters:
        groups[parameter.device_mesh].append(parameter)
    yield from groups.values()


def build_adam(
    parameters: list[nn.Parameter], learning_rate: float, weight_decay: float
) -> torch.optim.AdamW:
    """Returns AdamW; vectors (biases and weights of norms) do not decay."""
    groups = []
    for matrices in (True, False):
        chosen = [each for each in parameters if (each.ndim > 1) is matrices]
        decay = weight_decay if matrices else 0.0
        groups += [{"params": group, "weight_decay": decay} for group in by_mesh(chosen)]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.999), fused=True)


@torch.no_grad()
def gradient_norm(parameters: list[nn.Parameter], meshes: RankMeshes) -> Tensor:
    """Returns the norm of all gradients of the model, over all stages."""
    total = torch.zeros((), device=meshes.device)
    for group in by_mesh(parameters):
        norm = get_total_norm([each.grad for each in group])
        total += local(norm).to(total).square()
    dist.all_reduce(total, group=meshes.pipeline)
    return total.sqrt()


def train(settings: Fsdp2Settings, options: argparse.Namespace) -> Iterator[tuple[float, float]]:
    """Yields the mean loss and the gradient norm of every step."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    meshes = RankMeshes(settings.mesh, device)
    model = MicroBatches(settings, meshes, options.seed)
    tied = TiedTable(settings, meshes, model.parts)
    parameters = [each for part in model.parts for each in part.parameters()]
    optimizer = build_adam(parameters, options.learning_rate, options.weight_decay)
    data = None if options.data is None else np.memmap(options.data, options.data_type, mode="r")
    by_tokens = settings.sharding.sequence_parallel and meshes.tensor is not None
    # tensor-parallel ranks with the same tokens draw the same dropout
    torch.manual_seed(options.seed + (dist.get_rank() if by_tokens else meshes.data_rank))
    replicas = dist.get_world_size() // settings.mesh.pipeline
    for step in range(options.steps):
        loss = model.run(*batch(settings, meshes, step, options.seed, data))
        tied.reduce()
        norm = gradient_norm(tied.counted(parameters), meshes)
        for group in by_mesh(parameters):
            clip_grads_with_norm_(group, options.clip_gradients, norm)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss)
        yield loss.item() / replicas, norm.item()


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("settings", type=Path, nargs="?", default=Path("fsdp2.yaml"))
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", type=Path, help="file of token ids")
    parser.add_argument("--data-type", default="uint16", help="type of its ids")
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--weight-decay", type=float, default=0.01)
    parser.add_argument("--clip-gradients", type=float, default=1.0)
    return parser.parse_args()


def main() -> None:
    options = read_options()
    settings = read_settings(options.settings)
    # gloo reduces what lies on the host: cpu_offload
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    started = time.perf_counter()
    for step, (loss, norm) in enumerate(train(settings, options)):
        now = time.perf_counter()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss:.6f}, gradient norm {norm:.4f}, {now - started:.3f} s")
        started = now
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
