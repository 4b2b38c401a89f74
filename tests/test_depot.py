from __future__ import annotations

import multiprocessing
import os
import time

import pytest

from autotune.code.depot import FOLDER, Depot
from autotune.errors import UsageError


@pytest.fixture
def depot(tmp_path):
    return Depot(tmp_path)


def test_what_is_put_is_found_again(depot, tmp_path):
    assert depot.get("key") is None
    assert depot.put("key", b"content")
    assert depot.get("key") == b"content"
    assert Depot(tmp_path).get("key") == b"content"
    assert depot.put("key", b"")
    assert depot.get("key") == b""
    assert os.listdir(tmp_path / FOLDER) == ["key"]


def test_a_file_cut_anywhere_is_no_entry(depot):
    depot.put("key", b"some content")
    whole = depot.path("key").read_bytes()
    for length in range(len(whole)):
        depot.path("key").write_bytes(whole[:length])
        assert depot.get("key") is None
        assert not depot.path("key").exists()
    depot.path("key").write_bytes(whole)
    assert depot.get("key") == b"some content"


def test_every_flipped_byte_is_noticed(depot):
    depot.put("key", b"content")
    whole = depot.path("key").read_bytes()
    for place in range(len(whole)):
        depot.path("key").write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        assert depot.get("key") is None


def test_an_entry_under_a_wrong_name_is_none(depot):
    depot.put("key", b"content")
    os.rename(depot.path("key"), depot.path("other"))
    assert depot.get("other") is None


def test_what_was_not_used_for_longest_goes_first(tmp_path):
    depot = Depot(tmp_path, limit_bytes=5 * 132)
    for number in range(5):
        depot.put(f"key{number}", bytes(100))
        os.utime(depot.path(f"key{number}"), (1000 + number, 1000 + number))
    assert depot.get("key0") is not None  # used now
    depot.put("key5", bytes(100))
    kept = {path.name for path, _ in depot.entries()}
    assert kept == {"key0", "key2", "key3", "key4", "key5"}


def test_temporary_files_go_when_nobody_can_be_writing_them(depot):
    depot.put("key", b"1")
    young, old = depot.path(".a.1-2.tmp"), depot.path(".b.1-2.tmp")
    for path in (young, old):
        path.write_bytes(b"x")
    os.utime(old, (time.time() - 7200,) * 2)
    for number in range(100):
        depot.put("key", bytes([number]))
    assert young.exists()
    assert not old.exists()


def test_few_of_many_puts_look_at_all_entries(depot, monkeypatch):
    looked = []
    monkeypatch.setattr(Depot, "entries", lambda self: looked.append(self) or [])
    for number in range(320):
        depot.put(f"key{number}", b"x")
    assert 5 < len(looked) < 60


def test_a_folder_that_cannot_be_written_keeps_nothing(tmp_path):
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    for root in (in_the_way, tmp_path / "file" / "deeper"):
        depot = Depot(root)
        assert not depot.put("key", b"content")
        assert depot.get("key") is None
        assert depot.entries() == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_read_only_folder_is_still_read(depot):
    depot.put("key", b"content")
    depot.folder.chmod(0o500)
    try:
        assert depot.get("key") == b"content"
        assert not depot.put("other", b"content")
    finally:
        depot.folder.chmod(0o700)


def test_the_environment_sets_the_limit(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOTUNE_COMPILED_MIB", "0.5")
    assert Depot(tmp_path).limit_bytes == 1 << 19
    monkeypatch.setenv("AUTOTUNE_COMPILED_MIB", "0")
    assert not Depot(tmp_path).put("key", b"content")
    assert not (tmp_path / FOLDER).exists()
    for wrong in ("many", "-1", "inf", "nan"):
        monkeypatch.setenv("AUTOTUNE_COMPILED_MIB", wrong)
        with pytest.raises(UsageError, match=r"AUTOTUNE_COMPILED_MIB = .*: give a number of MiB"):
            Depot(tmp_path)


def test_what_is_no_file_is_no_entry_and_is_replaced(depot):
    depot.folder.mkdir(parents=True)
    os.mkfifo(depot.path("key"))
    assert depot.get("key") is None  # and nobody waits for a writer
    assert depot.put("key", b"content")
    assert depot.get("key") == b"content"
    depot.path("zero").symlink_to("/dev/zero")
    assert depot.get("zero") is None
    with depot.path("long").open("wb") as file:
        file.truncate(3 << 30)
    assert depot.get("long") is None


def _put_many(root, letter):
    depot = Depot(root, limit_bytes=20_000)
    for number in range(60):
        depot.put(f"key{number % 7}", letter * 1000)


def test_processes_that_write_at_once_never_show_a_part(tmp_path):
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_put_many, args=(tmp_path, bytes([65 + n]))) for n in range(3)]
    for writer in writers:
        writer.start()
    depot = Depot(tmp_path)
    seen = set()
    while any(writer.is_alive() for writer in writers):
        seen |= {depot.get(f"key{number}") for number in range(7)}
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0, 0, 0]
    assert seen <= {None, b"A" * 1000, b"B" * 1000, b"C" * 1000}
    assert len(depot.entries()) == 7
