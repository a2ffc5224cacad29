"""The tracer: a recorded program computes what the module does, with proportional sizes.

It names what it cannot record.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from parplan.profiles.errors import ConfigError
from parplan.profiles.models.module_source import ModuleSource
from parplan.profiles.models.operator_graph import OperatorKind
from parplan.profiles.models.traced_model import TracedModel
from parplan.profiles.stack import AttentionKernel
from parplan.profiles.tracing import traced_source as source_module
from parplan.profiles.tracing.deferred import AT_LEAST_BYTES
from parplan.profiles.tracing.describe import describe
from parplan.profiles.tracing.program import BUFFER, Program
from parplan.profiles.tracing.record import record
from parplan.profiles.tracing.traced_source import TracedWorkload, open_workload
from tests.helpers.cases import mostly_slow
from tests.helpers.published_configs import CONFIGS
from tests.helpers.traced_modules import HUGGING_FACE

FACTORIES = ("unet", "resnet", "mixer", "translator", "shares", "in_place", "own_gradient")
SOURCES = {name: ModuleSource(factory=f"tests.helpers.traced_modules:{name}") for name in FACTORIES}
SOURCES |= {name: ModuleSource(huggingface=config) for name, config in HUGGING_FACE.items()}
SEQ_LENGTH = 8
PLAIN = {"translator", "resnet", "unet", "albert", "vit"}


@cache
def opened(name: str) -> TracedWorkload:
    return open_workload(SOURCES[name], seq_length=SEQ_LENGTH)


@cache
def recorded(name: str, size: int) -> Program:
    return record(opened(name), size)


@cache
def described(name: str) -> TracedModel:
    return describe(recorded(name, 2), recorded(name, 3))


def opened_with_values(name: str) -> TracedWorkload:
    """The same made as any other module."""
    with (
        patch.object(source_module, "Deferred", nullcontext),
        patch.object(source_module, "give_values"),
        patch.object(source_module, "_check_parameters"),
    ):
        return open_workload(SOURCES[name], seq_length=SEQ_LENGTH)


def workload_of(module: nn.Module, *shape: int) -> TracedWorkload:
    """A module that gives its own loss of x, [batch, *shape]."""
    made = module, lambda size: {"x": torch.randn(size, *shape)}
    with (
        patch.object(source_module, "import_factory", lambda factory: lambda: made),
        patch.object(source_module, "_check_parameters"),
    ):
        return open_workload(
            ModuleSource(factory="tests.profiles.tracing.test_tracing:made"), seq_length=1
        )


def calls_again(program: Program, module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The loss, by the recorded calls alone."""
    attributes = {
        **dict(module.named_parameters()),
        **dict(module.named_buffers()),
        **program.constants,
    }
    values: dict[fx.Node, object] = {}
    for node in program.graph.nodes:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda each: values[each])
        if node.op == "placeholder":
            values[node] = batch[node.target]
        elif node.op == "get_attr":
            values[node] = attributes[node.target]
        elif node.op == "call_function":
            values[node] = node.target(*args, **kwargs)
    return values[next(node for node in program.graph.nodes if node.op == "output").args[0]]


@pytest.mark.parametrize("name", mostly_slow(SOURCES, PLAIN))
def test_recorded_calls_give_the_loss_gradients_and_buffers_of_the_module(name):
    program, real = recorded(name, 2), opened_with_values(name)
    copied, batch = copy.deepcopy(real.module), real.batch(2)

    expected = real.loss_of(real.module, {key: value.clone() for key, value in batch.items()})
    expected.backward()
    replayed = calls_again(program, copied, batch)
    replayed.backward()

    assert torch.equal(replayed, expected)
    for (key, original), parameter in zip(
        real.module.named_parameters(), copied.parameters(), strict=True
    ):
        assert (original.grad is None) == (parameter.grad is None), key
        assert original.grad is None or torch.equal(original.grad, parameter.grad), key
    for (key, original), parameter in zip(
        real.module.named_buffers(), copied.buffers(), strict=True
    ):
        assert torch.equal(original, parameter), key


