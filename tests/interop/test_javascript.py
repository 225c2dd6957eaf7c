"""The unmodified SDK for JavaScript, @azure/service-bus, uses a Twinbus server.

npm installs what `javascript/package-lock.json` pins into a folder of the tests.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.interop.bus import Bus, sdk_string
from twinbus import QueueDescription, SubscriptionDescription

SOURCE = Path(__file__).parent / "javascript"
INSTALL_S = 240
STORIES = ["messages", "sessions", "subscribing", "rules", "errors", "administration"]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the SDK installed."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("node and npm are not installed; the JavaScript SDK needs them")
    folder = tmp_path_factory.mktemp("javascript")
    for name in ("package.json", "package-lock.json", "round.mjs"):
        shutil.copy(SOURCE / name, folder)
    command = [npm, "ci", "--no-audit", "--no-fund", "--ignore-scripts"]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=INSTALL_S, check=False
    )
    if done.returncode:
        pytest.skip(f"npm cannot install the JavaScript SDK here: {done.stderr.strip()[-300:]}")
    return folder


@pytest.mark.parametrize("story", STORIES)
def test_the_javascript_sdk(bus: Bus, project: Path, story: str) -> None:
    prefix = bus.name()
    bus.manager.create_queue(QueueDescription(path=f"{prefix}-queue", max_delivery_count=5))
    bus.manager.create_queue(QueueDescription(path=f"{prefix}-sessions", requires_session=True))
    bus.manager.create_topic(f"{prefix}-topic")
    for name in ("all", "ruled"):
        described = SubscriptionDescription(topic_path=f"{prefix}-topic", name=name)
        bus.manager.create_subscription(f"{prefix}-topic", described)
    environment = {
        **os.environ,
        "SERVICE_BUS": sdk_string(bus.server),
        "PREFIX": prefix,
        "NODE_EXTRA_CA_CERTS": bus.ca_file,
    }
    done = subprocess.run(
        ["node", "round.mjs", story],  # noqa: S607 - the fixture has found it
        cwd=project,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
