"""What two notebooks show differently is said, and what must differ is not."""

import nbformat.v4 as nb
import pytest

from blockshock_lib.report import figures
from tools import drawn


def notebook(path, html="<td>1.5x</td><td>outputs/2026-11-22/101500-a</td>", alt="Two bars", height=1.0):
    fig = figures.Figure(figsize=(1, height))
    fig.alt = alt
    shown = [{"text/html": html}, {"text/html": figures.show(fig).data}]
    cells = [nb.new_code_cell(outputs=[nb.new_output("display_data", data)]) for data in shown]
    path.write_text(nb.writes(nb.new_notebook(cells=cells)))
    return path


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"html": "<th>1.5x</th><td>outputs/2027-01-01/235959-b</td>"}, []),  # tags, dates and places
        ({"html": "<td>1.6x</td><td>outputs/2026-11-22/101500-a</td>"}, ["-[html] 1.5x | ", "+[html] 1.6x | "]),
        ({"alt": "Three bars"}, ["-[alt] Two bars", "+[alt] Three bars"]),
        ({"height": 1.1}, ["-[figure] ", "+[figure] "]),
    ],
)
def test_a_changed_word_or_pixel_is_said_and_a_date_is_not(change, said, tmp_path):
    lines = drawn.differences(notebook(tmp_path / "old.ipynb"), notebook(tmp_path / "new.ipynb", **change))
    assert len(lines[1:]) == len(said) and all(map(str.startswith, lines[1:], said))  # the first says where
