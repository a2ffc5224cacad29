"""The program that measures one case: passes, bytes, and reports of unmeasurable cases."""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterator

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from parplan.executor.measuring import (
    block_operations as blocks,
)
from parplan.executor.measuring import (
    footprints,
    products,
)
from parplan.executor.measuring import (
    measure as program,
)
from parplan.executor.measuring import (
    step_timing as timing,
)
from parplan.executor.measuring import (
    update_operations as updates,
)
from parplan.executor.measuring.footprints import footprint
from parplan.executor.measuring.layer_operations import residual
from parplan.executor.measuring.measure import WORKS, measure
from parplan.executor.measuring.operands import Maker
from parplan.executor.measuring.trials import Graph, TrialStep
from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.measurements import Case, CasePass, UnsupportedCase
from parplan.profiles.models.spec import ModelSpec, Norm, TrainingSpec
from parplan.profiles.models.transformer import build_graph
from parplan.profiles.stack import NEUTRAL
from parplan.profiles.units import MIB
from tests.helpers.cases import mostly_slow

CPU = torch.device("cpu")
TINY = {
    "m": 24,
    "n": 16,
    "k": 8,
    "bias": 1,
    "batch": 2,
    "heads": 4,
    "kv_heads": 2,
    "seq": 8,
    "head_dim": 4,
    "dropout": 1,
    "elements": 100,
    "tokens": 16,
    "hidden": 16,
    "width": 32,
    "vocab": 50,
    "parameters": 3000,
    "ffn": 32,
    "gated": 0,
    "rms": 0,
    "rotary": 0,
    "bytes": 4096,
}
TIMED = [name for name, work in WORKS.items() if work.parts is not None]


@pytest.fixture(autouse=True)
def _few_repeats(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for module in (timing, program):
        monkeypatch.setattr(module, "MOST_REPEATS", 4)
    yield
    updates._swept.cache_clear()


def _case(
    work: str, precision: str = "fp32", passes: tuple[str, ...] | None = None, **sizes: int
) -> Case:
    actual = WORKS[work]
    return Case(
        work=work,
        sizes=tuple((name, {**TINY, **sizes}[name]) for name in actual.sizes),
        precision=precision,
        passes=tuple(CasePass(name=name) for name in (actual.passes if passes is None else passes)),
    )


@pytest.mark.parametrize("precision", mostly_slow(["fp32", "bf16"], {"bf16"}))
@pytest.mark.parametrize("work", TIMED)
def test_every_operator_has_a_time_for_each_of_its_passes(work: str, precision: str) -> None:
    measured = measure(_case(work, precision), "cpu")

    assert tuple(measured.times) == WORKS[work].passes
    assert all(
        0 < time.median_us < math.inf and time.spread >= 0 and time.repeats >= 4
        for time in measured.times.values()
    )
    assert measured.saved_bytes is not None
    assert measured.saved_bytes >= 0
    assert measured.workspace_bytes is not None
    assert measured.workspace_bytes >= 0


@pytest.mark.parametrize(
    "flags", [{"gated": 1, "rms": 1, "rotary": 1}, {"dropout": 0}, {"kv_heads": 4}]
)
def test_blocks_of_every_kind_are_measured(flags: dict[str, int]) -> None:
    assert set(measure(_case("block", **flags), "cpu").times) == {"forward", "backward"}


def test_passes_that_a_case_does_not_ask_for_are_not_measured() -> None:
    assert set(measure(_case("linear", passes=("input_gradient",)), "cpu").times) == {
        "input_gradient"
    }
    assert set(measure(_case("gelu", passes=("forward",)), "cpu").times) == {"forward"}


def test_figures_of_the_machine_are_rates_of_what_was_timed() -> None:
    copied = measure(_case("device_copy", passes=()), "cpu")
    adam = measure(_case("host_adam", passes=()), "cpu")

    assert copied.figures["copied_bytes_per_s"] == pytest.approx(
        2 * 4096 / (copied.times["time"].median_us * 1e-6)
    )
    assert adam.figures["bytes_per_s"] == pytest.approx(
        28 * 3000 / (adam.times["time"].median_us * 1e-6)
    )
    assert measure(_case("launch"), "cpu").figures["host_launch_s"] > 0


def _graph_bytes(operator: str, precision: str) -> int:
    """Saved bytes that the planner predicts for an operator of a small model.

    The case is one sequence of 16 tokens.
    """
    model = ModelSpec(
        name="small",
        num_layers=1,
        hidden_size=16,
        num_heads=4,
        num_kv_heads=4,
        head_dim=4,
        ffn_hidden_size=32,
        vocab_size=50,
        max_seq_length=16,
        norm=Norm.LAYER_NORM,
    )
    graph = build_graph(
        model,
        TrainingSpec(global_batch_size=1, seq_length=16, precision=precision, stack=NEUTRAL),
        1,
    )
    (actual,) = (candidate for candidate in graph.block.operators if candidate.name == operator)
    return sum(tensor.num_bytes for tensor in actual.saved)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("operator", "case", "statistics"),
    [
        pytest.param(
            "qkv", ("linear", {"m": 16, "n": 48, "k": 16}), 0, id="a linear layer keeps its input"
        ),
        pytest.param(
            "norm1",
            ("layer_norm", {"tokens": 16, "hidden": 16}),
            2 * 16,
            id="a norm keeps its input and two figures a token",
        ),
        pytest.param(
            "activation", ("gelu", {"tokens": 16, "width": 32}), 0, id="gelu keeps its input"
        ),
        pytest.param(
            "attention",
            (
                "attention",
                {"batch": 1, "heads": 4, "kv_heads": 4, "seq": 16, "head_dim": 4, "dropout": 0},
            ),
            0,
            id="attention keeps queries, keys, values and the sums of its softmax",
        ),
    ],
)
def test_saved_bytes_are_those_of_the_operator_graph(
    operator: str,
    case: tuple[str, dict[str, int]],
    statistics: int,
    precision: str,
) -> None:
    work, sizes = case
    element_bytes = 4 if precision == "fp32" else 2

    assert (
        measure(_case(work, precision, **sizes), "cpu").saved_bytes
        == _graph_bytes(operator, precision) + statistics * element_bytes
    )


