"""Overrides of Galvatron that leave the time and the memory of a step as they are."""

from __future__ import annotations

from parplan.planner.export.fields.harmless import harmless

HARMLESS = (
    harmless(
        "galvatron/core/runtime/args_schema.py of PKU-DAIR/Hetu-Galvatron at 0c28e916",
        """paths.* ckpt.* logging.* data.data-path data.split data.train-data-path
        data.valid-data-path data.test-data-path data.data-args-path data.per-split-data-args-path
        data.tokenizer-* data.shared-storage data.num-dataset-builder-threads data.data-cache-path
        data.mmap-bin-files data.s3-cache-path data.eod-mask-loss data.use-random-dataset
        data.create-attention-mask-in-dataloader train.seed train.iteration train.train-iters
        train.train-samples train.consumed-* train.eval-* train.skip-train train.do-*
        train.dataloader-type train.num-workers train.data-sharding train.lr train.min-lr
        train.lr-* train.weight-decay* train.start-weight-decay train.end-weight-decay
        train.adam-weight-decay train.adam-beta1 train.adam-beta2 train.adam-eps
        train.init-method-std train.use-checkpoint-opt-param-scheduler
        train.override-opt-param-scheduler train.global-memory-buffer train.clip-grad
        train.test-mode profile.save-profiled-memory profile.exit-after-profiling
        model.print-loss model.model-size model.initialize-on-meta model.hf-model-name-or-path
        model.model-config-path distributed-backend distributed-timeout-minutes rank world-size
        local-rank parallel.galvatron-config-path parplan""",
    ),
)
