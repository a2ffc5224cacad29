"""Names of indices, and those by which the operators of a module are divided."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from parplan.profiles.errors import ConfigError
from parplan.profiles.models.operator_graph import Operator
from parplan.profiles.models.tp_rules import TpRules
from parplan.profiles.models.traced_model import BATCH
from parplan.profiles.tracing import traced_source as source_module
from parplan.profiles.tracing.describe import describe
from parplan.profiles.tracing.record import record
from parplan.profiles.tracing.traced_source import ModuleSource, open_workload

WIDTH, HEADS = 16, 4
Body = Callable[[nn.ModuleList, Tensor], Tensor]


class Layers(nn.Module):
    """Some linear layers that `body` calls."""

    def __init__(self, body: Body, sizes: tuple[tuple[int, int], ...]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(first, second) for first, second in sizes)
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.layers, x).square().mean()


def operators(
    body: Body, *sizes: tuple[int, int], rules: TpRules | None = None
) -> dict[str, Operator]:
    """The operators that compute, by the last part of their names."""
    made = Layers(body, sizes), lambda size: {"x": torch.randn(size, 6, WIDTH)}
    with (
        patch.object(source_module, "import_factory", lambda factory: lambda: made),
        patch.object(source_module, "_check_parameters"),
    ):
        workload = open_workload(ModuleSource(factory="tests:made"), seq_length=1)
    model = describe(record(workload, 2), record(workload, 3), rules=rules)
    computing = (each.operator for each in model.operators if not each.view)
    return {operator.name.removeprefix("layers."): operator for operator in computing}


def parallel(body: Body, *sizes: tuple[int, int]) -> dict[str, str | None]:
    return {name: each.parallel_dim for name, each in operators(body, *sizes).items()}


SQUARE = (WIDTH, WIDTH)


def test_of_matrices_in_a_row_the_first_divides_its_columns_and_the_next_its_rows():
    divided = operators(lambda f, x: f[3](f[2](f[1](f[0](x)))), *[SQUARE] * 4)

    assert [divided[f"{i}.linear"].parallel_dim for i in range(4)] == ["ffn"] * 4
    assert divided["1.linear"].contracted == divided["3.linear"].contracted == "ffn"
    assert divided["0.linear"].contracted != "ffn"


def test_what_reads_an_index_whole_keeps_its_matrices_whole():
    divided = parallel(lambda f, x: f[1](f[0](x).softmax(-1)), SQUARE, SQUARE)

    assert set(divided.values()) == {None}


def test_calls_between_column_and_row_are_divided_and_no_others():
    divided = parallel(
        lambda f, x: functional.layer_norm(x + f[1](f[0](x).relu() * 2), (WIDTH,)), SQUARE, SQUARE
    )

    assert {name for name, dim in divided.items() if dim} == {
        "0.linear",
        "relu",
        "mul",
        "1.linear",
    }


class Relu(torch.autograd.Function):
    """A function of the user with a name like one of torch."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.sort().values

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient


def attention(f: nn.ModuleList, x: Tensor) -> Tensor:
    """By single products, without a fused kernel."""
    q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in f[0](x).chunk(3, -1))
    weights = (q @ k.transpose(-2, -1)).softmax(-1)
    return f[1]((weights @ v).transpose(1, 2).flatten(2))


def test_unfused_attention_is_divided_by_heads():
    divided = operators(attention, (WIDTH, 3 * WIDTH), SQUARE)

    assert divided["0.linear"].dims[2].name == "heads"
    assert divided["0.linear"].dims[2].unit == 3 * WIDTH // HEADS
    assert {name for name, each in divided.items() if each.parallel_dim == "heads"} == {
        "0.linear",
        "matmul",
        "softmax",
        "matmul_2",
        "1.linear",
    } | {name for name in divided if name.startswith("flatten")}


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        pytest.param(lambda f, x: f[1](f[0](x).flip(-1)), "the flip is over", id="order"),
        pytest.param(lambda f, x: f[1](Relu.apply(f[0](x))), "Relu is not divided", id="own"),
        pytest.param(lambda f, x: f[1](f[0](x)[..., 1:]), "takes a part of it", id="slice"),
        pytest.param(
            lambda f, x: f[1](torch.cumprod(f[0](x), -1)), "cumprod is not divided", id="no-rule"
        ),
        pytest.param(
            lambda f, x: f[1](functional.glu(torch.cat((f[0](x), x), -1))),
            "glu is not divided",
            id="unknown",
        ),
    ],
)
def test_an_index_that_a_call_needs_whole_is_undivided_with_the_reason(body, reason):
    divided = operators(body, SQUARE, (WIDTH - ("part" in reason), WIDTH))

    assert not any(each.parallel_dim for each in divided.values())
    reasons = {text for each in divided.values() for _, text in each.undivided}
    assert any(reason in text for text in reasons)