def test_workspace_is_what_is_held_beside_inputs_and_results() -> None:
    x = torch.ones(1000)

    saved, workspace = footprint(TrialStep(lambda: x.exp().exp()), ("time",), CPU)

    assert (saved, workspace) == (0, 4 * 1000)


def test_what_a_backward_pass_frees_of_the_graph_is_not_its_workspace() -> None:
    x, gradient = torch.ones(1000, requires_grad=True), torch.ones(1000)
    two_products = Graph(lambda: (x * x).exp() * 2, (x,), (x,), gradient)

    saved, workspace = footprint(two_products, ("forward", "backward"), CPU)

    assert saved == 2 * 4 * 1000  # x, and what exp made
    assert 0 < workspace <= 2 * 4 * 1000


class _Allocator:
    """A GPU's allocator whose first product takes a workspace for good."""

    def __init__(self) -> None:
        self.held = self.most = 0

    def take(self, num_bytes: int) -> None:
        self.held += num_bytes
        self.most = max(self.most, self.held)

    def reset_peak_memory_stats(self, _: object) -> None:
        self.most = self.held

    def memory_allocated(self, _: object) -> int:
        return self.held

    def max_memory_allocated(self, _: object) -> int:
        return self.most

    def synchronize(self, _: object) -> None:
        """Does nothing: an allocation is there at once."""


def test_a_library_workspace_that_stays_is_not_that_of_an_operator(monkeypatch) -> None:
    allocator, handles = _Allocator(), set()

    def product() -> tuple[torch.Tensor, ...]:
        if not handles:
            handles.add("cuBLAS")
            allocator.take(8 * MIB)
        allocator.take(1000)  # while it runs
        allocator.take(-1000)
        return ()

    monkeypatch.setattr(footprints, "gpu", lambda _: allocator)

    assert footprint(TrialStep(product), ("time",), torch.device("cuda")) == (0, 1000)


def test_each_gradient_of_a_linear_layer_is_one_product() -> None:
    for part in products.linear({"m": 24, "n": 16, "k": 8, "bias": 1}):
        trial = part.make(Maker(CPU, torch.float32))
        for step in trial.steps:
            with FlopCounterMode(display=False) as counter:
                trial.run(step)
            assert counter.get_total_flops() == 2 * 24 * 16 * 8 * (
                step in part.passes or step == "forward"
            )
            if "forward" in part.passes:
                break


