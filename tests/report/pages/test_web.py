import re

import pytest

from blockshock_lib.report.pages import index, web
from blockshock_lib.report.pages import style as page_style


def contrast(one, other):
    """Contrast of two colours as #rrggbb (WCAG 2.2)."""

    def luminance(colour):
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        parts = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return sum(c * weight for c, weight in zip(parts, (0.2126, 0.7152, 0.0722), strict=True))

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize("name", sorted(web.TOKENS.keys() - {*web.GROUNDS, "line", "edge"}))
def test_every_colour_of_text_can_be_read_on_every_ground(name, scheme):
    for ground in web.GROUNDS:
        assert contrast(web.TOKENS[name][scheme], web.TOKENS[ground][scheme]) >= 4.5


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_the_edges_of_what_can_be_pressed_are_seen(scheme):
    for ground in web.GROUNDS:
        assert contrast(web.TOKENS["edge"][scheme], web.TOKENS[ground][scheme]) >= 3


def test_styles_take_every_colour_from_the_tokens():
    for style in (web._STYLE, page_style.STYLE, index._STYLE):
        assert set(re.findall(r"var\(--([a-z]+)\)", style)) <= web.TOKENS.keys()
        assert set(re.findall(r"#[0-9a-f]{3,6}\b", style)) <= {"#fff"}  # the paper of figures
        assert not re.search(r"(?:^|[;{])color:(?!var)", style)
        assert "url(" not in style and "@import" not in style


def test_values_are_escaped_and_only_markup_is_not():
    assert web.render("<p title='{{ a }}'>{{ a }}{{ b }}", a="<'\"&", b=web.Markup("<b>")) == (
        "<p title='&lt;&#39;&#34;&amp;'>&lt;&#39;&#34;&amp;<b>"
    )


@pytest.mark.parametrize(
    "text, shown",
    [("2026-11-20T15:57:50+01:00", "2026-11-20 14:57 UTC"), ("soon", "soon"), (None, "None"), (10**30, str(10**30))],
)
def test_a_time_is_shown_as_people_read_it(text, shown):
    assert web.moment(text) == shown
