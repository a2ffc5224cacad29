"""The table of pools that divide the batch among them."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from parplan.planner.request import Request
from parplan.planner.search.pools_divide_data import DividedBatch
from parplan.report.names import plan_phrase
from parplan.report.plans.plan_header import short_assumed
from parplan.report.text import gib_text, joined, percent, print_table, say, seconds_text

_NOTE = (
    "each pool runs whole replicas of its own plan, and the executor takes the files of all pools "
    "as one job"
)


def print_shares(
    divided: DividedBatch,
    request: Request,
    assumed: Sequence[str],
    out: Console,
    *,
    whole: bool = False,
) -> None:
    """Print the share and the plan of each pool, and the step of all.

    whole   every default with its reason
    """
    training = request.training
    title = (
        request.model.name,
        request.cluster.text,
        f"pools divide {training.global_batch_size:,} x {training.seq_length:,} tokens",
    )
    say(out, joined(title, " | ", out.width), "bold")
    every = joined(assumed, ", ", out.width, start="assumed: ")
    say(out, every if whole else short_assumed(assumed, out.width, listed=True), "dim")
    say(out)
    print_table(
        out,
        ("pool", "GPUs", "sequences", "step", "GiB", "gap"),
        [
            (
                share.pool,
                share.plan.cluster.gpus_text,
                f"{share.sequences:,}",
                seconds_text(share.step_s),
                gib_text(max(memory.total for memory in share.plan.predicted.memory_gib)),
                percent(share.plan.search.gap),
            )
            for share in divided.shares
        ],
        left=("pool", "GPUs"),
    )
    say(out)
    plans = [(share.pool, plan_phrase(share.plan)) for share in divided.shares]
    print_table(out, ("pool", "plan"), plans, left=("pool", "plan"))
    tokens = training.tokens_per_step / divided.step_s / request.cluster.num_gpus
    say(out)
    step = (
        f"{seconds_text(divided.step_s)} (analytic)",
        f"{seconds_text(divided.exchange_s)} of it to add the gradients of the pools",
        f"{tokens:,.0f} tokens/s/GPU",
    )
    say(out, joined(step, ", ", out.width, start="  step      "))
    say(out, f"  redundant {divided.redundant_gib:,.1f} GiB over all GPUs")
    shares = "all shares were tried" if divided.all_tried else "the shares are not proven the best"
    if divided.stopped:
        shares = f"stopped early ({divided.stopped}): the shares are the best so far"
    proven = f"each plan for its share; {shares}"
    say(out, joined(proven.split(" "), " ", out.width, start="  proven    "))
    say(out, joined(_NOTE.split(" "), " ", out.width, start="  note      "), "dim")
