"""An empty virtual environment with a distribution of Twinbus, made without a network.

What an extra brings is linked from the environment of the tests: exactly the packages that its
requirements file pins.
"""

import os
import re
import subprocess
import sys
import venv
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

ROOT = Path(__file__).parents[2]
PIN = re.compile(r"^([A-Za-z0-9_.-]+)==", re.MULTILINE)
OFFLINE = ("--no-index", "--disable-pip-version-check")


def link_packages(names: Iterable[str], target: Path) -> None:
    """Link packages of the environment of the tests into a folder."""
    target.mkdir(exist_ok=True)
    for name in names:
        try:
            found = distribution(name)
        except PackageNotFoundError:  # pinned for other systems or Pythons
            continue
        tops = {Path(str(file)).parts[0] for file in found.files or ()} - {"..", "__pycache__"}
        for top in tops:
            link = target / top
            if not link.exists():
                link.symlink_to(Path(str(found.locate_file(top))).resolve())


def pinned_by(requirements: str) -> list[str]:
    """Return the names of the packages that a requirements file pins."""
    return PIN.findall((ROOT / "requirements" / f"{requirements}.txt").read_text())


class Environment:
    """A virtual environment with a wheel, or a source distribution, and nothing else."""

    def __init__(self, folder: Path, distribution_file: Path, backend: Path | None = None) -> None:
        self.folder = folder
        venv.create(folder, with_pip=False, symlinks=True)
        options = ["--quiet", "--no-deps", "--no-build-isolation"]
        done = self._pip("install", *options, str(distribution_file), packages=backend)
        assert done.returncode == 0, done.stdout + done.stderr

    def run(self, extra: str, *command: str, folder: Path) -> subprocess.CompletedProcess[str]:
        """Run a command in a folder, where what the extra pins is installed as well.

        Several extras are joined by a plus.
        """
        return self._run(command, self._packages(extra), folder)

    def resolve(
        self, requirement: str, extra: str, folder: Path
    ) -> subprocess.CompletedProcess[str]:
        """Let pip look for a requirement among the packages that an extra pins."""
        packages = self._packages(extra)
        return self._pip("install", "--dry-run", requirement, packages=packages, folder=folder)

    def package_files(self) -> dict[str, bytes]:
        """Return the installed files of the package and of its metadata, by name."""
        [site] = self.folder.glob("lib/python*/site-packages")
        written_by_pip = {"RECORD", "direct_url.json", "INSTALLER", "REQUESTED"}
        return {
            path.relative_to(site).as_posix(): path.read_bytes()
            for path in site.rglob("*")
            if path.is_file() and path.suffix != ".pyc" and path.name not in written_by_pip
        }

    def _packages(self, extra: str) -> Path:
        packages = self.folder / f"packages-{extra}"
        for name in extra.split("+"):
            link_packages(pinned_by(name), packages)
        return packages

    def _pip(
        self, verb: str, *words: str, packages: Path | None, folder: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        python = str(self.folder / "bin" / "python")
        command = [sys.executable, "-m", "pip", "--python", python, verb, *OFFLINE, *words]
        return self._run(command, packages, folder or self.folder)

    def _run(
        self, command: Iterable[str], packages: Path | None, folder: Path
    ) -> subprocess.CompletedProcess[str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL"))}
        path = f"{self.folder / 'bin'}:{os.environ['PATH']}"
        more = {} if packages is None else {"PYTHONPATH": str(packages)}
        return subprocess.run(
            list(command),
            cwd=folder,
            env={**kept, "PATH": path, "TMPDIR": str(folder), **more},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
