"""Runs on more than one machine, under torchrun or SLURM: one supervisor a rank, each with the usual worker as child.

place = joined.place()                         None for an ordinary process
joined.execute("phase1", place, ...)           on every rank; the outcome is the same on all
"""

from blockshock_lib.joined.environment import Place, hosts, place

__all__ = ["Place", "execute", "hosts", "place"]


def __getattr__(name: str):
    # Torch and the notebook's libraries are loaded only where there is a job.
    if name == "execute":
        from blockshock_lib.joined.job import execute

        return execute
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
