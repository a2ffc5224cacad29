"""Settings of Megatron-Bridge and NeMo that leave the time and the memory of a step as they are."""

from __future__ import annotations

from parplan.planner.export.fields.harmless import harmless

HARMLESS = (
    harmless(
        "src/megatron/bridge/training/config.py and scripts/training/run_recipe.py of "
        "NVIDIA-NeMo/Megatron-Bridge at 067f987df0",
        """--recipe --model --mode --config-file --dataset --step-func --hf-path --wandb-*
        --nsys-* --gpu --domain --task --detach --dryrun --hf-token --nemo-home --data train
        train.train_iters train.train_samples train.manual-gc* train.exit-* train.check-*
        train.empty-unused-memory-level train.eval-* validation validation.* scheduler
        scheduler.* dataset dataset.random-seed dataset.eod-mask-loss dataset.reset-*
        dataset.num-workers dataset.num-dataset-builder-threads dataset.blend* dataset.split
        dataset.dataloader-type dataset.skip-getting-* dataset.data-sharding dataset.path*
        dataset.data-path dataset.dataset-name dataset.dataset-root dataset.hf-*
        dataset.memmap-workers dataset.seed dataset.create-attention-mask
        dataset.persistent-workers dataset.pin-memory dataset.train-* dataset.mmap-bin-files
        dataset.path-to-cache dataset.do-test dataset.do-validation dataset.max-train-samples
        dataset.rewrite dataset.val-* dataset.test-* logger logger.* tokenizer
        tokenizer.tokenizer-* tokenizer.hf-* tokenizer.use-* tokenizer.vocab-file
        tokenizer.merge-file tokenizer.metadata-path checkpoint checkpoint.* rng rng.* dist
        dist.distributed-* dist.enable-megatron-core-* dist.use-gloo-* dist.lazy-init
        dist.align-* dist.external-* dist.use-decentralized-pg dist.high-priority-*
        dist.nccl-* dist.sharp-* env-vars* rerun-state-machine* straggler* profiling* ft ft.*
        nvrx* inprocess-restart* ddp ddp.check-for-* ddp.average-in-* ddp.pad-buckets-*
        ddp.nccl-ub ddp.align-param-gather comm-overlap comm-overlap.tp-comm-overlap-cfg
        comm-overlap.tp-comm-bootstrap-backend comm-overlap.batch-p2p-comm optimizer
        optimizer.lr optimizer.min-lr optimizer.weight-decay* optimizer.adam-beta*
        optimizer.adam-eps optimizer.clip-grad optimizer.use-precision-aware-optimizer
        optimizer.overlap-param-gather-with-optimizer-step
        comm-overlap.overlap-param-gather-with-optimizer-step optimizer.sgd-momentum
        optimizer.muon-* optimizer.log-* optimizer.decoupled-* optimizer.loss-scale*
        optimizer.initial-loss-scale optimizer.use-checkpoint-*
        optimizer-config-override-provider* tensor-inspect* mixed-precision.loss-scale*""",
    ),
    harmless(
        "models/gpt_provider.py there, and the fields of TransformerConfig that the prices take "
        "for granted (megatron_harmless.py)",
        """model.init-method* model.apply-query-key-layer-scaling model.persist-layer-norm
        model.bias-dropout-fusion model.bias-activation-fusion model.masked-softmax-fusion
        model.gradient-accumulation-fusion model.apply-rope-fusion model.batch-p2p-comm
        model.overlap-p2p-comm model.deallocate-pipeline-outputs
        model.layernorm-zero-centered-gamma model.transformer-layer-spec
        model.calculate-per-token-loss model.should-pad-vocab model.cross-entropy-fusion-impl
        model.fp8-margin model.fp8-interval model.fp8-amax-* model.moe-router-dtype
        model.moe-router-fusion model.moe-router-pre-softmax model.moe-router-num-groups
        model.moe-router-group-topk model.moe-router-enable-*
        model.moe-router-bias-update-rate model.moe-router-load-balancing-type
        model.moe-router-force-load-balancing model.moe-router-padding-for-*
        model.moe-aux-loss-coeff model.moe-z-loss-coeff model.moe-permute-fusion
        model.moe-flex-dispatcher-* model.moe-deepep-num-sms model.moe-hybridep-*
        model.mtp-loss-scaling-factor model.moe-token-drop-policy model.moe-enable-deepep
        model.load-weights model.rotary-scaling-factor model.mscale* model.beta-* model.yarn-*
        model.rope-* model.original-max-position-embeddings model.softmax-scale
        model.softmax-type model.pipeline-dtype model.params-dtype model.autocast-dtype
        mixed-precision.params-dtype mixed-precision.pipeline-dtype
        mixed-precision.autocast-dtype model.use-cpu-initialization mixed-precision.fp8-amax-*
        mixed-precision.fp8-margin model.generation-config model.hf-pretrained*
        model.trust-remote-code model.qk-clip* model.rotary-interleaved
        model.pipeline-model-parallel-layout-builder
        model.-pipeline-model-parallel-layout-builder model.seed model.deterministic-mode
        model.tp-comm-overlap-cfg model.yarn* model.scatter-* model.tokenizer.*
        model.perform-initialization""",
    ),
    harmless(
        "launcher_scripts/conf of NVIDIA/NeMo-Framework-Launcher at 26e42fa91d, and "
        "examples/nlp/language_modeling/conf of NVIDIA/NeMo 2.0",
        """training run.* defaults.* hydra.* exp-manager exp-manager.* name restore-from-path
        base-results-dir data-dir cluster* stages* launcher-scripts-path data-preparation*
        env-vars.* trainer.logger trainer.accelerator trainer.use-distributed-sampler
        trainer.replace-sampler-ddp trainer.max-* trainer.log-* trainer.val-* trainer.limit-*
        trainer.enable-* trainer.num-nodes trainer.devices trainer.gradient-clip-*
        trainer.num-sanity-val-steps trainer.benchmark trainer.check-val-every-n-epoch
        trainer.profiler trainer.deterministic trainer.default-root-dir
        trainer.strategy.ckpt-* trainer.callbacks* model.pre-process model.post-process
        model.gradient-as-bucket-view model.grad-div-ar-fusion model.bias-dropout-add-fusion
        model.hysteresis model.sharp model.mcore-gpt model.transformer-engine model.onnx-safe
        model.apex-transformer-log-level model.nsys-profile.* model.use-scaled-init-method
        model.do-layer-norm-weight-decay model.normalize-attention-scores model.attention-type
        model.use-flash-attention model.gc-interval model.reduce-amax model.megatron-amp-O2
        model.native-amp-* model.precision model.fp8-hybrid model.grad-allreduce-chunk-size-mb
        model.ub-tp-comm-overlap-cfg* model.sync-batch-comm s3-checkpointing*
        model.nccl-communicator-config-path model.data.data-impl model.data.splits-string
        model.data.skip-warmup model.data.num-workers model.data.dataloader-type
        model.data.eod-mask-loss model.data.reset-* model.data.data-prefix
        model.data.index-mapping-dir model.data.validation-drop-last model.data.shuffle*
        model.data.no-seqlen-plus-one-input-tokens model.data.pad-samples-to-global-batch-size
        model.data.exchange-indices-distributed model.optim.lr model.optim.weight-decay
        model.optim.betas model.optim.sched* model.optim.bucket-cap-mb
        model.optim.average-in-collective model.optim.overlap-param-gather-with-optimizer-step
        model.optim.contiguous-* model.optim.eps model.optim.capturable
        model.resume-from-checkpoint model.restore-from-path
        model.seq-len-interpolation-factor model.get-attention-mask-from-fusion model.use-emha
        model.share-embeddings-* model.gradient-clip-val model.transformer-block-type
        model.headscale model.openai-gelu model.nemo-path model.fsdp-sharding-strategy
        model.fsdp-grad-reduce-dtype model.fsdp-sharded-checkpoint""",
    ),
)
