"""GPTs over ranks with fewer synchronisations: a named schedule says when the ranks' partial results are summed.

from blockshock_lib import gpt
schedule = gpt.named("spd", layers=12)
len(schedule.syncs)  # all-reduces of a forward: 12
"""

from blockshock_lib.layers.gpt.picture import picture
from blockshock_lib.layers.gpt.schedule import Schedule, Step, Sync
from blockshock_lib.layers.gpt.schedules import SCHEDULES, named

__all__ = ["SCHEDULES", "Schedule", "Step", "Sync", "named", "picture"]
