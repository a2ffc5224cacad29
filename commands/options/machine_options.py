"""Options for the machine that trains."""

from __future__ import annotations

from parplan.commands.options.sections import WHERE
from parplan.commands.style import Whole, option, together

gpu_options = together(
    option(WHERE, "--gpus", type=Whole("gpus"), metavar="N", help="Number of GPUs."),
    option(
        WHERE,
        "--gpu",
        names="clusters",
        metavar="NAME",
        help="GPU, a name of `plan clusters`, or pools of them: NAME:GPUS+NAME:GPUS. [default: "
        "a100-80gb, or the profile's]",
    ),
    option(
        WHERE,
        "--gpus-per-node",
        type=Whole("gpus_per_node"),
        metavar="N",
        help="GPUs in a node. [default: the cluster's]",
    ),
    option(
        WHERE,
        "--cluster",
        metavar="FILE",
        help="Cluster YAML instead of --gpu; it may give the number of GPUs.",
    ),
    option(
        WHERE,
        "--host-memory",
        metavar="SIZE",
        help="Host memory of a node, such as 240GiB. [default: the cluster's]",
    ),
)
machine_options = together(
    gpu_options,
    option(
        WHERE,
        "--profile",
        metavar="FILE",
        help="Hardware profile of `plan profile` or `plan calibrate`.",
    ),
    option(
        WHERE,
        "--force-profile",
        is_flag=True,
        help="Use the profile even for another device, stack or precision, or beside other prices.",
    ),
)
