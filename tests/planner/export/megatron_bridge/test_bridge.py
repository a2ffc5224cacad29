"""Megatron-Bridge's overrides and recipes, and NeMo's YAML, say what Megatron-LM's arguments do."""

from __future__ import annotations

import pytest

from parplan.costmodels.communication.mesh import MeshOrder
from parplan.costmodels.layers.recompute import Recompute
from parplan.planner.export.exported import export_plan
from parplan.planner.export.fields.arguments import Given
from parplan.planner.export.launcher_file import read_launcher_file
from parplan.planner.export.targets import TARGETS, target_named
from parplan.profiles.errors import ConfigError
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.spec import Precision
from parplan.profiles.product_formats import ProductFormat
from tests.helpers.laid_out_plans import laid_out

EXACT = 1e-9  # share of a step


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(lambda: laid_out(pp=2, dp=2, blocks=(26, 28)), id="unequal-stages"),
        pytest.param(lambda: laid_out("llama3-8b", dp=4, zero=3), id="a-recipe-of-its-own"),
        pytest.param(
            lambda: laid_out(
                "deepseek-v2-lite", pp=3, dp=2, ep=2, seq_length=2048, num_micro_batches=6
            ),
            id="experts-and-latent-attention",
        ),
        pytest.param(
            lambda: laid_out(
                pp=2, dp=2, tp=2, order=MeshOrder.DP_PP_TP, stack="nemo", seq_length=1024
            ),
            id="stages-before-copies",
        ),
    ],
)
def test_overrides_say_all_of_such_a_plan(plan):
    one = export_plan(plan(), target_named("megatron-bridge"), "plan.yaml")

    assert one.losses == ()
    assert one.configured.price.step_s == pytest.approx(one.plan.price.step_s, rel=EXACT)
    assert one.configured.peak_bytes == pytest.approx(one.plan.peak_bytes, rel=EXACT)


# the settings that NVIDIA-NeMo/Megatron-Bridge at 067f987df0 has in src/megatron/bridge/
# perf_recipes/llama/h100/llama3.py, llama3_8b_pretrain_8gpu_h100_fp8cs_config
RECIPE = """
def llama3_8b_pretrain_8gpu_h100_fp8cs_config():
    cfg = ConfigContainer(
        train=TrainingConfig(global_batch_size=32, micro_batch_size=2),
        ddp=DDP(overlap_grad_reduce=True, use_distributed_optimizer=True),
    )
    cfg.model = AutoBridge.from_hf_pretrained("meta-llama/Meta-Llama-3-8B").get_model_config()
    cfg.mixed_precision = _perf_precision("fp8_cs")
    cfg.mixed_precision.grad_reduce_in_fp32 = False
    cfg.dataset.seq_length = 8192
    cfg.model.pipeline_model_parallel_layout = None
    cfg.model.cross_entropy_loss_fusion = True
    cfg.train.global_batch_size = 128
    cfg.train.micro_batch_size = 1
    cfg.model.recompute_granularity = "full"
    cfg.model.recompute_method = "block"
    cfg.model.recompute_num_layers = 5
    cfg.comm_overlap = CommOverlapConfig(tp_comm_overlap=False)
    return cfg
"""


def test_a_recipe_is_read_with_the_gpus_that_its_name_says(tmp_path):
    path = tmp_path / "llama3.py"
    path.write_text(RECIPE)
    file = read_launcher_file(path, TARGETS)
    settings = file.settings(file.model(), file.num_gpus)

    assert file.model() == load_model("llama3-8b").spec
    assert (settings.dp, settings.global_batch_size, settings.micro_batch_size) == (8, 128, 1)
    assert (settings.zero, settings.overlap, settings.fused_loss) == (1, True, True)
    assert (settings.recompute, settings.recompute_blocks) == (Recompute.FULL, 5)
    assert settings.products is ProductFormat.FP8_CURRENT
    assert settings.narrow_weights
    assert settings.gradient_precision is Precision.BF16


