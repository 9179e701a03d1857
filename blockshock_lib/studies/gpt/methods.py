"""The methods of the gpt study: the schedules that it compares. A row each."""

from dataclasses import dataclass

from blockshock_lib.report.axes import Look


@dataclass(frozen=True)
class Method(Look):
    """`schedule`: as layers.gpt.named takes it. A label counts a forward's all-reduces, of 12 layers. `bound`: no
    method but a bound: the schedule's work with its sums left out, so that each rank goes on with its own parts.
    """

    name: str = ""
    schedule: str = ""
    bound: bool = False


_ROWS = (
    Method("TP, 24 all-reduces a forward", "TP", "#000000", "s", "tensor_parallel", "tensor_parallel"),
    Method("Parallel attention and MLP, 12", "parallel", "#0072B2", "o", "parallel", "parallel"),
    Method("SPD, 12", "SPD", "#D55E00", "^", "spd", "spd"),
    Method("Desync, 12", "desync 2", "#CC79A7", "v", "desync_2", "desync(2)"),
    Method("Desync, 6", "desync 4", "#882255", "<", "desync_4", "desync(4)"),
    Method("Parallel track of 2 layers, 6", "track 2", "#009E73", "D", "grouped_2", "grouped(2)"),
    Method("Parallel track of 3 layers, 4", "track 3", "#56B4E9", "P", "grouped_3", "grouped(3)"),
    Method("Parallel track of 4 layers, 3", "track 4", "#E69F00", "X", "grouped_4", "grouped(4)"),
    Method("Parallel track of 6 layers, 2", "track 6", "#F0E442", "*", "grouped_6", "grouped(6)"),
    Method("Ladder, 23 overlapped", "ladder", "#666666", "h", "ladder", "ladder"),
    Method("Delayed by 1, 23 overlapped", "delayed", "#999999", "p", "delayed_1", "delayed(1)"),
    Method("SPD but for layers 0 to 2, 15", "selective", "#B8860B", ">", "selective", "selective(0, 1, 2)"),
    Method("At the end alone, 1", "one sync", "#332288", "d", "none", "none"),
    Method("A bound: TP less its 24", "no sync", "#BBBBBB", "_", "no_sync", "tensor_parallel", True),
)
METHODS = {method.name: method for method in _ROWS}
