"""The interactive room above report and run: views for a notebook that is kept open.

Each call shows a static figure and after it a widget view of the same. Where there is no live kernel (a rendered page,
GitHub) the static figure says everything; where there is one, the view hides it and takes its place.
"""

from blockshock_lib.explore.floors import floors_view
from blockshock_lib.explore.live import live_view
from blockshock_lib.explore.masks import masks_view
from blockshock_lib.explore.runs import runs_view
from blockshock_lib.explore.what_if import what_if_view

__all__ = ["floors_view", "live_view", "masks_view", "runs_view", "what_if_view"]
