"""Files that appear whole, and pages that a command writes."""

import os
import threading
from pathlib import Path
from typing import BinaryIO

import pytest

from twinbus.cli.context import write_page
from twinbus.errors import InvalidArgumentError
from twinbus.files import write_all_whole, write_whole


class _OutOfSpaceError(OSError):
    pass


def refuse(file: BinaryIO) -> None:
    """Write a part, and fail."""
    file.write(b"par")
    raise _OutOfSpaceError


def test_a_file_is_replaced_whole_and_no_draft_stays(tmp_path: Path) -> None:
    write_whole(tmp_path / "mark", b"first")
    write_whole(tmp_path / "mark", b"second")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("mark", b"second")]


@pytest.mark.parametrize(("is_private", "permissions"), [(True, 0), (False, 0o044)])
def test_only_a_private_file_is_closed_to_others(
    tmp_path: Path, *, is_private: bool, permissions: int
) -> None:
    before = os.umask(0o022)
    try:
        write_whole(tmp_path / "file", b"", is_private=is_private)
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o077 == permissions


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    write_whole(tmp_path / "mark", b"first")
    with pytest.raises(_OutOfSpaceError):
        write_all_whole({tmp_path / "mark": refuse})
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("mark", b"first")]


def test_of_several_files_all_appear_or_none(tmp_path: Path) -> None:
    with pytest.raises(_OutOfSpaceError):
        write_all_whole({tmp_path / "a": lambda file: file.write(b"a"), tmp_path / "b": refuse})
    assert not list(tmp_path.iterdir())
    (tmp_path / "b").mkdir()  # no file can be given this name
    with pytest.raises(OSError, match="b"):
        write_all_whole(dict.fromkeys([tmp_path / "a", tmp_path / "b"], lambda f: f.write(b"x")))
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


@pytest.mark.parametrize("is_durable", [True, False])
def test_a_durable_file_is_synced_before_it_is_named_and_its_folder_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_durable: bool
) -> None:
    steps: list[str] = []
    sync, replace = os.fsync, Path.replace

    def note_sync(descriptor: int) -> None:
        steps.append(f"sync {Path(f'/proc/self/fd/{descriptor}').resolve().name}")
        sync(descriptor)

    def note_name(draft: Path, path: Path) -> Path:
        steps.append(f"name {path.name}")
        return replace(draft, path)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(Path, "replace", note_name)
    write_whole(tmp_path / "mark", b"1", is_durable=is_durable)
    draft = f".mark.{os.getpid()}.draft"
    wanted = [f"sync {draft}", "name mark", f"sync {tmp_path.name}"]
    assert steps == (wanted if is_durable else ["name mark"])


def test_a_page_goes_to_where_a_link_points(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "page.html")
    write_page(tmp_path / "link", "<html>")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "page.html").read_text() == "<html>"


def test_a_page_can_be_written_to_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append((tmp_path / "pipe").read_text()))
    reader.start()
    write_page(tmp_path / "pipe", "<html>")
    reader.join()
    assert read == ["<html>"]
    assert (tmp_path / "pipe").is_fifo()


def test_a_page_that_cannot_be_written_is_a_wrong_argument(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"cannot be written: .*\. Choose another file"):
        write_page(tmp_path, "<html>")
