"""Tables of `nsys stats`: kernels with their starts, on two devices, and what has none."""

from __future__ import annotations

import pytest

from parplan.profiles.errors import ConfigError
from parplan.profiles.traces.trace_files import is_trace, read_traces
from parplan.profiles.traces.trace_record import Phase, WorkClass

COLUMNS = "Start ({unit}),Duration ({unit}),CorrId,GrdX,Bytes (MB),Device,Ctx,Strm,Name"
KERNELS = (  # start and duration in nanoseconds, name
    (100_000, 200_000, "sm80_xmma_gemm_bf16bf16_tn"),
    (320_000, 80_000, "void flash_fwd_kernel<..., (bool)1>"),
    (390_000, 60_000, "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevComm *)"),
    (600_000, 20_000, "[CUDA memcpy Host-to-Device]"),
    (830_000, 70_000, "multi_tensor_apply_kernel<AdamFunctor>"),
)
STEPS, STEP_NS = 3, 1_000_000


def table(path, unit="ns", scale=1, devices=1, header=COLUMNS):
    lines = ["Processing [run.sqlite] with [cuda_gpu_trace.py]... ", header.format(unit=unit)]
    for device in range(devices):
        for step in range(STEPS):
            for start, duration, name in KERNELS:
                begin = (start + step * STEP_NS) / scale
                gpu = f"NVIDIA A100-SXM4-80GB ({device})"
                lines.append(f'{begin:.0f},{duration / scale:.0f},1,,,{gpu},1,7,"{name}"')
    path.write_text("\n".join(lines) + "\n", encoding="ascii")
    return path


@pytest.mark.parametrize(("unit", "scale"), [("ns", 1), ("us", 1000)])
def test_a_table_of_kernels_has_a_rank_for_each_device_and_steps_between_updates(
    tmp_path, unit, scale
):
    traces = read_traces([table(tmp_path / "run.csv", unit, scale, devices=2)])

    assert [trace.device for trace in traces] == ["NVIDIA A100-SXM4-80GB"] * 2
    step = traces[0].steps[-1]
    assert step.seconds == pytest.approx(800e-6)
    assert [work.kind for work in step.work] == [
        WorkClass.PRODUCTS,
        WorkClass.ATTENTION,
        WorkClass.COLLECTIVES,
        WorkClass.COPIES,
        WorkClass.OPTIMIZER,
    ]
    assert step.work[2].collective.operation == "all_reduce"
    assert [work.phase for work in step.work] == [None, None, None, None, Phase.OPTIMIZER]
    assert step.work[0].seconds == pytest.approx(200e-6)


@pytest.mark.parametrize(
    ("header", "word"),
    [
        pytest.param("Time (%),Total Time (ns),Instances,Name", "summary", id="summary"),
        pytest.param("Start (ns),Duration (ns),Name", "Device is missing", id="no-device"),
    ],
)
def test_a_table_without_starts_or_devices_says_what_is_needed(tmp_path, header, word):
    path = table(tmp_path / "run.csv", header=header)

    assert is_trace(path)
    with pytest.raises(ConfigError, match=word) as raised:
        read_traces([path])
    assert "cuda_gpu_trace" in (raised.value.hint or "")


def test_a_table_that_was_cut_before_its_first_kernel_is_an_error(tmp_path):
    path = table(tmp_path / "run.csv")
    path.write_text("\n".join(path.read_text().splitlines()[:2]))

    with pytest.raises(ConfigError, match=r"run\.csv: it has no kernel of a device"):
        read_traces([path])


def test_a_cell_that_is_no_number_is_named_with_its_line(tmp_path):
    path = table(tmp_path / "run.csv")
    path.write_text(path.read_text().replace("320000,", "soon,", 1))

    with pytest.raises(ConfigError, match=r"line 4: Start \(ns\) is 'soon'"):
        read_traces([path])