def test_the_backward_pass_of_a_residual_adds_the_stream_to_what_its_norm_gave() -> None:
    maker = Maker(CPU, torch.float32)
    (part,) = residual({"tokens": 4, "hidden": 8})
    trial = part.make(maker)
    _, _, from_norm, gradient = maker.made
    expected = from_norm + gradient
    for step in trial.steps:
        trial.run(step)

    torch.testing.assert_close(from_norm, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_block_adds_the_gradients_of_a_micro_batch_to_the_steps(dtype: torch.dtype) -> None:
    maker = Maker(CPU, dtype)
    (part,) = blocks.block({**TINY, "dropout": 0})
    trial = part.make(maker)
    sums = maker.made[13:25]  # after 12 parameters and the input
    actual = []
    for _ in range(2):
        for step in trial.steps:
            trial.before(step)
            trial.run(step)
        actual.append([tensor.clone() for tensor in sums])

    assert all(tensor.any() for tensor in sums)
    for gradient, two in zip(*actual, strict=True):
        torch.testing.assert_close(two, 2 * gradient)


@pytest.mark.parametrize("count", [1, 17, 3000, 49_984, 97_835_520])
def test_the_optimizers_tensors_have_as_many_elements_as_the_case_says(count: int) -> None:
    shapes = list(updates.parameter_shapes(count))

    assert sum(math.prod(shape) for shape in shapes) == count
    if count == 49_984:
        assert len(shapes) == 12  # a block of gpt-tiny


def test_the_median_and_half_of_the_interquartile_range_are_of_the_repeats() -> None:
    timed = timing.timing([5e-6, 1e-6, 2e-6, 3e-6, 4e-6])

    assert (timed.median_us, timed.repeats) == (pytest.approx(3.0), 5)
    assert timed.spread == pytest.approx((4 - 2) / 2 / 3)


@pytest.mark.parametrize(
    ("copy_bytes", "slowest_s", "copies"),
    [
        pytest.param(10 * 2**20, 1e-3, 2, id="as many as four caches hold, rounded up"),
        pytest.param(100, 1e-6, 4, id="no more than there are repeats"),
        pytest.param(10 * 2**30, 1e-3, 1, id="one, however large"),
        pytest.param(10 * 2**20, 1.0, 1, id="one where a repeat takes long"),
    ],
)
def test_copies_of_operands_are_some_times_the_cache(
    copy_bytes: int,
    slowest_s: float,
    copies: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(program, "cache_bytes", lambda _: 4 * 2**20)

    assert program._num_copies(copy_bytes, slowest_s, CPU) == copies


def test_a_transfer_is_not_for_a_device_without_memory_of_its_own() -> None:
    with pytest.raises(UnsupportedCase, match="memory of its own"):
        measure(_case("transfer"), "cpu")


def test_operands_that_the_host_has_no_room_for_are_a_memory_error() -> None:
    with pytest.raises(MemoryError):
        measure(_case("gelu", tokens=2**24, width=2**24), "cpu")


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (_case("gelu", width=0), "width is 0, it must be at least 1"),
        (_case("linear", bias=2), "bias is 2, it must be 0 or 1"),
        (
            Case(work="gelu", sizes=(("tokens", 4),), precision="fp32", passes=()),
            r"needed \['tokens', 'width'\]",
        ),
        (_case("gelu", passes=("sideways",)), r"needed \['forward', 'backward'\]"),
        (_case("gelu", precision="fp7"), "unknown precision 'fp7'"),
        (Case(work="geluu", sizes=(), precision="fp32", passes=()), "unknown work 'geluu'"),
    ],
)
def test_a_case_that_makes_no_sense_says_what_was_needed(case: Case, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        measure(case, "cpu")


def test_the_program_can_be_sent_to_another_process() -> None:
    assert pickle.loads(pickle.dumps(measure)) is measure


def test_an_update_is_timed_over_several_layers_and_given_for_one() -> None:
    assert updates.layers_of(49_984) == 8
    assert updates.layers_of(2**26) == 1
    assert [part.times for part in updates.adamw({"parameters": 49_984})] == [8]
    assert [part.times for part in updates.gradient_norm({"parameters": 2**24})] == [4]


@pytest.mark.slow
def test_layouts_give_what_each_adds_to_a_layer() -> None:
    names = (
        "hidden",
        "heads",
        "kv_heads",
        "head_dim",
        "ffn",
        "gated",
        "rms",
        "rotary",
        "dropout",
        "batch",
        "seq",
    )
    sizes = tuple(zip(names, (16, 2, 2, 8, 32, 0, 0, 0, 0, 1, 8), strict=True))

    figures = program.measure(
        Case(work="layouts", sizes=sizes, precision="fp32", passes=()), "cpu"
    ).figures

    assert {
        "sharded_forward_s",
        "sharded_reduce_s",
        "split_backward_s",
        "divided_forward_s",
        "divided_backward_s",
    } <= set(figures)
    assert all(0.0 <= seconds < 10.0 for seconds in figures.values())