def test_constants_that_are_written_are_fresh_for_every_micro_batch():
    program, real = recorded("in_place", 2), opened_with_values("in_place")
    first, second = real.batch(2), real.batch(2)

    calls_again(program, real.module, first)

    assert torch.equal(calls_again(program, real.module, second), real.loss_of(real.module, second))


@pytest.mark.parametrize("name", mostly_slow(SOURCES, PLAIN))
def test_a_description_scaled_is_that_of_a_recording_of_that_size(name):
    assert described(name).scaled(5) == describe(recorded(name, 5), recorded(name, 2))


@pytest.mark.parametrize("name", list(SOURCES))
def test_flops_and_parameters_are_those_that_torch_counts(name):
    """The same forward pass runs under torch.utils.flop_counter.

    It knows attention as products.
    """
    workload = opened_with_values(name)
    with FlopCounterMode(display=False) as counted, sdpa_kernel(SDPBackend.MATH):
        workload.loss_of(workload.module, workload.batch(2))

    description = described(name)

    assert (
        sum(traced.operator.flops_forward for traced in description.operators)
        == counted.get_total_flops()
    )
    assert description.num_parameters == sum(
        parameter.numel() for parameter in workload.module.parameters()
    )


@pytest.mark.parametrize(
    "name",
    mostly_slow(
        ["unet", "mixer", "shares", "own_gradient", "t5", "vit"],
        {"unet", "shares", "own_gradient", "t5"},
    ),
)
def test_kept_bytes_are_those_that_autograd_holds(name):
    """The bytes are those of saved tensors on a CPU in fp32.

    Parameters, buffers and the batch do not count. A batch norm keeps its statistics in both;
    constants are left out in both.
    """
    workload = opened_with_values(name)
    batch = workload.batch(2)
    rest = {
        tensor.untyped_storage().data_ptr()
        for tensor in (*workload.module.parameters(), *batch.values())
    }
    held: dict[int, Tensor] = {}

    def hold(tensor: Tensor) -> Tensor:
        held[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(hold, lambda tensor: tensor):
        loss = workload.loss_of(workload.module, batch)
    assert loss.requires_grad
    real = sum(
        tensor.untyped_storage().nbytes() for memory, tensor in held.items() if memory not in rest
    )

    programs = [record(opened(name), size, on_cpu=True) for size in (2, 3)]
    description = describe(*programs, on_cpu=True)

    constants = sum(value.untyped_storage().nbytes() for value in programs[0].constants.values())
    kept = sum(
        {
            tensor.name: tensor.num_bytes
            for traced in description.operators
            for tensor in traced.operator.saved
        }.values()
    )
    assert kept <= real <= kept + constants


def test_names_paths_and_lines_are_those_of_the_calling_module():
    program = recorded("mixer", 2)
    actual = {node.meta["name"]: node.meta for node in program.calls}

    assert actual["blocks.1.tokens.0.linear"]["path"] == "blocks.1.tokens.0"
    file, line = actual["blocks.1.tokens.0.linear"]["line"].rsplit(":", 1)
    assert (
        "self.tokens(self.norm1(x)"
        in Path(file).read_text(encoding="utf-8").splitlines()[int(line) - 1]
    )
    assert len(actual) == len(program.calls)


def test_views_have_the_name_of_what_they_view_and_cost_nothing():
    model = described("mixer")
    by_name = {traced.operator.name: traced for traced in model.operators}

    view, linear = by_name["blocks.0.transpose"], by_name["blocks.0.tokens.0.linear"]

    assert view.view
    assert view.operator.kind is OperatorKind.VIEW
    assert (
        view.operator.outputs[0].name
        == view.operator.inputs[0].name
        == by_name["blocks.0.norm1.layer_norm"].operator.outputs[0].name
    )
    assert linear.operator.kind is OperatorKind.MATMUL
    assert [dim.size for dim in linear.operator.dims] == [
        2,
        32,
        32,
        16,
    ]  # batch, channels, features, patches
    assert linear.operator.dims[0].name == "batch"


def test_operators_in_place_name_what_they_write_first():
    model = described("resnet")
    written = [traced.operator for traced in model.operators if traced.in_place]

    assert {operator.function for operator in written} == {"relu", "add"}
    assert all(operator.inputs[0].name == operator.outputs[0].name for operator in written)


def test_counting_in_a_buffer_is_no_constant_and_not_in_place():
    program = recorded("resnet", 2)
    model = describe(program, record(opened("resnet"), 3))
    counts = [
        traced
        for node, traced in zip(program.calls, model.operators, strict=True)
        if any(each.meta.get("origin") == BUFFER for each in node.meta["written"])
    ]

    assert len(counts) == 2 * 8  # eight batch norms: how many batches they saw, and the norm itself
    assert not any(traced.constant or traced.in_place for traced in counts)


def test_blocks_that_are_alike_have_the_same_signatures():
    model = described("bert")

    first, last = (
        [
            traced.signature
            for traced in model.operators
            if traced.path.startswith(f"bert.encoder.layer.{i}")
        ]
        for i in (0, 3)
    )

    assert first == last
    assert len(set(first)) > 5


def test_attention_of_a_decoder_over_an_encoder_has_its_own_number_of_keys():
    model = described("translator")
    attention = [
        each.operator for each in model.operators if each.operator.kind is OperatorKind.ATTENTION
    ]
    sizes = {(operator.size("sequence"), operator.size("keys")) for operator in attention}

    assert sizes == {(12, 12), (8, 8), (8, 12)}
    cross = next(
        operator for operator in attention if operator.size("keys") != operator.size("sequence")
    )
    assert cross.flops_forward == 4 * 2 * 8 * 12 * 32
    assert cross.flops_backward == 2 * cross.flops_forward


def test_un_fused_attention_is_two_products_of_activations():
    source = ModuleSource(huggingface={**HUGGING_FACE["vit"]})
    workload = open_workload(source, seq_length=1, attention=AttentionKernel.UNFUSED)
    fused = open_workload(source, seq_length=1)

    eager = describe(record(workload, 2), record(workload, 3))
    flash = describe(record(fused, 2), record(fused, 3))

    assert not any(each.operator.kind is OperatorKind.ATTENTION for each in eager.operators)
    assert eager.model_flops == flash.model_flops


class _Odd(nn.Module):
    """Does with x what its test says."""

    def __init__(self, what: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.what = nn.Linear(4, 4), what

    def forward(self, x: Tensor) -> Tensor:
        return self.what(self, x).mean()


class _Reads(torch.autograd.Function):
    """Reads the weight of a module behind autograd's back."""

    @staticmethod
    def forward(ctx, x, module):
        return x * module.linear.weight[0]

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def _odd(what: Callable[[nn.Module, Tensor], Tensor]) -> Program:
    return record(workload_of(_Odd(what), 4), 2)


def _branches(module, x):
    x = module.linear(x)
    return x if x.sum() > 0 else -x


def _through_numpy(module, x):
    return torch.from_numpy(module.linear(x).detach().numpy())


def _shrinks(module, x):
    x = module.linear(x)
    return x[x > 0]


def _writes_part_of_a_constant(module, x):
    whole = torch.zeros(2, 8)
    part = whole[:, :4]
    part.copy_(module.linear(x))
    return whole * 2


@pytest.mark.parametrize(
    ("what", "needed"),
    [
        pytest.param(_branches, "depends on the values of a tensor", id="a-branch"),
        pytest.param(
            lambda module, x: x * module.linear(x).sum().item(),
            "depends on the values of a tensor",
            id="item",
        ),
        pytest.param(_through_numpy, "depends on the values of a tensor", id="numpy"),
        pytest.param(_shrinks, "depends on the values of a tensor", id="a-mask"),
        pytest.param(
            _writes_part_of_a_constant,
            "reads a constant into a part of which",
            id="part-of-a-constant",
        ),
        pytest.param(
            lambda module, x: _Reads.apply(x, module),
            "reads a tensor that it was not given",
            id="autograd-function",
        ),
        pytest.param(
            lambda module, x: checkpoint(module.linear, module.linear(x), use_reentrant=True),
            "reads a tensor that it was not given",
            id="reentrant-checkpoint",
        ),
    ],
)
def test_what_cannot_be_recorded_is_an_error_with_its_line(what, needed):
    with pytest.raises(
        ConfigError, match=rf"tests/profiles/tracing/test_tracing\.py:\d+.*{needed}"
    ):
        _odd(what)


def test_the_error_names_the_line_of_the_branch():
    path = Path("tests/helpers/traced_modules.py")
    line = next(
        i
        for i, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if "the line that the error names" in text
    )
    workload = open_workload(
        ModuleSource(factory="tests.helpers.traced_modules:depends_on_values"), seq_length=1
    )

    with pytest.raises(
        ConfigError, match=rf"{path}:{line} does depends on the values of a tensor \(bool\)"
    ):
        record(workload, 2)


def test_a_checkpoint_without_reentry_keeps_what_it_would_without():
    """The plan chooses the recomputed operators."""
    plain, repeated = (
        describe(*(record(workload_of(_Odd(what), 4), size) for size in (2, 3)))
        for what in (
            lambda m, x: m.linear(x).exp(),
            lambda m, x: checkpoint(lambda y: m.linear(y).exp(), x, use_reentrant=False),
        )
    )

    assert [each.operator.saved for each in repeated.operators] == [
        each.operator.saved for each in plain.operators
    ]


def test_layers_dropped_with_probability_0_always_run():
    def drops(module, x):
        return x if torch.rand([]) < 0.0 else module.linear(x)

    assert "linear" in [node.meta["function"] for node in _odd(drops).calls]
    with pytest.raises(ConfigError, match="depends on the values"):
        _odd(lambda module, x: x if torch.rand([]) < 0.1 else module.linear(x))


def test_regions_without_gradient_are_kept():
    def frozen(module, x):
        with torch.no_grad():
            y = module.linear(x)
        return module.linear(x) + y

    program = _odd(frozen)
    model = describe(program, record(workload_of(_Odd(frozen), 4), 3))
    products = [
        each.operator for each in model.operators if each.operator.kind is OperatorKind.MATMUL
    ]

    assert [node.meta["grad"] for node in program.calls] == [False, True, True, True]
    assert [(each.gradient, each.flops_backward) for each in products] == [
        (False, 0),
        (True, products[1].flops_forward),
    ]  # x has none


def test_random_calls_are_recorded_and_are_no_constants():
    program = _odd(lambda module, x: functional.dropout(module.linear(x), 0.5) + torch.randn(4))

    drawn = {
        node.meta["function"]: node.meta["depends"] for node in program.calls if node.meta["random"]
    }

    assert drawn == {"dropout": True, "randn": True}


def test_a_loss_that_is_no_scalar_is_an_error():
    made = nn.Linear(4, 4), lambda size: {"input": torch.randn(size, 4)}
    with (
        patch.object(source_module, "import_factory", lambda factory: lambda: made),
        patch.object(source_module, "_check_parameters"),
    ):
        workload = open_workload(
            ModuleSource(factory="tests.profiles.tracing.test_tracing:made"), seq_length=1
        )

    with pytest.raises(
        ConfigError, match=r"the loss of Linear is of shape \[2, 4\], it must be a scalar"
    ):
        record(workload, 2)


def test_samples_that_are_mixed_are_an_error():
    """A product of samples with samples is not in proportion to their number."""

    def contrasts(module, x):
        x = module.linear(x)
        return x @ x.t()

    with pytest.raises(ConfigError, match="samples"):
        describe(*(record(workload_of(_Odd(contrasts), 4), size) for size in (2, 3)))


@pytest.mark.parametrize(
    ("source", "needed"),
    [
        pytest.param(
            {"factory": "tests.nowhere:made"},
            "there is no tests.nowhere to import",
            id="no-package",
        ),
        pytest.param(
            {"factory": "tests.helpers.traced_modules:nothing"}, "has no nothing", id="no-function"
        ),
        pytest.param(
            {"factory": "tests.helpers.external_modules:number"},
            "returned int, it must return a torch.nn.Module",
            id="a-number",
        ),
        pytest.param(
            {"huggingface": {"model_type": "no-such"}},
            r"model_type is .no-such., which is none of the \d+ that",
            id="no-family",
        ),
        pytest.param(
            {"huggingface": {"model_type": "bert", "architectures": ["BertModel"]}},
            "takes no labels",
            id="no-loss",
        ),
        pytest.param(
            {"huggingface": {"model_type": "t5"}},
            "no causal language model of t5",
            id="no-architecture",
        ),
        pytest.param(
            {"huggingface": {**HUGGING_FACE["bert"], "max_position_embeddings": 4}},
            "the model has 4 positions",
            id="too-long",
        ),
    ],
)
def test_what_cannot_be_opened_is_an_error(source, needed):
    with pytest.raises(ConfigError, match=needed):
        open_workload(ModuleSource(**source), seq_length=SEQ_LENGTH)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"model_type": "mpt", "architectures": ["MPTForCausalLM"]}, "MptForCausalLM"),
        ({"model_type": "phimoe", "architectures": ["PhiMoEForCausalLM"]}, "PhimoeForCausalLM"),
    ],
)
def test_a_causal_model_by_another_name_than_transformers_has_is_that_of_its_type(config, expected):
    sizes = {"d_model": 32, "n_heads": 4, "n_layers": 1, "vocab_size": 64, "max_seq_len": 64}
    of_llama = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4}
    depth = {"num_hidden_layers": 1, "intermediate_size": 32}
    source = ModuleSource(huggingface={**sizes, **of_llama, **depth, **config})

    workload = open_workload(source, seq_length=SEQ_LENGTH, attention=AttentionKernel.UNFUSED)

    assert type(workload.module).__name__ == expected


