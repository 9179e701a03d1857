"""The backends, a row each. A module says what it cannot do (`refuse`) and does the rest (`attend`)."""

from types import ModuleType

from blockshock_lib.kernels.attention import cudnn, fa4, flex, reference, sdpa

BACKENDS: dict[str, ModuleType] = {
    "reference": reference,
    "flex": flex,
    "fa4": fa4,
    "cudnn": cudnn,
    "sdpa": sdpa,
}
