"""Records frame in; table, figure, verdict or page out. Reads records only: a run can be redrawn without a GPU."""

import pkgutil
from collections.abc import Callable
from typing import Any


def late(place: str, *given: Any, **options: Any) -> Callable[..., Any]:
    """The function at "module:name" of the library, called with a frame, what is given and what is asked.

    It is imported then, so that a study's tables and figures can be named before pandas is loaded.
    """

    def called(frame: Any, *more: Any, **how: Any) -> Any:
        return pkgutil.resolve_name(called.place)(frame, *given, *more, **options | how)

    called.place = f"blockshock_lib.{place}"
    return called
