"""Text of nccl-tests as records: version formats, several programs, and errors with their line."""

from __future__ import annotations

import pytest

from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.measurements import CaseOutcome
from parplan.profiles.profiler.communication.nccl_tests import nccl_tests_records, read_nccl_tests

# Lines as nccl-tests prints them (src/util.cu of 2.18, src/common.cu and src/*.cu of 2020); made-up
# figures.
FIRST = (
    "# nThread 1 nGpus 1 minBytes 1048576 maxBytes 268435456 step: 256(factor) "
    "warmup iters: 5 iters: 30 agg iters: 1 validation: 1"
)
HALF = "{time:>9}  {alg:6.2f}  {bus:6.2f}"
HEADER = (
    "#       size         count      type   redop    root     time   algbw   busbw #wrong"
    "     time   algbw   busbw #wrong"
)
UNITS = (
    "#        (B)    (elements)                               (us)  (GB/s)  (GB/s)       "
    "     (us)  (GB/s)  (GB/s)       "
)
OLD_HEADER = (
    "#       size         count    type     time   algbw   busbw  error"
    "     time   algbw   busbw  error"
)


def ranks(number, hosts, groups=1, old=False):
    """The list of devices: `number` ranks over `hosts`, in turn in `groups` groups."""
    per_host = number // len(hosts)
    of_group = ["" if old else f" Group {rank % groups:2d}" for rank in range(number)]
    return [
        f"#  Rank {rank:2d}{of_group[rank]} Pid   {1000 + rank} on "
        f"{hosts[rank // per_host]:>10} device {rank % per_host:2d} [0x0f] GPU"
        for rank in range(number)
    ]


def row(n_bytes, times_us, factor, head="float     sum      -1", wrong="0"):
    halves = [
        f"{HALF.format(time=t, alg=n_bytes / t / 1e3, bus=factor * n_bytes / t / 1e3)}  {wrong:>5}"
        for t in times_us
    ]
    return f"{n_bytes:>12}  {n_bytes // 4:>12}  {head}{''.join(halves)}"


def output(program, rows, listed, header=HEADER):
    return "\n".join(
        (
            f"# Collective test starting: {program}",
            FIRST,
            "#",
            "# Using devices",
            *listed,
            "#",
            header,
            UNITS,
            *rows,
        )
    )


GATHERED = "float    none      -1"
SMALL, LARGE = row(2**20, (40.0, 38.0), 1.75), row(2**28, (2000.0, 2100.0), 1.75)
NODE = output("all_reduce_perf", [SMALL, LARGE], ranks(8, ["node-0"]))


def test_every_row_is_a_record_with_the_ranks_of_the_list():
    first, second = nccl_tests_records(NODE)

    assert dict(first.case.sizes) == {"bytes": 2**20, "nodes": 1, "ranks_per_node": 8, "groups": 1}
    assert second.case.passes[0].sizes == (2**28, 1, 8, 1)
    assert second.case.passes[0].curve == second.case.work == "all_reduce"
    assert (first.outcome, first.case.precision) == (CaseOutcome.MEASURED, "fp32")


def test_an_all_reduce_is_taken_in_place_as_torch_calls_it_and_a_gather_out_of_place():
    gathered = output(
        "all_gather_perf",
        [row(2**20, (40.0, 38.0), 0.875), row(2**28, (2000.0, 2100.0), 0.875)],
        ranks(8, ["node-0"]),
    )

    assert [record.measured.times["time"].median_us for record in nccl_tests_records(NODE)] == [
        38.0,
        2100.0,
    ]
    assert [record.measured.times["time"].median_us for record in nccl_tests_records(gathered)] == [
        40.0,
        2000.0,
    ]


def test_the_spread_is_that_between_the_halves_and_repeats_are_the_iterations():
    timing = nccl_tests_records(NODE)[0].measured.times["time"]

    assert timing.spread == pytest.approx((40.0 - 38.0) / 2 / 38.0)
    assert timing.repeats == 30


def test_ranks_on_several_hosts_are_nodes_and_groups_of_a_split_run_at_once():
    hosts = ["node-0", "node-1"]
    world = output("reduce_scatter_perf", [row(2**28, (9000.0, 9100.0), 15 / 16)], ranks(16, hosts))
    split = output(
        "reduce_scatter_perf", [row(2**28, (9000.0, 9100.0), 1 / 2)], ranks(16, hosts, groups=8)
    )

    assert nccl_tests_records(world)[0].case.passes[0].sizes == (2**28, 2, 8, 1)
    assert nccl_tests_records(split)[0].case.passes[0].sizes == (2**28, 2, 1, 8)


