"""What a run will ask for, before anything starts: bytes, floors, memory and time. It starts no process, makes no file.

Costs are the methods' own, ceilings and durations those of earlier runs; what is estimated says on what it rests.
"""

from blockshock_lib.predict.costs import Floor, cost, floor
from blockshock_lib.predict.earlier import Known, known_ceilings, known_machines
from blockshock_lib.predict.table import does_not_fit, plan
from blockshock_lib.predict.words import dry_run

__all__ = [
    "Floor",
    "Known",
    "cost",
    "does_not_fit",
    "dry_run",
    "floor",
    "known_ceilings",
    "known_machines",
    "plan",
]
