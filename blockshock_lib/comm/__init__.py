"""Collectives between ranks, and nothing else."""

from blockshock_lib.comm.all_reduce import Reduction
from blockshock_lib.comm.group import Group, Pending

__all__ = ["Group", "Pending", "Reduction"]
