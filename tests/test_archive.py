from __future__ import annotations

import gzip
import io
import json
import os
import tarfile
from contextlib import suppress

import pytest
from made_records import made, made_estimate

from autotune import records
from autotune.errors import RecordError, UsageError
from autotune.records import Store, archive
from autotune.records.archive import read_archive, write_archive
from autotune.values.problem import Problem

RECORDS = [made(Problem(64, 64, 64)), made(Problem(64, 64, 128)), made_estimate(Problem(64, 64, 64))]
KINDS = ["x.tar.gz", "x.tgz", "x.jsonl"]


def by_problem(found):
    return sorted(found, key=lambda record: (record.problem.k, record.evidence))


@pytest.mark.parametrize("name", KINDS)
def test_what_is_written_is_read_again(tmp_path, name):
    path = tmp_path / name
    assert write_archive(RECORDS, path) == 3
    assert by_problem(read_archive(path)) == by_problem(RECORDS)
    first = path.read_bytes()
    write_archive(reversed(RECORDS), path)
    assert path.read_bytes() == first
    assert [each.name for each in tmp_path.iterdir()] == [name]


def test_the_files_lie_in_the_archive_as_in_a_folder_of_records(tmp_path):
    path = tmp_path / "x.tar.gz"
    write_archive(RECORDS, path)
    with tarfile.open(path) as found:
        names = found.getnames()
    assert (
        names
        == [
            Store(tmp_path)
            .path(each.device, each.family, each.problem, estimated=estimated)
            .relative_to(tmp_path)
            .as_posix()
            for each, estimated in ((RECORDS[2], True), (RECORDS[1], False), (RECORDS[0], False))
        ]
        or sorted(names) == names
    )