def test_a_config_that_does_not_say_how_large_its_inputs_are_is_an_error():
    images = {"model_type": "resnet", "architectures": ["ResNetForImageClassification"]}

    with pytest.raises(ConfigError, match="ResNetConfig has no image_size"):
        open_workload(
            ModuleSource(huggingface=images),
            seq_length=SEQ_LENGTH,
            attention=AttentionKernel.UNFUSED,
        )


def test_parameters_take_no_memory_and_random_numbers_are_left_alone():
    workload, state = opened("t5"), torch.get_rng_state()
    record(workload, 2)

    assert all(
        parameter.is_meta or parameter.nbytes < AT_LEAST_BYTES
        for parameter in workload.module.parameters()
    )
    assert torch.equal(torch.get_rng_state(), state)


def test_a_model_of_hundreds_of_billions_of_parameters_is_opened_without_their_memory():
    keys = {"auto_map", "torch_dtype"}
    config = {key: value for key, value in CONFIGS["deepseek-v3"].items() if key not in keys}
    config |= {"num_hidden_layers": 5, "quantization_config": {"quant_method": "fp8"}}

    module = open_workload(ModuleSource(huggingface=config), seq_length=8).module

    made = [each for each in (*module.parameters(), *module.buffers()) if not each.is_meta]
    assert sum(parameter.nbytes for parameter in module.parameters()) > 100e9
    assert sum(tensor.nbytes for tensor in made) < 1e6
