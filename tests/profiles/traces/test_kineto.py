"""Traces of torch.profiler: steps, phases, classes and collectives of a trace worked by hand."""

from __future__ import annotations

import gzip
import re

import pytest

from parplan.profiles.errors import ConfigError
from parplan.profiles.traces.kineto import read_kineto
from parplan.profiles.traces.trace_files import is_trace, read_traces
from parplan.profiles.traces.trace_record import Phase, WorkClass
from parplan.profiles.traces.work_classes import class_of, operation_of
from tests.helpers.kineto_traces import MAIN, Kernels, host, kineto_text, one_step, write_kineto


def read(text: str):
    return read_kineto(text, "t.json", "0" * 16, "2020-01-01")


def test_steps_phases_classes_and_groups_of_a_hand_made_trace():
    trace = read(kineto_text([*one_step(), *one_step(1000.0)], rank=2))

    assert (trace.device, trace.rank, trace.world_size) == ("NVIDIA A100-SXM4-80GB", 2, 4)
    assert trace.date == "2023-11-14"
    assert [step.seconds for step in trace.steps] == [pytest.approx(1e-3)] * 2
    assert [(work.kind, work.phase, round(work.seconds * 1e6)) for work in trace.steps[0].work] == [
        (WorkClass.PRODUCTS, Phase.FORWARD, 200),
        (WorkClass.ATTENTION, Phase.FORWARD, 80),
        (WorkClass.COLLECTIVES, Phase.FORWARD, 60),
        (WorkClass.PRODUCTS, Phase.BACKWARD, 250),
        (WorkClass.COLLECTIVES, Phase.BACKWARD, 150),
        (WorkClass.OPTIMIZER, Phase.OPTIMIZER, 10),  # the norm, which no annotation marks
        (WorkClass.OPTIMIZER, Phase.OPTIMIZER, 70),
    ]
    reduced = trace.steps[0].work[4].collective
    assert (reduced.operation, reduced.ranks, reduced.num_bytes) == ("reduce_scatter", (0, 2), 2048)


def test_without_marks_a_step_ends_with_its_update():
    events = [*one_step(), *one_step(1000.0), *one_step(2000.0)]
    unmarked = [event for event in events if not event["name"].startswith("ProfilerStep")]

    steps = read(kineto_text(unmarked)).steps

    assert [len(step.work) for step in steps] == [7, 7]
    assert steps[0].seconds == pytest.approx(1e-3)
    assert steps[1].seconds == pytest.approx(0.8e-3)  # no step follows: to the end of its work


def test_operators_are_the_work_where_the_host_is_the_device():
    events = [
        host("ProfilerStep#1", 0, 100, cat="user_annotation"),
        host("aten::linear", 10, 30),
        host("aten::addmm", 12, 29),
        host("autograd::engine::evaluate_function: AddmmBackward0", 40, 70),
        host("AddmmBackward0", 41, 69),
        host("aten::mm", 42, 68),
        host("gloo:all_reduce", 60, 80, thread=9, cat="user_annotation"),
        host("Optimizer.step#SGD.step", 80, 95, cat="user_annotation"),
        host("aten::_foreach_add_", 82, 90),
    ]

    trace = read(kineto_text(events, deviceProperties=[]))

    assert trace.device == "cpu"
    assert trace.steps[0].seconds == pytest.approx(1e-4)
    assert [(work.kind, work.phase) for work in trace.steps[0].work] == [
        (WorkClass.PRODUCTS, Phase.FORWARD),
        (WorkClass.PRODUCTS, Phase.BACKWARD),
        (WorkClass.COLLECTIVES, Phase.OPTIMIZER),  # after the last backward pass
        (WorkClass.OPTIMIZER, Phase.OPTIMIZER),
    ]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_NNT", WorkClass.PRODUCTS),
        ("Cijk_Alik_Bljk_BBS_BH_Bias_HAS_SAV_UserArgs_MT256x256x64", WorkClass.PRODUCTS),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm>", WorkClass.PRODUCTS),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16", WorkClass.ATTENTION),
        ("void transformer_engine::normalization::rmsnorm_fwd_kernel<>", WorkClass.NORMS),
        ("triton_poi_fused_mul_silu_3", WorkClass.ELEMENTWISE),
        ("vectorized_elementwise_kernel<4, AUnaryFunctor::{lambda}>", WorkClass.ELEMENTWISE),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", WorkClass.COLLECTIVES),
        ("void deep_ep::intranode::dispatch<8, 768, 8192>", WorkClass.COLLECTIVES),
        ("multimem_all_reduce_kernel<c10::BFloat16, 16>", WorkClass.COLLECTIVES),
        ("Memcpy HtoD (Pinned -> Device)", WorkClass.COPIES),
        ("Memcpy DtoD (Device -> Device)", WorkClass.ELEMENTWISE),
    ],
)
def test_names_of_kernels_say_their_class(name, kind):
    assert class_of(name) is kind