def test_a_write_into_memory_that_is_read_later_keeps_the_matrices_whole():
    def body(f: nn.ModuleList, x: Tensor) -> Tensor:
        made = f[0](x)
        view = made.view(-1, WIDTH)
        made.mul_(2.0)
        return f[1](made) + view.sum()

    divided = operators(body, SQUARE, SQUARE)

    assert not any(each.parallel_dim for each in divided.values())
    assert any(
        "it writes into memory" in text for each in divided.values() for _, text in each.undivided
    )


def test_an_activation_in_place_is_divided():
    divided = parallel(lambda f, x: f[1](f[0](x).relu_()), SQUARE, SQUARE)

    assert divided == {**divided, "0.linear": "ffn", "relu": "ffn", "1.linear": "ffn"}


def test_arguments_by_name_and_products_of_vectors_are_followed_or_left_whole():
    def body(f: nn.ModuleList, x: Tensor) -> Tensor:
        by_name = torch.softmax(input=torch.matmul(f[0](x), other=f[1].weight), dim=-1)
        scalar = torch.matmul(f[2].weight[0], f[2].bias)
        bits = by_name.view(torch.float32)
        return by_name * scalar + torch.cat(tensors=(bits[:, :1], bits[:, 1:]), dim=1)

    divided = operators(body, SQUARE, SQUARE, SQUARE)

    assert divided["0.linear"].parallel_dim == divided["matmul"].contracted == "ffn"
    assert "softmax is not divided" in dict(divided["softmax"].undivided).values()


def test_samples_are_never_divided():
    divided = operators(lambda f, x: f[1](f[0](x)), SQUARE, SQUARE)

    assert all(BATCH in dict(each.undivided) for each in divided.values())


def chain(f: nn.ModuleList, x: Tensor) -> Tensor:
    return functional.layer_norm(f[2](f[1](f[0](x)).relu()), (WIDTH,))


def divided(rules: TpRules | None) -> list[str | None]:
    """The dims by which the matrices of a chain of three are divided."""
    made = operators(chain, SQUARE, SQUARE, SQUARE, rules=rules)
    return [made[f"{number}.linear"].parallel_dim for number in range(3)]


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        (None, ["ffn", "ffn", None]),
        (TpRules(column=("layers.1",)), [None, "ffn", "ffn"]),
        (TpRules(row=("layers.2",)), [None, "ffn", "ffn"]),
        (TpRules(row=("layers.2.weight",)), [None, "ffn", "ffn"]),
        (TpRules(column=("layers.0",), row=("layers.1",)), ["ffn", "ffn", None]),
        (TpRules(replicated=("layers.0",)), [None, "ffn", "ffn"]),
        (TpRules(replicated=("layers.1",)), [None, None, None]),
        (TpRules(replicated=("layers",)), [None, None, None]),
    ],
)
def test_rules_override_the_choice_of_the_matrices_that_divide(rules, expected):
    assert divided(rules) == expected


def test_what_a_rule_leaves_whole_says_so():
    made = operators(chain, SQUARE, SQUARE, SQUARE, rules=TpRules(replicated=("layers.1",)))

    assert "a rule leaves it whole" in dict(made["1.linear"].undivided).values()


@pytest.mark.parametrize(
    ("rules", "match", "hint"),
    [
        (
            TpRules(column=("layers.2",)),
            r"column layers\.2: layers\.2\.linear at .*test_divisible\.py:\d+ cannot be divided "
            "so: a norm is over the whole of it",
            "take that rule out",
        ),
        (
            TpRules(column=("layers.0", "layers.1")),
            r"column layers\.1: .* another rule divides it",
            "take that rule out",
        ),
        (
            TpRules(column=("layers.1",), replicated=("layers.2",)),
            r"column layers\.1: .* a rule leaves it whole",
            "take that rule out",
        ),
        (TpRules(column=("layer.1",)), "column layer.1 names no matrix", "'layers.1'"),
        (TpRules(vocabulary=("zzz",)), "vocabulary zzz names no matrix", "such names are"),
        (TpRules(column=("layers",)), "column layers names no matrix", "'layers.2'"),
    ],
)
def test_rules_that_no_operator_can_have_are_errors(rules, match, hint):
    with pytest.raises(ConfigError, match=match) as caught:
        divided(rules)

    assert hint in caught.value.hint


class Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * gradient


def cubed(f: nn.ModuleList, x: Tensor) -> Tensor:
    return functional.layer_norm(f[1](Cubed.apply(f[0](x))), (WIDTH,))


@pytest.mark.parametrize(
    ("rules", "expected"),
    [(None, [None, None]), (TpRules(pointwise=("",)), ["ffn", "ffn"])],
)
def test_a_function_without_a_rule_is_divided_where_the_user_calls_it_pointwise(rules, expected):
    made = operators(cubed, SQUARE, SQUARE, rules=rules)

    assert [made[f"{number}.linear"].parallel_dim for number in range(2)] == expected


def test_only_calls_without_a_rule_are_pointwise_by_a_rule():
    with pytest.raises(ConfigError, match=r"pointwise layers\.1 names no call that has no rule"):
        operators(cubed, SQUARE, SQUARE, rules=TpRules(pointwise=("layers.1",)))
