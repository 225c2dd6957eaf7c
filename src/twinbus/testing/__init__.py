"""Tools for applications to test their behaviour under failures.

ManualClock       a clock that moves only when a test moves it
FaultyNamespace   wraps a namespace: requests fail, time out, or lose their reply
FaultyStorage     a disk that is slow or full, or tears a write at a byte
PowerCutStorage   a disk that loses unsynced data when its PowerSupply fails
LimitedNamespace  wraps a namespace and removes some of its capabilities
rabbitmq          a module: real RabbitMQ nodes that can be killed and paused
OutageSimulation  two paired namespaces, many clients, hours of outages, and an auditor
"""

from twinbus.clock import ManualClock
from twinbus.testing.auditor import Verdict
from twinbus.testing.faults import Fault, FaultyNamespace
from twinbus.testing.limited import LimitedNamespace
from twinbus.testing.mover import Mover
from twinbus.testing.outage import OutageSimulation
from twinbus.testing.power_cut import PowerCutStorage, PowerSupply
from twinbus.testing.schedule import Outage, Setting, Where
from twinbus.testing.storage import FaultyStorage, PowerFailure

__all__ = [
    "Fault",
    "FaultyNamespace",
    "FaultyStorage",
    "LimitedNamespace",
    "ManualClock",
    "Mover",
    "Outage",
    "OutageSimulation",
    "PowerCutStorage",
    "PowerFailure",
    "PowerSupply",
    "Setting",
    "Verdict",
    "Where",
]
