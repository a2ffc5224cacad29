"""The file of a user's own profile: exact round trips, joined sessions, named faults."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache

import pytest
import yaml

from parplan.profiles.documents.schema import document
from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.machine_catalog import cluster_document
from parplan.profiles.machines.measured_points import curves_of, points_of, with_curves
from parplan.profiles.machines.measurements import (
    Case,
    CaseFigures,
    CaseOutcome,
    CasePass,
    Record,
    Timing,
)
from parplan.profiles.machines.profile_records import rounded_records
from parplan.profiles.machines.shipped_profiles import analytic_profile
from parplan.profiles.machines.user_profile import (
    PROFILE_VERSION,
    ProfileEnvironment,
    UserProfile,
    merge_profiles,
    profile_schema,
    profile_to_document,
    profile_to_yaml,
    read_profile,
    with_memory_facts,
    write_profile,
)
from parplan.profiles.profiler.fits.profile_fit import fit_profile
from tests.helpers.synthetic_profiles import CLUSTER, CURVES, Machine

RECORDS = Machine(noise=0.03).every()
LINKS = analytic_profile("a100-80gb")
HERE = ProfileEnvironment(
    date="2026-11-21",
    device="NVIDIA A100-SXM4-80GB",
    num_devices=8,
    torch="2.13.0+cu130",
    num_sms=108,
    driver="580.10",
    cuda="13.0",
    gpu_links={"NV12": 28},
    nic_links={"PXB": 16, "SYS": 48},
    max_sm_clock_mhz=1410.0,
)


@cache
def own() -> UserProfile:
    return UserProfile(
        profile_version=PROFILE_VERSION,
        device="a100-80gb",
        precision="bf16",
        environment=HERE,
        cluster=cluster_document(CLUSTER),
        profile=fit_profile(
            RECORDS, CLUSTER, "bf16", intra=LINKS.intra, inter=LINKS.inter, contention=0.2
        ),
        records=RECORDS,
    )


@cache
def text_of_own() -> str:
    return profile_to_yaml(own())


def file_of(profile: UserProfile, tmp_path):
    write_profile(profile, tmp_path / "own.yaml")
    return tmp_path / "own.yaml"


def test_what_was_measured_and_fitted_comes_back_exactly(tmp_path):
    back = read_profile(file_of(own(), tmp_path))

    assert back.records == own().records
    assert document(back) == document(own())  # curves compare by identity: their documents do not
    assert profile_to_yaml(back) == profile_to_yaml(own())


def test_points_stand_in_the_file_once_and_each_record_is_one_line(tmp_path):
    text = file_of(own(), tmp_path).read_text()
    head, records = text.split("records:\n")

    assert "points" not in text
    assert len(records.splitlines()) == len(RECORDS)
    assert "linear" not in "".join(line for line in head.splitlines() if "source" not in line)
    assert curves_of(read_profile(tmp_path / "own.yaml").profile.compute)["forward"].points[0] == (
        512,
        1024,
        1024,
        next(
            record for record in RECORDS if record.case.key.startswith("linear m=512 n=1024 k=1024")
        )
        .measured.times["forward"]
        .median_us,
    )


def test_points_that_are_not_those_of_the_records_are_written_out(tmp_path):
    compute = own().profile.compute
    changed = with_curves(
        compute,
        curves_of(compute)
        | {
            "forward": replace(compute.forward, points=((1, 2, 3, 4.5),)),
            "gelu.forward": replace(compute.named["gelu"].forward, points=()),
        },
    )
    profile = replace(own(), profile=replace(own().profile, compute=changed))

    back = read_profile(file_of(profile, tmp_path)).profile.compute

    assert back.forward.points == ((1, 2, 3, 4.5),)
    assert back.named["gelu"].forward.points == ()
    assert back.optimizer.points == compute.optimizer.points != ()


@pytest.mark.parametrize(
    "record",
    [
        Record(
            case=Case(work="launch", sizes=(), precision="bf16", passes=()),
            outcome=CaseOutcome.MEASURED,
            measured=CaseFigures(figures={"host_launch_s": 1e-06, "ops": 5.0}),
        ),
        Record(
            case=Case(
                work="block",
                sizes=(("hidden", 64),),
                precision="fp32",
                passes=(CasePass(name="forward"), CasePass(name="backward")),
            ),
            outcome=CaseOutcome.MEASURED,
            measured=CaseFigures(
                times={"forward": Timing(median_us=1e5, spread=0.0, repeats=3)},
                saved_bytes=0,
                workspace_bytes=7,
                clock_mhz=1.5,
            ),
        ),
        Record(
            case=Case(work="host_adam", sizes=(("parameters", 9),), precision="bf16", passes=()),
            outcome=CaseOutcome.MEASURED,
            measured=CaseFigures(times={"time": Timing(median_us=2.25, spread=0.5, repeats=1)}),
        ),
        Record(
            case=Case(
                work="linear",
                sizes=(("m", 1),),
                precision="bf16",
                passes=(CasePass(name="forward", curve="forward", sizes=(1, 2, 3)),),
            ),
            outcome=CaseOutcome.CRASHED,
            detail="RuntimeError: 'a: b' # no\nsecond line, {x}\ttab",
        ),
    ],
    ids=["figures", "no-curve-other-precision", "time-of-no-pass", "failed-with-a-long-word"],
)
def test_any_record_comes_back(record, tmp_path):
    profile = replace(own(), profile=None, records=(record,))

    path = file_of(profile, tmp_path)

    assert read_profile(path) == profile
    assert len(path.read_text().split("records:\n")[1].splitlines()) == 1


def test_equal_sizes_are_one_point_and_failures_are_none():
    machine = Machine()
    first, second = machine.linear(64, 64, 64), machine.linear(64, 64, 64)
    slow = replace(
        second.measured.times["forward"], median_us=3 * first.measured.times["forward"].median_us
    )
    second = replace(second, measured=replace(second.measured, times={"forward": slow}))

    points = points_of((first, second, machine.failed(CaseOutcome.HUNG, "")))

    assert points["forward"] == (
        (64, 64, 64, pytest.approx(2 * first.measured.times["forward"].median_us)),
    )


def test_curves_are_taken_apart_and_put_together_by_name():
    compute = own().profile.compute

    assert document(with_curves(compute, curves_of(compute))) == document(compute)
    assert {
        "forward",
        "norm.backward",
        "gelu.forward",
        "dropped_flash.backward",
        "optimizer",
    } <= set(curves_of(compute))
    assert not {name for name in curves_of(CURVES) if name.startswith("dropped_flash")}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(
            lambda text: text.replace("time_us: ", "tim_us: ", 1),
            r"unknown key records\.0\.passes\.forward\.tim_us",
            id="key",
        ),
        pytest.param(
            lambda text: text.replace("    k_half:", "    khalf:", 1),
            r"unknown key profile\.compute\..*khalf",
            id="curve",
        ),
        pytest.param(
            lambda text: text.replace("num_sms: 108", "num_smss: 108"),
            "unknown key",
            id="environment",
        ),
        pytest.param(
            lambda text: text.replace("memory_gb_per_s", "memory_gbps"),
            r"cluster: unknown key device\.memory_gbps",
            id="cluster",
        ),
        pytest.param(
            lambda text: text.replace("outcome: hung", "outcome: slow"),
            r"records\.\d+\.outcome",
            id="outcome",
        ),
        pytest.param(
            lambda text: text.replace(", spread: 0.01", "", 1),
            r"records\.0\.forward: a time without its spread",
            id="half-a-time",
        ),
        pytest.param(
            lambda text: text.replace("precision: bf16\n", ""),
            r"records\.0: precision is missing",
            id="precision",
        ),
        pytest.param(
            lambda text: text.replace("records:\n", "records: 3\nrest:\n"),
            "records: ",
            id="no-list",
        ),
        pytest.param(
            lambda text: text.split("\nprofile:")[0] + "\nprofile: [1]\n",
            "profile must be a mapping",
            id="list",
        ),
        pytest.param(lambda text: text[: len(text) - 40], "not YAML", id="cut-off"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(change, message, tmp_path):
    (tmp_path / "own.yaml").write_text(change(text_of_own()))

    with pytest.raises(ConfigError, match=message) as error:
        read_profile(tmp_path / "own.yaml")
    assert str(tmp_path / "own.yaml") in error.value.message


@pytest.mark.parametrize("value", ["0.0", "-1.5"])
def test_a_time_that_is_none_is_refused(value, tmp_path):
    line = profile_to_yaml(replace(own(), records=(Machine().linear(64, 64, 64),)))
    before, after = line.split("time_us: ", 1)
    (tmp_path / "own.yaml").write_text(f"{before}time_us: {value},{after.split(',', 1)[1]}")

    with pytest.raises(ConfigError, match=r"records\.0\.passes\.forward\.time_us"):
        read_profile(tmp_path / "own.yaml")


def test_times_are_kept_to_the_digits_that_repeats_can_tell_apart():
    record = Machine().record(
        "gelu", {}, [(CasePass(name="forward", curve="gelu.forward", sizes=(1,)), 1.0)]
    )
    timing = Timing(median_us=12.3456789, spread=0.0123456, repeats=7)
    figures = {"bytes_per_s": 1.23456789e9 + 0.5, "context_bytes": 254066688.0}
    measured = replace(record.measured, times={"forward": timing}, figures=figures)

    rounded, failed = rounded_records(
        (replace(record, measured=measured), Machine().failed(CaseOutcome.HUNG, "slow"))
    )

    assert rounded.measured.times == {
        "forward": Timing(median_us=12.3457, spread=0.0123, repeats=7)
    }
    assert rounded.measured.figures == {"bytes_per_s": 1.23457e9, "context_bytes": 254066688.0}
    assert (failed.outcome, failed.detail) == (CaseOutcome.HUNG, "slow")


def test_facts_of_memory_are_those_that_were_measured():
    communicators = [
        Machine().figures("communicator", {"nodes": 1, "ranks_per_node": n}, buffer_bytes=n * 1e6)
        for n in (4, 8, 2)
    ]

    profile = with_memory_facts(replace(own(), records=(*RECORDS, *communicators)))

    assert (profile.allocator_share, profile.context_bytes, profile.granularity_bytes) == (
        0.04,
        500_000_000,
        512,
    )
    assert profile.communicator_bytes == 8_000_000
    assert with_memory_facts(replace(own(), communicator_bytes=7)).communicator_bytes == 7


def test_a_second_session_adds_its_cases_and_replaces_those_it_measured_again():
    repeated, added = Machine(noise=0.5).linear(512, 1024, 1024), Machine().linear(48, 48, 48)
    later = replace(HERE, date="2026-12-24")

    both = merge_profiles(
        replace(own(), allocator_share=0.1),
        replace(own(), environment=later, profile=None, records=(repeated, added)),
    )

    assert len(both.records) == len(RECORDS) + 1
    assert both.records[0] == repeated != RECORDS[0]
    assert both.records[1:-1] == RECORDS[1:]
    assert both.records[-1] == added
    assert (both.environment, both.allocator_share, both.profile) == (later, 0.1, own().profile)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param(
            {"device": "h100-80gb"},
            "measured with device a100-80gb, this session with h100-80gb",
            id="device",
        ),
        pytest.param(
            {"precision": "fp16"},
            "measured with precision bf16, this session with fp16",
            id="precision",
        ),
        pytest.param(
            {"environment": replace(HERE, torch="3.0.1")},
            "measured with torch 2, this session with 3",
            id="torch",
        ),
    ],
)
def test_points_of_another_machine_are_not_added(changes, message):
    with pytest.raises(ConfigError, match=message) as error:
        merge_profiles(own(), replace(own(), **changes))

    assert "-o" in error.value.hint


def test_another_minor_version_of_torch_may_be_added():
    assert (
        merge_profiles(
            own(), replace(own(), environment=replace(HERE, torch="2.14.0"))
        ).environment.torch
        == "2.14.0"
    )


def test_a_file_that_cannot_be_written_says_so(tmp_path):
    with pytest.raises(ConfigError, match="cannot write"):
        write_profile(own(), tmp_path / "missing" / "own.yaml")


def test_the_schema_describes_every_key_of_a_file():
    schema = profile_schema()
    body = profile_to_document(own())

    assert yaml.load(text_of_own(), Loader=yaml.CSafeLoader) == json.loads(json.dumps(body))
    assert json.loads(json.dumps(schema)) == schema
    assert set(body) <= set(schema["properties"])
    line = schema["$defs"][schema["properties"]["records"]["items"]["$ref"].rsplit("/", 1)[1]]
    assert all(set(record) <= set(line["properties"]) for record in body["records"])
    references = {word.split('"')[0] for word in json.dumps(schema).split("#/$defs/")[1:]}
    assert references <= set(schema["$defs"])
