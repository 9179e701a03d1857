"""Collectives between ranks, and nothing else."""

from blockshock_lib.comm.group import Group, Pending

__all__ = ["Group", "Pending"]
