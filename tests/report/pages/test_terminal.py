import re

import pytest

from blockshock_lib.report.pages import terminal


@pytest.mark.parametrize(
    "text, html",
    [
        ("plain <b> & 'x'\n", "plain &lt;b&gt; &amp; &#39;x&#39;"),
        ("\x1b[31mred\x1b[0m on", '<span class="ansi-red-fg">red</span> on'),
        ("\x1b[1;32mgreen\x1b[0m", '<span class="ansi-green-intense-fg ansi-bold">green</span>'),
        ("\x1b[38;5;28mgreen\x1b[39m", '<span class="ansi-green-fg">green</span>'),
        ("\x1b[38;2;0;0;200mblue\x1b[0m", '<span class="ansi-blue-fg">blue</span>'),
        ("\x1b[38;5;241mgrey\x1b[0m", "grey"),
        ("\x1b[7;41;48;5;3minverse on red\x1b[0m", "inverse on red"),
        ("\x1b[2K\x1b[1Aup", "up"),
        ("\x1b]8;;https://example.org\x07link\x1b]8;;\x07", "link"),
        ("10%\r50%\r100%\ndone", "100%\ndone"),
        ("windows\r\nlines\r\n", "windows\nlines"),
        ("gone\r      \r", ""),
        ("a\x00\x08\x7fb", "ab"),
        (" \n\t\n", ""),
    ],
)
def test_what_a_terminal_showed_is_what_the_page_shows(text, html):
    assert terminal.html(text) == html


def test_no_colour_is_written_as_a_style():
    text = (
        "".join(f"\x1b[{kind};5;{n}mx" for kind in (38, 48) for n in range(256)) + "\x1b[38;2;999;1mx\x1b[38mx\x1b[;;mx"
    )
    assert re.sub(r'<span class="ansi-[a-z-]+">(x+)</span>', r"\1", terminal.html(text)) == "x" * 515
