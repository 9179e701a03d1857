"""What a user's own model needs beside the layers: styles for `parallelize_module`, checkpoints, clipping."""

from blockshock_lib.model import checkpoint

__all__ = ["checkpoint"]
