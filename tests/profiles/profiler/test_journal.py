"""The journal: whatever is cut off or damaged, a record is read as it was written or not at all."""

from __future__ import annotations

import errno
import os
import random
from dataclasses import replace

import pytest

from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.measurements import CaseOutcome, Record
from parplan.profiles.profiler.journal import Journal, journal_path, open_journal
from tests.helpers.programs import ASKED, case, steady

RECORDS = (
    Record(
        case=case("linear", 3),
        outcome=CaseOutcome.MEASURED,
        measured=steady(case("linear", 3), "cpu"),
    ),
    Record(
        case=case("softmax", 7),
        outcome=CaseOutcome.CRASHED,
        detail='exit code 7: a\ttab, "quotes", \u00fc',
    ),
    Record(
        case=case("linear", 5),
        outcome=CaseOutcome.MEASURED,
        measured=steady(case("linear", 5), "cpu"),
    ),
)
BY_KEY = {record.case.key: record for record in RECORDS}


@pytest.fixture
def path(tmp_path):
    """A journal of the three records."""
    path = journal_path(tmp_path / "mygpu.yaml")
    journal = open_journal(path, ASKED)
    for record in RECORDS:
        journal.append(record)
    journal.close()
    return path


def reopened(path, asked=ASKED, **options) -> Journal:
    journal = open_journal(path, asked, **options)
    journal.close()
    return journal


def test_records_come_back_unchanged_from_the_file_beside_the_output(path):
    assert path.name == "mygpu.yaml.journal"
    assert reopened(path).records == BY_KEY
    assert reopened(path).notes == []


def test_a_file_that_ends_anywhere_gives_the_records_before_and_takes_new_ones(path):
    body = path.read_bytes()
    ends = [position + 1 for position, byte in enumerate(body) if byte == ord("\n")]
    for size in sorted(
        {
            *range(0, len(body), 7),
            *(end + near for end in ends[:-1] for near in (-1, 0, 1)),
            len(body) - 1,
        }
    ):
        path.write_bytes(body[:size])
        whole = sum(end <= size for end in ends)
        journal = open_journal(path, ASKED)

        assert journal.records == dict(list(BY_KEY.items())[: max(0, whole - 1)])
        assert bool(journal.notes) == (size > 0 and size not in ends and whole > 0)
        journal.append(RECORDS[1])
        journal.close()
        assert reopened(path).notes == []
        assert reopened(path).records == journal.records


def test_a_damaged_byte_costs_no_more_than_its_lines(path):
    body = path.read_bytes()
    header = body.index(b"\n") + 1
    ends = [
        position for position, byte in enumerate(body) if byte == ord("\n") and position > header
    ]
    for position in (*ends, *random.Random(2).sample(range(header, len(body)), 100)):
        for changed in {body[position] ^ 1, 0, ord("\n"), ord("\r"), ord("\t")} - {body[position]}:
            path.write_bytes(body[:position] + bytes((changed,)) + body[position + 1 :])
            journal = reopened(path)

            assert all(BY_KEY[key] == record for key, record in journal.records.items())
            assert len(journal.records) >= (1 if position in ends else 2)
            assert journal.notes


def test_a_damaged_line_in_the_middle_is_named(path):
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join((*lines[:2], lines[2].replace(b"softmax", b"softmin"), lines[3])))

    journal = reopened(path)

    assert journal.records == {record.case.key: record for record in (RECORDS[0], RECORDS[2])}
    assert journal.notes == [f"{path}, line 3: damaged; what it was of is measured again"]


def test_a_later_record_of_a_case_replaces_the_earlier(path):
    journal, repeated = open_journal(path, ASKED), replace(RECORDS[0], case=RECORDS[1].case)
    journal.append(repeated)
    journal.close()

    assert reopened(path).records == {**BY_KEY, repeated.case.key: repeated}


@pytest.mark.parametrize(
    ("requested", "message"),
    [
        (
            {"device": "h100-80gb", "precision": "fp32"},
            "was measured for device none, asked is h100-80gb",
        ),
        ({"device": "none", "precision": "bf16"}, "was measured for precision fp32, asked is bf16"),
        ({**ASKED, "torch": "2.13.0"}, "was measured for torch None, asked is 2.13.0"),
        ({"precision": "fp32"}, "was measured for device none, asked is None"),
    ],
)
def test_a_journal_of_something_else_is_refused_and_stays_as_it_is(path, requested, message):
    before = path.read_bytes()

    with pytest.raises(ConfigError, match=message) as error:
        open_journal(path, requested)

    assert "--restart" in error.value.hint
    assert path.read_bytes() == before
    assert reopened(path, requested, restart=True).records == {}
    assert reopened(path, requested).notes == []


def test_what_was_asked_may_hold_lists_and_tuples(tmp_path):
    path = tmp_path / "x.journal"
    reopened(path, {"models": ("a", "b")})

    assert reopened(path, {"models": ["a", "b"]}).records == {}


@pytest.mark.parametrize(
    "body",
    [
        b"profile_version: 2\n",
        b"text",
        b"\x00\x01",
        b'{"journal_version":1,"asked":{}}\t00000000\n',
    ],
)
def test_a_file_that_is_no_journal_is_refused_and_stays_as_it_is(tmp_path, body):
    path = tmp_path / "x.journal"
    path.write_bytes(body)

    with pytest.raises(ConfigError, match="is not a journal of plan profile"):
        open_journal(path, ASKED)

    assert path.read_bytes() == body


def test_another_version_is_refused(path, monkeypatch):
    monkeypatch.setattr("parplan.profiles.profiler.journal.JOURNAL_VERSION", 2)

    with pytest.raises(ConfigError, match="journal_version is 1, this parplan reads 2"):
        open_journal(path, ASKED)


def test_a_journal_in_use_is_refused(path):
    journal = open_journal(path, ASKED)

    with pytest.raises(ConfigError, match="in use: another session"):
        open_journal(path, ASKED, restart=True)

    journal.close()
    assert reopened(path).records == BY_KEY


def test_a_place_that_cannot_be_written_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="No such file or directory"):
        open_journal(tmp_path / "nowhere" / "x.journal", ASKED)


def test_a_full_disk_is_an_error_that_loses_only_the_last_record(path, monkeypatch):
    journal, write = open_journal(path, ASKED), os.write

    def full(handle: int, body: bytes) -> int:
        write(handle, body[:9])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(ConfigError, match="No space left"):
        journal.append(replace(RECORDS[0], case=case("gelu", 2)))
    monkeypatch.undo()
    journal.close()

    assert journal.records == BY_KEY
    assert reopened(path).records == BY_KEY


def test_a_journal_is_gone_when_it_is_deleted(path):
    open_journal(path, ASKED).delete()

    assert not path.exists()
