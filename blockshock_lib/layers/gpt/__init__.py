"""GPTs over ranks with fewer synchronisations: a named schedule says when the ranks' partial results are summed.

from blockshock_lib import gpt
config = gpt.GPTConfig(width=384, heads=12, vocab=8192, context=512)
model = gpt.GPT(config, "spd", tracks=4)  # what 4 ranks compute, on one device
"""

from blockshock_lib.layers.gpt.model import GPT, Cache, GPTConfig
from blockshock_lib.layers.gpt.picture import picture
from blockshock_lib.layers.gpt.schedule import Schedule, Step, Sync
from blockshock_lib.layers.gpt.schedules import SCHEDULES, named

__all__ = ["GPT", "SCHEDULES", "Cache", "GPTConfig", "Schedule", "Step", "Sync", "named", "picture"]
