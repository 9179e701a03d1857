"""Backwards that are differentiated once."""

import functools
from collections.abc import Callable

import torch

from blockshock_lib.errors import UnsupportedError


def once(backward: Callable) -> Callable:
    """A `backward` of an autograd.Function that refuses at once to be differentiated itself. torch's own decorator does
    so where a later backward comes by, and torch.autograd.grad takes another way: it would leave a term out.
    """

    @functools.wraps(backward)
    def checked(ctx, *grads):
        if torch.is_grad_enabled():  # as create_graph=True has it
            raise UnsupportedError(
                "a product of packed weights, block-sparse attention and a sum over ranks have no gradient of their "
                "gradient (create_graph=True): put dense layers there, as to_linear() gives"
            )
        return backward(ctx, *grads)

    return checked
