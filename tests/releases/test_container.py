"""The steps of deploy/Containerfile, run in order without a container engine.

Its folders are below a temporary one. Two kinds of steps are not run: those that need root, and the
one that needs a package index, whose packages are linked from the environment of the tests instead.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.releases.environment import ROOT, link_packages, pinned_by
from tests.scenarios.server_process import READY

TEXT = (ROOT / "deploy" / "Containerfile").read_text()
STEPS = [
    tuple(line.split(maxsplit=1))
    for line in re.sub(r"\\\n\s*", "", re.sub(r"(?m)^#.*\n", "", TEXT)).splitlines()
    if line
]


def arguments(instruction: str) -> list[str]:
    """Return what follows an instruction, wherever it stands."""
    return [rest for name, rest in STEPS if name == instruction]


def below(root: Path, words: str) -> str:
    """Return words whose paths of the image are below a folder."""
    return re.sub(r"(?<![\w.])/(?=(?:opt|build|var/lib)/)", f"{root}/", words)


@pytest.fixture(scope="module")
def image(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The root folder of the image, after all steps that can be run here."""
    root = tmp_path_factory.mktemp("image")
    context = tmp_path_factory.mktemp("context")
    (context / "requirements").mkdir()
    shutil.copy(ROOT / "requirements" / "server.txt", context / "requirements")
    (context / "dist").mkdir()
    shutil.copy(wheel, context / "dist")
    for name, rest in STEPS:
        words = below(root, rest)
        if name == "COPY" and not rest.startswith("--from"):
            pattern, target = words.split()
            Path(target).mkdir(parents=True, exist_ok=True)
            [copied] = context.glob(pattern)
            shutil.copy(copied, target)
        elif name == "RUN" and "--require-hashes" in words:
            assert (root / "build" / "server.txt").exists()
            [site] = root.glob("opt/twinbus/lib/python*/site-packages")
            link_packages(pinned_by("server"), site)
        elif name == "RUN" and "useradd" not in words:
            subprocess.run(["/bin/sh", "-ec", words], check=True, env=variables(root), timeout=240)
    (root / "var" / "lib" / "twinbus").mkdir(parents=True)
    return root


def variables(root: Path) -> dict[str, str]:
    """Return the environment of the image; pip asks no index."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL"))}
    path = f"{root}/opt/twinbus/bin:{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**kept, "PATH": path, "PYTHONUNBUFFERED": "1", "PIP_NO_INDEX": "1"}


def test_the_server_of_the_image_starts_and_its_health_check_passes(image: Path) -> None:
    [entry], [options] = arguments("ENTRYPOINT"), arguments("CMD")
    command = [*json.loads(below(image, entry)), *json.loads(options)]
    command[command.index("0.0.0.0")] = "127.0.0.1"  # noqa: S104 - that of the image
    with subprocess.Popen(
        [*command, "--port", "0"],
        env=variables(image),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stdout is not None
        assert server.stderr is not None
        try:
            ready = next(filter(None, (READY.fullmatch(line.strip()) for line in server.stdout)))
            [check] = arguments("HEALTHCHECK")
            asked = json.loads(check.partition(" CMD ")[2])
            asked[-1] = asked[-1].replace(":4617/", f":{ready[3]}/")
            subprocess.run(asked, env=variables(image), check=True, timeout=60)
        finally:
            server.terminate()
        assert server.wait(timeout=60) == 0
        assert all(json.loads(line) for line in server.stderr)


def test_the_build_gets_what_it_copies_and_nothing_else() -> None:
    copied = [rest.split()[0] for rest in arguments("COPY") if not rest.startswith("--from")]
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    rules = [line for line in lines if not line.startswith("#")]
    assert rules[0] == "*"
    assert sorted(rules[1:]) == sorted(f"!{pattern}" for pattern in copied)


def test_the_server_runs_as_the_user_that_is_made_and_owns_the_volume() -> None:
    [made] = [rest for rest in arguments("RUN") if "useradd" in rest]
    words = shlex.split(made)
    assert arguments("USER") == [
        f"{words[words.index('--uid') + 1]}:{words[words.index('--gid') + 1]}"
    ]
    [volume] = arguments("VOLUME")
    assert volume in words
    assert json.loads(arguments("ENTRYPOINT")[0])[-1] == volume
