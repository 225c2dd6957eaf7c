"""A paired primary that SDKs use at the same time is killed: the audit of the demo holds."""

import random

import pytest

pytest.importorskip("azure.servicebus", reason="the SDK azure-servicebus is not installed")

from tests.soak.mixed_clients import run

pytestmark = pytest.mark.timeout(180)


def test_nothing_is_lost_or_doubled_when_a_primary_of_both_kinds_of_clients_is_killed() -> None:
    findings = run(random.SystemRandom().randrange(2**32), kills=1)
    assert findings.acknowledged > 100
