"""`plan init`: writes a commented cluster file, or says what is missing or unlikely in one."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from parplan.commands.options.result_options import as_json
from parplan.commands.options.sections import OUTPUT
from parplan.commands.style import Command, Number, Whole, option, packs, print_json, print_lines

if TYPE_CHECKING:
    from parplan.profiles.inventory.machine_facts import Fact
    from parplan.profiles.machines.hardware import Tier

MACHINE = "The machine; the rest is looked for or asked for"
NETWORK = "The network above the nodes"
SOURCES = "Where to look"
CHECK = "Check a file"
GIVEN = "given"
ANSWERED = "answered"


@dataclass(frozen=True, slots=True, kw_only=True)
class InitOptions:
    """The facts that options of `plan init` give."""

    gpu: str | None = None
    nodes: int | None = None
    gpus_per_node: int | None = None
    hosts_per_node: int | None = None
    link_gb_per_s: float | None = None
    nics: int | None = None
    nic_gbit_per_s: float | None = None
    network: str | None = None
    host_memory: str | None = None
    levels: tuple[str, ...] = ()
    rails: bool = False
    look: bool = True
    sinfo: Path | None = None
    partition: str | None = None
    switches: Path | None = None
    ask: bool | None = None


@click.command(
    cls=Command,
    epilog="  plan init cluster.yaml\n"
    "  plan init cluster.yaml --gpu h100-80gb --nodes 16 --level leaf:32 --level pod:128:2 --rails "
    "--no-ask\n"
    '  sinfo -h -o "%P %D %G %m" > sinfo.txt && plan init cluster.yaml --sinfo sinfo.txt\n'
    "  plan init --check cluster.yaml --nccl-tests all_reduce.txt",
)
@click.argument("path", metavar="FILE", type=click.Path(path_type=Path))
@option(MACHINE, "--gpu", metavar="NAME", help="GPU, a name of `plan clusters`.")
@option(MACHINE, "--nodes", type=Whole("nodes"), help="Nodes.")
@option(MACHINE, "--gpus-per-node", type=Whole("gpus_per_node"), help="GPUs that a node has.")
@option(
    MACHINE,
    "--hosts-per-node",
    type=Whole("nodes"),
    help="Machines of a node, more than 1 where NVLink joins several: 18 in an NVL72 rack.",
)
@option(
    MACHINE,
    "--link-gb-per-s",
    type=Number(min=0, min_open=True),
    metavar="GB/S",
    help="Bandwidth of a GPU to those of its node, in one direction.",
)
@option(MACHINE, "--nics", type=Whole("nics_per_node"), help="NICs of a node that training uses.")
@option(
    MACHINE,
    "--nic-gbit-per-s",
    type=Number(min=0, min_open=True),
    metavar="GBIT/S",
    help="Rate of a NIC: 400 for NDR InfiniBand.",
)
@option(
    MACHINE,
    "--network",
    type=click.Choice(("infiniband", "roce", "efa", "omni-path")),
    help="What the NICs speak; the reached share of their rate depends on it.",
)
@option(MACHINE, "--host-memory", metavar="SIZE", help="Host memory of a node: 2TiB.")
@option(
    NETWORK,
    "--level",
    "levels",
    multiple=True,
    metavar="NAME:NODES[:OVERSUBSCRIPTION]",
    help="A leaf, rack or pod that joins NODES nodes; the NICs of its nodes have OVERSUBSCRIPTION "
    "times the bandwidth of its uplinks. From inside, may be repeated.",
)
@option(
    NETWORK,
    "--rails",
    is_flag=True,
    help="The first level is rail-optimised: each of its switches takes the same NIC of all nodes.",
)
@option(
    SOURCES,
    "--look/--no-look",
    default=True,
    show_default=True,
    help="Ask nvidia-smi, rocm-smi, lspci, numactl and ibstat about this machine.",
)
@option(
    SOURCES,
    "--sinfo",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help='Output of sinfo -h -o "%P %D %G %m"; `-` runs it.',
)
@option(SOURCES, "--partition", metavar="NAME", help="Partition of --sinfo. [default: the largest]")
@option(
    SOURCES,
    "--switches",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Output of scontrol show topology, whose switches become levels; `-` runs it.",
)
@option(
    SOURCES,
    "--ask/--no-ask",
    default=None,
    help="Ask for what was not found. [default: on a terminal]",
)
@option(CHECK, "--check", is_flag=True, help="Check FILE instead of writing it.")
@option(
    CHECK,
    "--nccl-tests",
    type=click.Path(path_type=Path),
    multiple=True,
    metavar="FILE",
    help="With --check, compare prices with what nccl-tests printed; may be repeated.",
)
@option(CHECK, "--test-nodes", type=Whole("nodes"), help="Nodes of --nccl-tests, if not in it.")
@option(
    CHECK,
    "--test-ranks-per-node",
    type=Whole("gpus_per_node"),
    help="Ranks of a node of --nccl-tests, if not in it.",
)
@option(OUTPUT, "--force", is_flag=True, help="Write over FILE.")
@as_json
@packs("given", InitOptions)
def init(
    path: Path,
    given: InitOptions,
    check: bool,
    nccl_tests: tuple[Path, ...],
    test_nodes: int | None,
    test_ranks_per_node: int | None,
    force: bool,
    as_json: bool,
) -> int:
    """Write a commented cluster file, or check one.

    The file describes the machine for --cluster of all commands. Figures come from options, from
    the tools of this machine, from a scheduler, from answers and from plan clusters, in this order;
    a comment at each says from where.
    """
    from parplan.profiles.errors import ConfigError

    if check:
        return _check(path, nccl_tests, test_nodes, test_ranks_per_node, as_json=as_json)
    if nccl_tests or test_nodes or test_ranks_per_node:
        raise ConfigError("--nccl-tests is of --check", hint=f"plan init --check {path}")
    _write(path, given, force=force, as_json=as_json)
    return 0


def _write(path: Path, given: InitOptions, *, force: bool, as_json: bool) -> None:
    from parplan.commands.output import require_new
    from parplan.profiles.documents.files import require_writable, write_text
    from parplan.profiles.documents.texts import name_of_file
    from parplan.profiles.inventory.cluster_draft import draft_of, draft_text
    from parplan.profiles.inventory.found_machine import found_machine
    from parplan.profiles.inventory.machine_facts import merged
    from parplan.report.machines.cluster_findings import draft_document

    hint = "choose another FILE"
    require_new(path, force=force, other=hint)
    require_writable(path, hint=hint)
    facts = merged(
        _given(given), _scheduled(given), found_machine() if given.look else {}, _switches(given)
    )
    if given.ask if given.ask is not None else sys.stdin.isatty():
        facts = merged(facts, _answers(facts))
    draft = draft_of(facts, name_of_file(path))
    write_text(draft_text(draft, str(path)), path, hint=hint)
    if as_json:
        print_json(draft_document(str(path), draft.cluster))
        return
    cluster = draft.cluster
    print_lines(
        f"wrote {path}: {cluster.nodes} x {cluster.gpus_per_node} {cluster.device.name}; check it "
        "with",
        f"  plan init --check {path}",
        err=True,
    )


def _given(given: InitOptions) -> dict[str, Fact]:
    from parplan.profiles.inventory.machine_facts import PLACES, Fact
    from parplan.profiles.units import parse_size

    stated = {name: getattr(given, name) for name in PLACES if hasattr(given, name)}
    facts = {name: Fact(value, GIVEN) for name, value in stated.items() if value is not None}
    if given.host_memory is not None:
        size = parse_size("--host-memory", given.host_memory)
        facts["host_memory_bytes"] = Fact(size, GIVEN)
    if given.levels:
        facts["tiers"] = Fact(_tiers(given.levels, given.rails), GIVEN)
    return facts


def _tiers(levels: tuple[str, ...], rails: bool) -> tuple[Tier, ...]:
    """Returns the tiers of `NAME:NODES[:OVERSUBSCRIPTION]`. Raises ConfigError for other forms."""
    from parplan.profiles.errors import ConfigError
    from parplan.profiles.inventory.cluster_draft import tier

    tiers: list[Tier] = []
    for level in levels:
        name, *numbers = level.split(":")
        try:
            nodes, *over = [float(number) for number in numbers]
            oversubscription = over[0] if over else 1.0
            legal = nodes >= 2 and nodes.is_integer() and oversubscription >= 1 and len(over) < 2
        except (ValueError, IndexError):
            legal = False
        if not (legal and name):
            raise ConfigError(
                f"--level {level}: needed NAME:NODES or NAME:NODES:OVERSUBSCRIPTION, with at least "
                "2 nodes and an oversubscription of at least 1",
                hint="for 32 nodes on a leaf with half of its bandwidth upwards: leaf:32:2",
            )
        tiers.append(
            tier(name, int(nodes), oversubscription, rails=rails and not tiers, source=GIVEN)
        )
    return tuple(tiers)


def _text(path: Path, command: tuple[str, ...]) -> str:
    """Returns the text of a file, or what the command prints where the path is `-`."""
    from parplan.profiles.documents.bounded import Hints, read_text
    from parplan.profiles.inventory.found_machine import said

    hint = f"save the output of: {' '.join(command)}"
    return said(command) if str(path) == "-" else read_text(path, hints=Hints(hint, hint))


def _scheduled(given: InitOptions) -> dict[str, Fact]:
    from parplan.profiles.inventory.found_machine import SINFO
    from parplan.profiles.inventory.machine_facts import Fact
    from parplan.profiles.inventory.scheduler import chosen_partition, partitions_of_sinfo
    from parplan.profiles.machines.driver_names import scheduled_device

    if given.sinfo is None:
        return {}
    chosen = chosen_partition(partitions_of_sinfo(_text(given.sinfo, SINFO)), given.partition)
    origin = f"sinfo, partition {chosen.name}"
    facts = {"nodes": chosen.nodes, "gpus_per_node": chosen.gpus_per_node}
    named = scheduled_device(chosen.gpu)
    return {
        **{name: Fact(value, origin) for name, value in facts.items()},
        **({"gpu": Fact(named, f"{origin}: {chosen.gpu}")} if named else {}),
        **({"host_memory_bytes": Fact(chosen.memory_bytes, origin)} if chosen.memory_bytes else {}),
    }


def _switches(given: InitOptions) -> dict[str, Fact]:
    from parplan.profiles.inventory.cluster_draft import tier
    from parplan.profiles.inventory.found_machine import SWITCHES
    from parplan.profiles.inventory.machine_facts import Fact
    from parplan.profiles.inventory.scheduler import levels_of_topology

    if given.switches is None:
        return {}
    origin = "scontrol show topology; the oversubscription of its uplinks is assumed to be 1"
    tiers = tuple(
        tier(
            f"switches-{each.level}",
            each.nodes,
            1.0,
            rails=given.rails and not each.level,
            source=origin,
        )
        for each in levels_of_topology(_text(given.switches, SWITCHES))
        if each.switches > 1 and each.nodes > 1
    )
    return {"tiers": Fact(tiers, "scontrol show topology")} if tiers else {}


def _answers(facts: Mapping[str, Fact]) -> dict[str, Fact]:
    """Returns answers to the questions that nothing has answered; Enter takes the usual machine."""
    from parplan.profiles.inventory.machine_facts import Fact
    from parplan.profiles.machines.machine_catalog import load_cluster
    from parplan.profiles.units import GB

    gpu = facts["gpu"].value if "gpu" in facts else click.prompt("GPU (a name of plan clusters)")
    usual = load_cluster(str(gpu), what="GPU")
    questions: dict[str, tuple[str, Any]] = {
        "nodes": ("Nodes", 1),
        "gpus_per_node": ("GPUs a node", usual.gpus_per_node),
        "nics": ("NICs a node that training uses", usual.nics_per_node),
        "nic_gbit_per_s": ("Gbit/s of a NIC", usual.nic.bytes_per_s * 8 / GB),
    }
    answers = {"gpu": Fact(gpu, ANSWERED)}
    for name, (question, default) in questions.items():
        if name not in facts:
            answers[name] = Fact(click.prompt(question, default=default), ANSWERED)
    if "tiers" not in facts:
        leaf = click.prompt("Nodes on one leaf or in one rack (0: no bottleneck)", default=0)
        if leaf > 1:
            over = click.prompt("Bandwidth of its NICs over that of its uplinks", default=1.0)
            answers["tiers"] = Fact(_tiers((f"leaf:{leaf}:{over}",), rails=False), ANSWERED)
    return answers


def _check(
    path: Path,
    nccl_tests: tuple[Path, ...],
    nodes: int | None,
    ranks_per_node: int | None,
    *,
    as_json: bool,
) -> int:
    from parplan.profiles.documents.reader import read_yaml
    from parplan.profiles.inventory.cluster_check import Weight, check_document
    from parplan.profiles.machines.unequal_cluster import require_equal
    from parplan.profiles.profiler.communication.nccl_tests import read_nccl_tests
    from parplan.report.machines.cluster_findings import findings_document, print_findings
    from parplan.report.text import console

    cluster, findings = check_document(read_yaml(path), str(path))
    if nccl_tests and cluster is not None:
        require_equal(cluster, "--nccl-tests")
    records = read_nccl_tests(nccl_tests, nodes, ranks_per_node) if nccl_tests else ()
    if as_json:
        print_json(findings_document(findings, cluster, records))
    else:
        print_findings(findings, cluster, records, str(path), console(sys.stdout))
    return 2 if any(each.weight is Weight.WRONG for each in findings) else 0