@pytest.mark.parametrize(
    "prefix",
    [
        pytest.param("[1,0]<stdout>:", id="mpirun-tag-output"),
        pytest.param("0: ", id="srun-label"),
        pytest.param(" 12: ", id="of-many"),
    ],
)
def test_what_launchers_put_before_a_line_is_passed_over(prefix):
    told = "\n".join(f"{prefix}{line}" for line in NODE.splitlines())

    assert nccl_tests_records(told) == nccl_tests_records(NODE)


def test_lines_of_nccl_between_rows_are_passed_over():
    lines = NODE.splitlines()
    lines.insert(-1, "node-0:3442:3442 [0] NCCL INFO Launch mode Parallel")

    assert nccl_tests_records("\n".join(lines)) == nccl_tests_records(NODE)


def test_the_format_of_2020_without_redop_root_and_groups():
    rows = [
        f"{2**26:>12}  {2**23:>12}   float{HALF.format(time=900.0, alg=74.57, bus=74.57)}  0e+00"
        f"{HALF.format(time=950.0, alg=70.64, bus=70.64)}  0e+00"
    ]
    text = "\n".join(
        (
            "./build/all_gather_perf -b 64M -e 64M -g 8",
            FIRST,
            *ranks(8, ["node-0"], old=True),
            OLD_HEADER,
            *rows,
        )
    )
    (record,) = nccl_tests_records(text)

    assert (record.case.work, record.case.passes[0].sizes) == ("all_gather", (2**26, 1, 8, 1))
    assert record.measured.times["time"].median_us == 900.0


def test_a_blank_redop_a_timestamp_and_a_half_alone_are_read():
    blank = row(2**26, (900.0, 950.0), 0.875, head="float              -1")
    stamped = blank + "  2026-01-31 12:34:56"
    half = row(2**26, (900.0,), 0.875)
    half_header = (
        "#       size         count      type   redop    root     time   algbw   busbw  #wrong"
    )
    listed = ranks(8, ["node-0"])

    first = nccl_tests_records(output("alltoall_perf", [blank], listed))
    assert (
        nccl_tests_records(
            output("alltoall_perf", [stamped], listed, HEADER + "           timestamp")
        )
        == first
    )
    assert first[0].case.work == "all_to_all"
    assert (
        nccl_tests_records(output("alltoall_perf", [half], listed, half_header))[0]
        .measured.times["time"]
        .median_us
        == 900.0
    )


def test_several_programs_in_a_file_and_several_files(tmp_path):
    gathered = output(
        "all_gather_perf", [row(2**28, (2000.0, 2100.0), 3 / 4)], ranks(4, ["node-0"])
    )
    (tmp_path / "both.txt").write_text(f"{NODE}\n# Avg bus bandwidth    : 200\n{gathered}\n")
    (tmp_path / "one.txt").write_text(gathered)
    records = read_nccl_tests([tmp_path / "both.txt", tmp_path / "one.txt"])

    assert [(record.case.work, record.case.size("ranks_per_node")) for record in records] == [
        ("all_reduce", 8),
        ("all_reduce", 8),
        ("all_gather", 4),
        ("all_gather", 4),
    ]


def test_rows_of_no_bytes_are_left_out():
    empty = row(0, (5.7, 5.5), 1.75)

    assert (
        nccl_tests_records(output("all_reduce_perf", [empty, SMALL], ranks(8, ["node-0"])))
        == nccl_tests_records(NODE)[:1]
    )


def test_what_no_line_says_the_caller_does():
    bare = "\n".join((HEADER, row(2**28, (9000.0, 9100.0), 15 / 16, GATHERED)))
    (record,) = nccl_tests_records(bare, 2, 8, collective="all_gather")

    assert record.case.passes[0].sizes == (2**28, 2, 8, 1)
    with pytest.raises(ConfigError, match="line 2: a row of no program"):
        nccl_tests_records(bare, 2, 8)
    with pytest.raises(ConfigError, match="line 2: neither a list of ranks"):
        nccl_tests_records(bare, collective="all_gather")


UNNAMED = "# Collective test starting: all_reduce_perf\n"


@pytest.mark.parametrize(
    ("factor", "head", "work"),
    [
        pytest.param(1.75, "float     sum      -1", "all_reduce", id="all-reduce"),
        pytest.param(7 / 8, "float     sum      -1", "reduce_scatter", id="reduce-scatter"),
    ],
)
def test_rows_tell_the_collective_that_no_line_names(factor, head, work):
    rows = [row(2**20, (400.0, 380.0), factor, head), row(2**28, (2000.0, 2100.0), factor, head)]
    text = output("all_reduce_perf", rows, ranks(8, ["node-0"])).replace(UNNAMED, "")

    assert [record.case.work for record in nccl_tests_records(text)] == [work, work]


