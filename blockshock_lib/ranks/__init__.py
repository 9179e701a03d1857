"""Groups of processes that run functions: one process a rank. What they run is not known here."""

from blockshock_lib.ranks.group import Lost, WorkerGroup

__all__ = ["Lost", "WorkerGroup"]
