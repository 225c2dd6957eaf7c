"""What applications need to test how they behave when things go wrong.

ManualClock       time that moves only when told
FaultyNamespace   any namespace, with requests that fail, time out, or lose their reply
FaultyStorage     a disk that is slow, full, or tears a write at a byte
PowerCutStorage   a disk that loses what was not synced when its PowerSupply fails
LimitedNamespace  any namespace, with capabilities taken away
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
