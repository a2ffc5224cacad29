"""The entry point of the command line; `commands` has one file per command."""

from __future__ import annotations

from parplan.commands import (
    calibrate,
    check,
    clusters,
    compare,
    estimate,
    explain,
    max_model,
    models,
    plan,
    profile,
    schema,
    show,
    stacks,
    tokenize,
    trace,
    validate,
)

main = plan.main
for command in (
    calibrate.calibrate,
    check.check,
    clusters.clusters,
    compare.compare,
    estimate.estimate,
    explain.explain,
    max_model.max_model,
    models.models,
    profile.profile,
    schema.schema,
    show.show,
    stacks.stacks,
    tokenize.tokenize,
    trace.trace,
    validate.validate,
):
    main.add_command(command)


if __name__ == "__main__":
    main()
