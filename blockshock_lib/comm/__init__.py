"""Collectives between ranks, and nothing else."""

from blockshock_lib.comm.group import Group

__all__ = ["Group"]
