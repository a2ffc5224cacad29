"""Files of other planners: times worked out by hand, and the missing field in each refusal."""

from __future__ import annotations

import json
import re

import pytest

from parplan.profiles.errors import ConfigError
from parplan.profiles.imports.import_formats import read_import
from parplan.profiles.imports.layer_files import read_layer_file

SIMUMAX = {
    "sys_name": "mine",
    "num_per_node": 8,
    "accelerator": {
        "op": {
            "default": {"tflops": 312, "efficient_factor": 0.75},
            "matmul": {
                "tflops": 312,
                "accurate_efficient_factor": {
                    "b=1, m=4096, k=5120, n=1536, layout=TN, accumulate=False": 0.5,
                    "b=1, m=1536, k=4096, n=5120, layout=NT, accumulate=True": 0.25,
                    "b=8, m=64, k=64, n=64, layout=TN, accumulate=False": 0.1,
                },
            },
            "sdp_bwd": {
                "tflops": 312,
                "accurate_efficient_factor": {
                    "batch=2, seq_len=4096, head_num=16, kv_head_num=4, qk_head_dim=128, "
                    "v_head_dim=128, qkv_contiguous=True": 1.0,
                    "batch=1, seq_len=4096, head_num=16, kv_head_num=4, qk_head_dim=192, "
                    "v_head_dim=128, qkv_contiguous=True": 1.0,
                },
            },
        }
    },
    "networks": {"inter_node": {}},
}
GEMM = (
    "framework,version,device,op_name,kernel_source,gemm_dtype,m,n,k,latency\n"
    "TRTLLM,1.0.0,NVIDIA A100-SXM4-80GB,gemm,torch_flow,bfloat16,4096,1536,5120,0.5\n"
    "TRTLLM,1.0.0,NVIDIA A100-SXM4-80GB,gemm,torch_flow,fp8,4096,1536,5120,0.3\n"
    "TRTLLM,1.0.0,NVIDIA A100-SXM4-80GB,gemm,torch_flow,bfloat16,1,1536,5120,0.1\n"
)
ATTENTION = (
    "framework,version,device,op_name,attn_dtype,batch_size,isl,num_heads,num_key_value_heads,"
    "head_dim,step,latency\n"
    "vLLM,0.14,NVIDIA H200,context_attention,bfloat16,2,4096,32,8,128,0,3.5\n"
    "vLLM,0.14,NVIDIA H200,context_attention,bfloat16,2,16,32,8,128,0,0.1\n"
)
NCCL = (
    "framework,version,device,op_name,nccl_dtype,num_gpus,message_size,latency\n"
    "TRTLLM,1.0.0,NVIDIA H200,all_gather,half,8,1048576,0.02\n"
)


def written(tmp_path, body, name="file.json"):
    path = tmp_path / name
    path.write_text(body if isinstance(body, str) else json.dumps(body))
    return path


def points(imported):
    """Every record as its curve, its point and its microseconds."""
    return [
        (
            record.case.passes[0].curve,
            record.case.passes[0].sizes,
            round(record.measured.times["time"].median_us, 1),
        )
        for record in imported.records
    ]


def test_simumax_efficiencies_are_times(tmp_path):
    imported = read_import(written(tmp_path, SIMUMAX))

    assert points(imported) == [
        ("forward", (4096, 1536, 5120), 413.0),  # 2 x 4096 x 5120 x 1536 / 156 TFLOP/s
        ("weight_gradient", (1536, 5120, 4096), 826.0),
        ("flash_backward", (32, 4096, 128), 2202.5),  # 5 x 2 x 4096^2 x 16 x 256 / 312 TFLOP/s
    ]
    assert imported.num_devices == 8
    assert [line.split(":")[0] for line in imported.left_out] == [
        "1 of matmul",
        "1 of sdp_bwd",
        "1 of networks",
    ]
    assert re.fullmatch(r"SimuMax mine, \d{4}-\d\d-\d\d", imported.records[0].detail)


@pytest.mark.parametrize(
    ("machine", "key", "value", "point"),
    [
        # 2 x 7/8 of 32 MiB at 56 MiB/ms
        ("1nodes_8gpus", "allreduce_size_8_consec_1", 56, ("all_reduce", (32 << 20, 1, 8, 1), 1e3)),
        ("2nodes_8gpus", "allreduce_size_2_consec_1", 32, ("all_reduce", (32 << 20, 1, 2, 4), 1e3)),
        ("2nodes_8gpus", "allreduce_size_8_consec_0", 56, ("all_reduce", (32 << 20, 2, 4, 2), 1e3)),
        ("2nodes_8gpus", "allreduce_size_2_consec_0", 32, ("all_reduce", (32 << 20, 2, 1, 8), 1e3)),
        ("2nodes_8gpus", "pp_size_2", 16, ("point_to_point", (32 << 20, 2, 1, 8), 2e3)),
        ("1nodes_8gpus", "pp_size_2", 16, ("point_to_point", (32 << 20, 1, 2, 4), 2e3)),
        ("1nodes_8gpus", "all2all_size_4_64MB_time", 0.5, ("all_to_all", (64 << 20, 1, 4, 2), 500)),
    ],
)
def test_galvatron_bandwidths_are_times_of_groups(tmp_path, machine, key, value, point):
    path = written(tmp_path, {key: value}, f"hardware_{machine}_per_node.json")

    assert points(read_import(path)) == [point]


