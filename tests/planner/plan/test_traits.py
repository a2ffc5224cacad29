"""The traits of a run follow from its model, machine, mesh and ZeRO stage."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parplan.costmodels.communication.mesh import Mesh
from parplan.planner.plan.traits import Run, traits_of
from parplan.profiles.machines.machine_catalog import load_cluster, load_stack
from parplan.profiles.machines.shipped_profiles import machine_for
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.spec import TrainingSpec
from parplan.profiles.product_formats import ProductFormat


@pytest.mark.parametrize(
    ("model", "gpu", "gpus", "mesh", "zero", "products", "traits"),
    [
        pytest.param(
            "gpt-tiny", "a100-80gb", 1, Mesh(pp=1, dp=1, tp=1), 0, None, {"chip Ampere"}, id="one"
        ),
        pytest.param(
            "gpt-tiny",
            "h100-80gb",
            16,
            Mesh(pp=1, dp=1, tp=16),
            0,
            ProductFormat.FP8_CURRENT,
            {
                "chip Hopper or Ada",
                "narrow products",
                "tensor parallel",
                "tensor parallel across nodes",
                "several nodes",
            },
            id="tp-across-nodes-in-fp8",
        ),
        pytest.param(
            "mixtral-8x7b",
            "b200-180gb",
            512,
            Mesh(pp=2, dp=256, tp=1, ep=8),
            3,
            ProductFormat.MXFP8,
            {
                "chip Blackwell",
                "experts",
                "narrow products",
                "narrow products on Blackwell",
                "pipeline",
                "ZeRO 3",
                "ZeRO 3 across nodes",
                "several nodes",
                "over 256 GPUs",
            },
            id="experts-on-blackwell",
        ),
        pytest.param(
            "gpt-tiny",
            "cpu",
            1,
            Mesh(pp=1, dp=1, tp=1),
            0,
            None,
            {"chip another chip", "computed kernels"},
            id="nobody-measured",
        ),
    ],
)
def test_a_run_has_the_traits_of_its_parts(model, gpu, gpus, mesh, zero, products, traits):
    training = TrainingSpec(
        global_batch_size=512, seq_length=128, stack=load_stack("nemo"), products=products
    )
    cluster = load_cluster(gpu)
    cluster = replace(cluster, nodes=-(-gpus // cluster.gpus_per_node))
    run = Run(
        model=load_model(model).spec,
        training=training,
        machine=machine_for(cluster),
        mesh=mesh,
        zero=zero,
    )

    assert set(traits_of(run)) == {"stack megatron-core", *traits}