@pytest.mark.parametrize(
    ("factor", "n_bytes", "names"),
    [
        pytest.param(7 / 8, 2**28, "all_gather_perf, alltoall_perf$", id="gather-or-all-to-all"),
        pytest.param(1.75, 2**28, "all_reduce_perf, .*sendrecv_perf", id="no-known-one"),
        pytest.param(7 / 8, 2**10, "all_reduce_perf, .*sendrecv_perf", id="too-slow-to-tell"),
    ],
)
def test_rows_of_several_collectives_are_not_guessed(factor, n_bytes, names):
    text = output(
        "all_reduce_perf", [row(n_bytes, (2000.0, 2100.0), factor, GATHERED)], ranks(8, ["node-0"])
    ).replace(UNNAMED, "")

    with pytest.raises(ConfigError, match=f"no program that is named before it, .* {names}"):
        nccl_tests_records(text)


def test_the_name_of_one_output_is_not_that_of_the_next():
    second = output("x", [row(2**28, (2000.0, 2100.0), 7 / 8)], ranks(8, ["node-0"]))
    text = "\n".join((NODE, "# Collective test concluded: all_reduce_perf", second))
    unnamed = text.replace("# Collective test starting: x\n", "")

    assert [record.case.work for record in nccl_tests_records(unnamed)] == [
        *["all_reduce"] * 2,
        "reduce_scatter",
    ]


@pytest.mark.parametrize("prefix", ["[1,0]<stdout>:", " 0: ", "[job-7@1,0]<stdout>: ", "node-1: "])
def test_prefixes_of_launchers_are_no_part_of_a_line(prefix):
    text = "".join(f"{prefix}{line}\n" for line in NODE.splitlines())

    assert nccl_tests_records(text) == nccl_tests_records(NODE)


def test_two_gpus_exchange_messages_and_more_are_refused():
    pair = output(
        "sendrecv_perf", [row(2**28, (12000.0, 12100.0), 1.0)], ranks(2, ["node-0", "node-1"])
    )

    assert nccl_tests_records(pair)[0].case.passes[0].sizes == (2**28, 2, 1, 1)
    with pytest.raises(ConfigError, match="8 ranks is a ring of messages"):
        nccl_tests_records(
            output("sendrecv_perf", [row(2**28, (12000.0, 12100.0), 1.0)], ranks(8, ["node-0"]))
        )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("", "no row of nccl-tests", id="nothing"),
        pytest.param("hello\n# nothing here", "no row of nccl-tests", id="another-text"),
        pytest.param(NODE.replace(HEADER, "#"), "line 16: a row before the header", id="no-header"),
        pytest.param(
            NODE.replace("all_reduce_perf", "broadcast_perf"),
            "line 16: a row of broadcast_perf, needed one of all_reduce_perf",
            id="broadcast",
        ),
        pytest.param(
            NODE.replace(LARGE, LARGE[:-9]),
            "line 17: time is '-1', needed is a number",
            id="a-row-cut-short",
        ),
        pytest.param(
            NODE.replace(f"{2**28:>12}", "9" * 2000),
            "line 17: size is '9999.*needed is a whole number",
            id="2000-digits",
        ),
        pytest.param(
            NODE.replace(LARGE, LARGE.replace("2000.0", "   nan", 1)),
            "line 17: time is 'nan', needed is a number",
            id="nan",
        ),
        pytest.param(
            NODE.replace(LARGE, row(2**28, (2000.0, 2100.0), 1.75, wrong="7")),
            "line 17: 7 wrong results",
            id="wrong-results",
        ),
        pytest.param(
            NODE.replace(LARGE, row(2**28, (2000.0, 2100.0), 1.5)),
            "line 17: busbw is 1.5 times algbw, all_reduce on 8 ranks has 1.75",
            id="of-four-ranks",
        ),
        pytest.param(
            NODE.replace("    time", " cputime"),
            "line 16: cputime is the time of the host",
            id="times-of-the-host",
        ),
    ],
)
def test_an_error_says_the_line_and_what_was_needed(text, message):
    with pytest.raises(ConfigError, match=message):
        nccl_tests_records(text)


def test_another_number_of_ranks_than_the_list_has_is_an_error_and_other_hosts_are_not():
    with pytest.raises(
        ConfigError, match="8 ranks in a group on 1 hosts, 2 nodes of 8 ranks were said"
    ):
        nccl_tests_records(NODE, 2, 8)

    assert nccl_tests_records(NODE, 2, 4)[0].case.passes[0].sizes == (
        2**20,
        2,
        4,
        1,
    )  # containers of two nodes with one name


def test_a_collective_that_does_not_exist_is_named():
    with pytest.raises(ConfigError, match="unknown collective 'allreduce'") as caught:
        nccl_tests_records(NODE, collective="allreduce")

    assert "all_reduce" in caught.value.hint


def test_a_file_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="cannot read"):
        read_nccl_tests([tmp_path / "none.txt"])