@pytest.mark.parametrize("name", KINDS)
def test_an_archive_cut_anywhere_is_a_clear_error_and_never_a_wrong_record(tmp_path, name):
    path = tmp_path / name
    write_archive(RECORDS, path)
    whole = path.read_bytes()
    for length in range(0, len(whole), max(1, len(whole) // 97)):
        path.write_bytes(whole[:length])
        found: list[object] = []
        with suppress(RecordError):
            found.extend(read_archive(path))
        for each in found:
            assert each in RECORDS or (isinstance(each, RecordError) and "\n" not in str(each))


def test_no_byte_of_an_archive_can_change_unnoticed(tmp_path):
    path = tmp_path / "x.tar.gz"
    write_archive(RECORDS, path)
    whole = path.read_bytes()
    checksum = len(whole) - 8
    for place in (*range(10, checksum, max(1, len(whole) // 97)), checksum):  # the head, of ten, has none
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(RecordError, match=r"x.tar.gz cannot be read: "):
            list(read_archive(path))


def test_a_bad_record_is_named_by_its_place_and_the_others_are_read(tmp_path):
    path = tmp_path / "x.jsonl"
    write_archive(RECORDS[:2], path)
    lines = path.read_text().splitlines()
    path.write_text(
        "\n".join([lines[0], lines[1].replace('"median_ms": 1.0', '"median_ms": "1"', 1), "", "\xff{"])
    )
    first, second, third = read_archive(path)
    assert first in RECORDS
    assert str(second) == f"{path}, line 2: $.timing.median_ms: expected a number, got a string, '1'"
    assert str(third).startswith(f"{path}, line 4: not JSON")


@pytest.mark.parametrize(("field", "what"), [("family", "family"), ("name", "device"), ("mig", "device")])
def test_a_record_whose_file_could_not_be_named_does_not_stop_the_others(tmp_path, field, what):
    path = tmp_path / "x.jsonl"
    write_archive(RECORDS[:2], path)
    first, second = path.read_text().splitlines()
    plain = json.loads(first)
    (plain if field == "family" else plain["device"])[field] = "a" * 5000
    path.write_text("\n".join([json.dumps(plain), second]))
    broken, good = read_archive(path)
    assert f"{what} has a name of" in str(broken)
    assert len(str(broken)) < 300
    assert good in RECORDS


def packed(path, members):
    with tarfile.open(path, "w:gz") as archive:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def test_nothing_is_unpacked_wherever_a_member_points(tmp_path):
    path = tmp_path / "in" / "x.tar.gz"
    path.parent.mkdir()
    good = records.to_json(RECORDS[0]).encode()
    packed(path, [("../../evil.json", good), ("/etc/evil.json", b"{}"), ("readme.txt", b"hello")])
    first, second = read_archive(path)
    assert first == RECORDS[0]
    assert str(second).startswith(f'{path}, "/etc/evil.json": $: missing key')
    assert sorted(each.name for each in tmp_path.rglob("*")) == ["in", "x.tar.gz"]


def test_what_is_too_large_is_refused_unread(tmp_path, monkeypatch):
    monkeypatch.setattr(archive, "MOST_BYTES", 1000)
    path = tmp_path / "x.tar.gz"
    packed(path, [("a/x.json", b"1" * 2000)])
    (found,) = read_archive(path)
    assert "larger than 1000 bytes: not a record" in str(found)
    lines = tmp_path / "x.jsonl"
    lines.write_bytes(b"1" * 2000)
    (found,) = read_archive(lines)
    assert "larger than 1000 bytes" in str(found)
    monkeypatch.setattr(archive, "MOST_RECORDS", 2)
    lines.write_bytes(b"1\n" * 3)
    with pytest.raises(RecordError, match="more than 2 records"):
        list(read_archive(lines))


def test_names_and_files_that_are_none(tmp_path):
    with pytest.raises(UsageError, match=r"'x.zip' is no archive .*: give a name that ends in \.tar\.gz"):
        write_archive(RECORDS, tmp_path / "x.zip")
    with pytest.raises(UsageError, match="is no archive"):
        list(read_archive(tmp_path / "x.zip"))
    with pytest.raises(RecordError, match=r"x\.jsonl cannot be read: No such file"):
        list(read_archive(tmp_path / "x.jsonl"))
    with pytest.raises(RecordError, match=r"cannot be written \(No such file"):
        write_archive(RECORDS, tmp_path / "nowhere" / "x.jsonl")
    (tmp_path / "x.tgz").write_bytes(gzip.compress(b"no tar at all"))
    with pytest.raises(RecordError, match="cannot be read"):
        list(read_archive(tmp_path / "x.tgz"))


def compressed(path, blocks):
    """Write raw blocks of a tar as a compressed archive."""
    with gzip.open(path, "wb", compresslevel=1) as file:
        for block in blocks:
            file.write(block)
    return path


def member(name, size, kind=tarfile.REGTYPE, **about):
    entry = tarfile.TarInfo(name)
    entry.size, entry.type = size, kind
    for key, value in about.items():
        setattr(entry, key, value)
    return entry.tobuf(tarfile.GNU_FORMAT)


def test_hostile_archives_are_one_line_in_bounded_time(tmp_path):
    zeros = bytes(1 << 20)
    long_name = member("././@LongLink", 512, tarfile.GNUTYPE_LONGNAME) + b"n" * 512
    sparse = bytearray(member("x.json", 512, tarfile.GNUTYPE_SPARSE))
    sparse[386:410] = b"zzzzzzzzzzzzzzzzzzzzzzzz"
    cases = {
        "pax.tar.gz": [member("pax", 3 << 30, tarfile.XHDTYPE), *[zeros] * 8],
        "names.tar.gz": [long_name * 20_000],
        "sparse.tar.gz": [bytes(sparse), bytes(1024)],
        "endless.tar.gz": [member("x.bin", 8 << 30), *[zeros] * 1100],
        "negative.tar.gz": [member("x.json", 10).replace(b"00000000012", b"-0000000012"), bytes(1024)],
    }
    for name, blocks in cases.items():
        path = compressed(tmp_path / name, blocks)
        with pytest.raises(RecordError) as caught:
            list(read_archive(path))
        assert "\n" not in str(caught.value)
        assert str(path) in str(caught.value)


def test_an_archive_that_is_a_pipe_is_refused(tmp_path):
    for name in ("x.jsonl", "x.tar.gz"):
        os.mkfifo(tmp_path / name)
        with pytest.raises(RecordError, match="it is a pipe"):
            list(read_archive(tmp_path / name))
