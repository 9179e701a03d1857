"""Parameters: the YAML stack, checked as a whole and frozen. No process starts before `load` has returned."""

from blockshock_lib.params.load import PARAMS, load, parse_override
from blockshock_lib.params.models import RunParams

__all__ = ["PARAMS", "RunParams", "load", "parse_override"]