@pytest.mark.parametrize(
    ("name", "operation"),
    [
        ("_allgather_base", "all_gather"),
        ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", "reduce_scatter"),
        ("all_to_allv", "all_to_all"),
        ("void deep_ep::internode::combine<8>", "all_to_all"),
        ("userbuffers_fp16_sum_inplace_gpu_rr_rs", "user_buffers"),
        ("ncclDevKernel_SendRecv", "send_recv"),
        ("ncclDevKernel_Generic_4", "collective"),
    ],
)
def test_names_of_collectives_are_torchs(name, operation):
    assert operation_of(name) == operation


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("{}", "t.json: traceEvents is missing", id="no-events"),
        pytest.param('{"traceEvents": [\n{"ph": ]}', "t.json:2: not JSON", id="not-json"),
        pytest.param('{"traceEvents": [{"ph": "X"}', "t.json:1: not JSON", id="cut"),
        pytest.param(
            kineto_text([{"ph": "X", "cat": "kernel", "name": "gemm", "dur": 1}]),
            "ts of the event 'gemm' in microseconds is nothing, needed is a number from 0",
            id="no-time",
        ),
        pytest.param(
            kineto_text([{"ph": "X", "cat": "kernel", "name": "gemm", "ts": 1e300}]),
            "ts of the event 'gemm' in microseconds is 1e+300, needed is a number from 0",
            id="endless",
        ),
        pytest.param(
            kineto_text([{"ph": "X", "cat": "kernel", "ts": 10**4000}]),
            "is an integer of more than 18 digits, needed is a number from 0",
            id="4000-digits",
        ),
        pytest.param(
            kineto_text([{"ph": "X", "cat": "kernel", "ts": "HERE"}]).replace('"HERE"', "9" * 5000),
            "t.json: an integer has more than 18 digits",
            id="5000-digits",
        ),
        pytest.param(
            kineto_text([{"ph": "X", "cat": "kernel", "ts": "\u00b2"}]),
            "is '\u00b2', needed is a number from 0",
            id="superscript",
        ),
        pytest.param(kineto_text([]), "no step is in it", id="no-step"),
        pytest.param(
            kineto_text(one_step(), deviceProperties=[]),
            "deviceProperties is missing",
            id="no-device",
        ),
    ],
)
def test_a_broken_trace_names_what_is_missing(text, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        read(text)


def test_a_folder_of_ranks_packed_or_not(tmp_path):
    write_kineto(tmp_path / "rank0.json", one_step())
    with gzip.open(tmp_path / "rank1.pt.trace.json.gz", "wt") as file:
        file.write(kineto_text(one_step(), rank=1))
    (tmp_path / "notes.txt").write_text("nothing")

    assert [trace.rank for trace in read_traces([tmp_path])] == [0, 1]
    assert is_trace(tmp_path / "rank1.pt.trace.json.gz")
    assert not is_trace(tmp_path / "notes.txt")
    with pytest.raises(ConfigError, match=r"another file is of rank 1 too"):
        read_traces([tmp_path, tmp_path / "rank1.pt.trace.json.gz"])


def test_what_holds_no_trace_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("nothing")
    (tmp_path / "cut.gz").write_bytes(gzip.compress(b'{"traceEvents": [' * 9)[:-12])

    with pytest.raises(ConfigError, match=r"notes\.txt: its format is unknown, known are Kineto"):
        read_traces([tmp_path / "notes.txt"])
    with pytest.raises(ConfigError, match=r"cannot read .*cut\.gz"):
        read_traces([tmp_path / "cut.gz"])
    with pytest.raises(ConfigError, match=r"cannot read .*none\.json"):
        read_traces([tmp_path / "none.json"])


def test_a_real_profile_of_torch_is_read(tmp_path):
    torch = pytest.importorskip("torch")
    from torch.profiler import ProfilerActivity, profile, schedule

    layer = torch.nn.Linear(32, 32)
    optimizer = torch.optim.AdamW(layer.parameters())
    path = tmp_path / "trace.json"
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=0, warmup=1, active=2, repeat=1),
        on_trace_ready=lambda each: each.export_chrome_trace(str(path)),
    ) as profiler:
        for _ in range(3):
            layer(torch.ones(8, 32)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            profiler.step()

    trace = read_traces([path])[0]

    assert len(trace.steps) == 2
    assert {(work.kind, work.phase) for work in trace.steps[0].work} >= {
        (WorkClass.PRODUCTS, Phase.FORWARD),
        (WorkClass.PRODUCTS, Phase.BACKWARD),
        (WorkClass.ELEMENTWISE, Phase.BACKWARD),
        (WorkClass.OPTIMIZER, Phase.OPTIMIZER),
    }
    assert trace.date >= "2024"


def test_threads_and_launches_without_a_number_are_unknown():
    events = [dict(event) for event in one_step()]
    for event in events:
        event["tid"] = {}
        event["args"] = {"correlation": []}

    assert {work.phase for work in read(kineto_text(events)).steps[0].work} <= {
        Phase.FORWARD,
        Phase.BACKWARD,
        Phase.OPTIMIZER,
        None,
    }


def test_a_kernel_without_its_launch_has_no_phase():
    kernels = Kernels()
    kernels.run("gemm", 10, 20, 5, MAIN)
    kernels.run("multi_tensor_apply<adam>", 20, 30, 6, MAIN)
    events = [event for event in kernels.events if event["cat"] == "kernel"]

    assert [work.phase for work in read(kineto_text(events)).steps[0].work] == [
        None,
        Phase.OPTIMIZER,
    ]
