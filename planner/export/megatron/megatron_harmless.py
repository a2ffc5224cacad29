"""Arguments of Megatron-LM that leave the time and the memory of a step as they are.

An argument that is in neither table and in no row is an error where its name touches parallelism,
recompute, precision, the optimizer and their like (fields/subjects.py); else it is named.
"""

from __future__ import annotations

from parplan.planner.export.fields.harmless import harmless

# Causal kernels do not read the mask that --reset-attention-mask makes; --fsdp-double-buffer keeps
# two gathered units, as the prices do.
HARMLESS = (
    harmless(
        "megatron/training/arguments.py and megatron/training/config of NVIDIA/Megatron-LM at "
        "d98e8a64dd: data, learning rate, files, lines and checks",
        """--data-path --data-cache-path --data-args-path --per-split-data-args-path
        --train-data-path --valid-data-path --test-data-path --split --mock-data
        --no-mmap-bin-files --num-workers --dataloader-type --num-dataset-builder-threads
        --mid-level-dataset-surplus --eod-mask-loss --no-create-attention-mask-in-dataloader
        --create-attention-mask-in-dataloader --dataloader-fast-cache-load
        --dataloader-defer-npy-index-mmap --object-storage-cache-path --vocab-file
        --vocab-extra-ids --tokenizer-* --tiktoken-* --special-tokens --image-tag-type
        --null-tokenizer-* --use-tokenizer-model-from-checkpoint-args --trust-remote-code
        --fim-* --legacy-tokenizer --vocab-size-in-file --allow-ambiguous-pad-tokens
        --chat-template --lr --min-lr --lr-* --decoupled-lr --decoupled-min-lr --weight-decay
        --start-weight-decay --end-weight-decay --weight-decay-incr-style
        --apply-wd-to-qk-layernorm --clip-grad --no-weight-decay-cond-type --adam-beta1
        --adam-beta2 --adam-eps --sgd-momentum --muon-momentum --muon-nesterov
        --muon-scale-mode --muon-fp32-matmul-prec --muon-num-ns-steps
        --muon-extra-scale-factor --muon-coefficient-type --muon-no-split-qkv
        --override-opt-param-scheduler --override-opt_param-scheduler
        --use-checkpoint-opt-param-scheduler --use-checkpoint-opt_param-scheduler --warmup
        --train-iters --train-samples --iterations-to-skip --phase-transition-iterations
        --train-sync-interval --skip-train --finetune --seed --init-method-std --init-method-*
        --embedding-init-method* --data-parallel-random-init --perform-initialization
        --no-initialization --init-model-with-meta-device --use-cpu-initialization --exit-*
        --hysteresis --loss-scale --loss-scale-window --initial-loss-scale --min-loss-scale
        --calculate-per-token-loss --decrease-batch-size-if-needed --iter-per-epoch --save
        --save-* --load --load-* --no-load-* --no-save-* --ckpt-* --no-ckpt-* --dist-ckpt-*
        --use-dist-ckpt --use-dist-ckpt-deprecated --use-checkpoint-args --async-save
        --async-strategy --async-ckpt-* --auto-detect-ckpt-format --non-persistent-*
        --use-persistent-ckpt-worker --pretrained-checkpoint --verify-integrity
        --override-ckpt-iteration --strict-fsdp-dtensor-load --enable-msc --disable-msc
        --replication --replication-jump --replication-factor --fully-parallel-load
        --fully-parallel-save --hetereogenous-dist-checkpoint --log-* --tensorboard-*
        --wandb-* --timing-log-* --eval-* --full-validation --multiple-validation-sets
        --validation-set-names --start-eval-at-iter --one-logger-* --no-one-logger
        --enable-one-logger --app-tag-* --logging-level --otel-* --record-memory-history
        --memory-snapshot-path --barrier-with-L1-time --no-barrier-with-level-1-timing
        --run-workload-inspector-server --filter-warnings --set-level-for-all-loggers
        --config-logger-dir --throughput-window-size --profile --profile-*
        --use-pytorch-profiler --pytorch-profiler-* --nvtx-ranges --use-nsys-profiler
        --record-shapes --mem-profile-* --langrl-* --external-eval --manual-gc --manual-gc-*
        --check-for-* --no-check-for-* --rerun-mode --error-injection-*
        --check-weight-hash-across-dp-replicas-interval --disable-straggler-on-startup
        --straggler-* --flight-recorder-* --inprocess-* --enable-ft-package --ft-*
        --calc-ft-timeouts --adlr-autoresume --adlr-autoresume-interval --distributed-backend
        --suspend-* --distributed-timeout-minutes --distributed-timeout-seconds-after-init
        --enable-experimental --use-gloo-process-groups --disable-gloo-process-groups
        --enable-gloo-process-groups --nccl-communicator-config-path
        --high-priority-stream-groups --use-sharp --sharp-enabled-group
        --offset-sampling-seed-by-dp-rank --deterministic-mode
        --use-same-sampling-seed-across-dp-ranks --te-rng-tracker --inference-rng-tracker
        --pipeline-model-parallel-comm-backend --local-rank --lazy-mpu-init --log_*""",
    ),
    harmless(
        "the same: names of what the prices take for granted, or of a few numbers of a block",
        """--use-mcore-models --DDP-impl --use-legacy-models --use-flash-attn
        --attention-softmax-in-fp32 --accumulate-allreduce-grads-in-fp32
        --no-masked-softmax-fusion --masked-softmax-fusion --no-query-key-layer-scaling
        --apply-query-key-layer-scaling --apply-layernorm-1p --layernorm-zero-centered-gamma
        --attention-output-bias --no-position-embedding --bias-dropout-fusion
        --bias-activation-fusion --bias-swiglu-fusion --bias-gelu-fusion
        --gradient-accumulation-fusion --no-gradient-accumulation-fusion --apply-rope-fusion
        --persist-layer-norm --cross-entropy-fusion-impl --gradient-reduce-div-fusion
        --overlap-p2p-comm --batch-p2p-comm --deallocate-pipeline-outputs --align-grad-reduce
        --align-param-gather --ddp-average-in-collective --ddp-num-buckets
        --ddp-pad-buckets-for-high-nccl-busbw --disable-bf16-reduced-precision-matmul
        --rotary-seq-len-interpolation-factor --rotary-scaling-factor --rotary-interleaved
        --use-rope-scaling --rope-scaling-factor --rope-type --no-rope-freq --mscale
        --mscale-all-dim --original-max-position-embeddings --yarn-* --beta-fast --beta-slow
        --softmax-scale --softmax-type --mup-* --use-mup --openai-gelu --onnx-safe --qk-clip*
        --fp8-amax-compute-algo --fp8-amax-history-len --fp8-margin --fp8-interval
        --fp4-recipe --moe-router-load-balancing-type --moe-aux-loss-coeff --moe-z-loss-coeff
        --moe-router-dtype --moe-router-pre-softmax --moe-router-num-groups
        --moe-router-group-topk --moe-router-topk-limited-devices
        --moe-router-enable-expert-bias --moe-router-bias-update-rate --moe-router-fusion
        --moe-router-force-load-balancing --moe-router-padding-for-fp8
        --moe-router-padding-for-quantization --moe-input-jitter-eps --moe-token-drop-policy
        --moe-permute-fusion --moe-use-legacy-grouped-gemm --moe-per-layer-logging
        --moe-deepep-num-sms --moe-enable-deepep --moe-flex-dispatcher-backend
        --moe-flex-dispatcher-num-sms --moe-hybridep-* --moe-permute-fusion-into-hybridep
        --mtp-loss-scaling-factor --reset-position-ids --reset-attention-mask
        --fsdp-double-buffer --fsdp-manual-registration --tp-comm-overlap-cfg
        --tp-comm-bootstrap-backend --tp-comm-overlap-rs-dgrad""",
    ),
)