def test_galvatron_groups_without_a_place_are_left_out(tmp_path):
    body = {"allreduce_size_4_consec_1": 100, "allreduce_size_4_consec_0": 100}

    imported = read_import(written(tmp_path, body, "a_1nodes_8gpus_per_node.json"))

    assert len(imported.records) == 1
    assert imported.left_out == (
        "allreduce_size_4_consec_0: groups inside a node are priced as neighbours",
    )


@pytest.mark.parametrize(
    ("text", "device", "point"),
    [
        (GEMM, "NVIDIA A100-SXM4-80GB", ("forward", (4096, 1536, 5120), 500.0)),
        (ATTENTION, "NVIDIA H200", ("flash_forward", (64, 4096, 128), 3500.0)),
        (NCCL, "NVIDIA H200", ("all_gather", (2 << 20, 1, 8, 1), 20.0)),
    ],
)
def test_aiconfigurator_rows_in_16_bits_are_points(tmp_path, text, device, point):
    imported = read_import(written(tmp_path, text, "perf.txt"))

    assert (imported.driver_name, points(imported)) == (device, [point])


def test_metis_and_galvatron_times_of_layers():
    metis = {
        "execution_time": {
            "total_time_ms": 20.0,
            "optimizer_time_ms": 4.0,
            "layer_compute_total_ms": [1.0, 5.0, 5.0, 2.0],
        }
    }
    galvatron = {
        "layernum[2]_bsz4_seq2048": 20.0,
        "layernum[4]_bsz4_seq2048": 30.0,
        "layernum[2]_bsz1_seq2048": 9.0,
        "layertype_0_bsz1_seq2048": 2.0,
        "layertype_other_bsz1_seq2048": 5.0,
    }

    times = read_layer_file(metis, "DeviceType.A100_tp2_bs4.json", 1)

    assert (times.device, times.tp, times.micro_batch_size, times.num_blocks) == ("A100", 2, 4, 2)
    assert (times.passes_s, times.optimizer_s, times.step_s) == pytest.approx((0.013, 0.004, 0.02))
    assert read_layer_file(galvatron, "c.json", 4).forward_s == pytest.approx({2: 0.02, 4: 0.03})
    assert read_layer_file(galvatron, "c.json", 1).forward_s == pytest.approx({0: 5e-3, 1: 7e-3})
    with pytest.raises(ConfigError, match=r"needed are times at batch 8.* found are batch 1"):
        read_layer_file(galvatron, "c.json", 8)


def without(body, *path):
    """A copy of a document without one key."""
    copy = json.loads(json.dumps(body))
    place = copy
    for key in path[:-1]:
        place = place[key]
    del place[path[-1]]
    return copy


@pytest.mark.parametrize(
    ("body", "name", "message"),
    [
        pytest.param(
            without(SIMUMAX, "accelerator", "op", "matmul", "tflops"),
            "s.json",
            "accelerator.op.matmul.tflops is missing",
            id="peak",
        ),
        pytest.param(
            SIMUMAX
            | {"accelerator": {"op": {"matmul": {"tflops": 1, "accurate_efficient_factor": []}}}},
            "s.json",
            "accelerator.op.matmul.accurate_efficient_factor is '[]', needed is a mapping",
            id="no-mapping",
        ),
        pytest.param(
            {"allreduce_size_8_64MB_time": 1e300},
            "sp_time_1nodes_8gpus_per_node.json",
            "allreduce_size_8_64MB_time is 1e+300, needed is a number from 1e-30 to 1e+30",
            id="endless",
        ),
        pytest.param(
            without(SIMUMAX, "accelerator", "op"), "s.json", "accelerator.op is missing", id="op"
        ),
        pytest.param({"pp_size_2": 3}, "p2p.json", "does not say the nodes and the GPU", id="name"),
        pytest.param(
            {"pp_size_2": "fast"},
            "p_1nodes_8gpus_per_node.json",
            "pp_size_2 is 'fast', needed is a number from 1e-30",
            id="no-number",
        ),
        pytest.param(
            GEMM.replace(",k,latency", ",depth,latency"), "g.txt", "the column k is missing", id="k"
        ),
        pytest.param(
            GEMM.replace(",0.5\n", ",\n"),
            "g.txt",
            "g.txt:2: latency in ms is '', needed is a number from 1e-30",
            id="ms",
        ),
        pytest.param({"a": 1}, "a.json", "its format is unknown, known are Simu", id="unknown"),
        pytest.param("PAR1....", "a.parquet", "it is a Parquet file", id="parquet"),
        pytest.param(
            {"execution_time": {}}, "m.json", "times of a model's layers, not of", id="layers"
        ),
        pytest.param(
            SIMUMAX | {"accelerator": {"op": {"default": {}}}},
            "s.json",
            "no measurement in it has a place in a profile",
            id="nothing",
        ),
    ],
)
def test_a_file_that_lacks_something_says_what(tmp_path, body, name, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        read_import(written(tmp_path, body, name))


@pytest.mark.parametrize(
    ("body", "name", "message"),
    [
        ({"execution_time": {}}, "DeviceType.A100_tp1_bs1.json", "layer_compute_total_ms is missi"),
        ({"execution_time": {}}, "metis.json", "its name does not say the device, tp and the bat"),
        (
            {"execution_time": {"layer_compute_total_ms": [1, 2, 3]}},
            "DeviceType.A100_tp1_bs1.json",
            "execution_time.optimizer_time_ms is missing",
        ),
    ],
)
def test_a_metis_file_that_lacks_something_says_what(body, name, message):
    with pytest.raises(ConfigError, match=message):
        read_layer_file(body, name, 1)