# the values that NVIDIA/NeMo-Framework-Launcher at 26e42fa91d has in launcher_scripts/conf/
# training/llama/llama2_70b.yaml and examples/training/llama/h100/llama2_70b_fp8.sh
NEMO = """
trainer: {num_nodes: 128, devices: 8, precision: bf16}
model:
  micro_batch_size: 1
  global_batch_size: 2048
  tensor_model_parallel_size: 4
  pipeline_model_parallel_size: 4
  virtual_pipeline_model_parallel_size: 5
  encoder_seq_length: 4096
  max_position_embeddings: 4096
  num_layers: 80
  hidden_size: 8192
  ffn_hidden_size: 28672
  num_attention_heads: 64
  num_query_groups: 8
  hidden_dropout: 0.0
  attention_dropout: 0.0
  kv_channels: null
  normalization: rmsnorm
  bias: false
  activation: fast-swiglu
  position_embedding_type: rope
  share_embeddings_and_output_weights: false
  tokenizer: {library: sentencepiece, model: "${data_dir}/llama/llama_tokenizer.model"}
  activations_checkpoint_granularity: null
  activations_checkpoint_method: block
  activations_checkpoint_num_layers: 0
  sequence_parallel: true
  cross_entropy_loss_fusion: true
  fp8: false
  ub_tp_comm_overlap: true
  optim: {name: mcore_distributed_optim, overlap_grad_sync: true, overlap_param_sync: true}
"""
LAUNCH = """HYDRA_FULL_ERROR=1 python3 main.py \\
training=llama/llama2_70b \\
training.trainer.num_nodes=8 \\
training.model.global_batch_size=128 \\
training.model.fp8=True \\
training.model.tokenizer.model=${TOK_PATH} \\
+training.model.optim.grad_sync_dtype=bf16 \\
"""


def test_a_launch_over_a_configuration_of_nemo_is_read_with_it(tmp_path):
    base = tmp_path / "launcher_scripts/conf/training/llama/llama2_70b.yaml"
    base.parent.mkdir(parents=True)
    base.write_text(NEMO)
    path = tmp_path / "examples/llama2_70b_fp8.sh"
    path.parent.mkdir()
    path.write_text(LAUNCH)
    file = read_launcher_file(path, TARGETS)
    model = file.model()
    settings = file.settings(model, file.num_gpus)

    assert model.vocab_size == load_model("llama2-70b").spec.vocab_size
    assert (file.num_gpus, settings.tp, settings.pp, settings.virtual_stages) == (64, 4, 4, 5)
    assert (settings.zero, settings.global_batch_size, settings.tp_overlap) == (1, 128, True)
    assert settings.recompute is Recompute.NONE
    assert settings.products is ProductFormat.FP8_DELAYED
    assert settings.gradient_precision is Precision.BF16


def test_the_order_of_the_axes_is_written_read_and_searched():
    bridge = target_named("megatron-bridge")
    plan = laid_out(pp=2, dp=2, tp=2, order=MeshOrder.DP_PP_TP, stack="nemo")
    sheet = export_plan(plan, bridge, "plan.yaml").files["megatron-bridge.sh"]
    given = bridge.arguments(sheet, "megatron-bridge.sh")
    of_nemo = (*given, Given("model.use_tp_pp_dp_mapping", ("true",), "launch.sh"))
    without = tuple(each for each in of_nemo if each.name != "dist.use_tp_pp_dp_mapping")

    assert "dist.use_tp_pp_dp_mapping=true" in sheet
    for arguments in (given, without):
        assert bridge.settings(arguments, plan.model, 8).order is MeshOrder.DP_PP_TP
    fsdp = (*given, Given("ddp.use_megatron_fsdp", ("true",), ""))
    sharded = (*fsdp, Given("ddp.data_parallel_sharding_strategy", ("optim_grads",), ""))
    with pytest.raises(ConfigError, match="does not run with Megatron FSDP"):
        bridge.settings(sharded, plan.model, 8)
    assert "dp-pp-tp" in plan.training.stack.mesh_orders


def test_overrides_over_a_recipe_that_is_not_there_are_refused(tmp_path):
    path = tmp_path / "train.sh"
    path.write_text(
        "run_recipe.py --recipe mine_pretrain_config -tp 2 model.pipeline_model_parallel_size=2\n"
    )
    with pytest.raises(ConfigError, match="the recipe mine_pretrain_config"):
        read_launcher_file(path, TARGETS)


def test_a_setting_without_a_price_is_refused_with_its_line(tmp_path):
    path = tmp_path / "recipe.py"
    path.write_text(RECIPE.replace("comm_overlap =", "optimizer.optimizer_cpu_offload = True #"))
    file = read_launcher_file(path, TARGETS)
    with pytest.raises(ConfigError, match=r"recipe.py:18: optimizer\.optimizer_cpu"):
        file.settings(load_model("llama3-8b").spec, 8)
