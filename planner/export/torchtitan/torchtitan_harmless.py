"""Options of torchtitan that leave the time and the memory of a step as they are."""

from __future__ import annotations

from parplan.planner.export.fields.harmless import harmless

HARMLESS = (
    harmless(
        "torchtitan/config/configs.py at b5bcd76c66, and job_config.py of release 0.2.2",
        """--job.* --checkpoint.* --metrics.* --profiling.* --profiler.* --comm.* --debug.seed
        --debug.deterministic* --debug.print-config --debug.save-config-file
        --debug.moe-force-load-balance --debug.enable-structured-logging --validator.*
        --validation.* --lr-scheduler.* --experimental.custom-* --dataloader.*
        --training.dataset* --training.steps --training.max-norm --training.warmup-steps
        --training.seed --training.deterministic --training.gc-* --training.data-path
        --training.mixed-precision-reduce --dump-folder --hf-assets-path --tokenizer.*
        --memory-estimation.* --fault-tolerance.* --model.tokenizer-path
        --model.hf-assets-path --model.print-after-conversion --model.norm-type
        --activation-checkpoint.preserve-rng-state --activation-checkpoint.determinism-check
        --activation-checkpoint.debug --activation-checkpoint.early-stop
        --parallelism.disable-loss-parallel --parallelism.enable-loss-parallel
        --parallelism.spmd-backend --parallelism.context-parallel-load-balancer
        --parallelism.enable-compiled-autograd --experimental.enable-compiled-autograd
        --compile.backend --compile.components --optimizer.lr --optimizer.eps
        --optimizer.beta* --optimizer.weight-decay --float8.* --mx.* --quantize.*
        --model.flavor --model.name --module --log-rank --optimizer.implementation
        --optimizer.fused --optimizer.lr-min --loss.*""",
    ),
)
