"""The twin through the templates: one page without anything outside it, and without anything in it that runs but our
own script. All text is escaped; the policy in the page's head allows our style and script by their hashes alone."""

import base64
import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from fastrl.report.page.draw import GRID, INK, MARK, draw, swatch
from fastrl.report.page.read import number
from fastrl.report.plots import COLOURS

_TOGETHER = re.compile(r"(\[.*?\]|\(.*?\)|[\d.]+(?: %)? - [\d.]+(?: %)?|[\d.]+ [%s])")
"""What no line of a table breaks: an interval, a remark in brackets, a number with its unit."""
TEMPLATES = Path(__file__).parents[1] / "templates"
_DARK = ("#c4c4c4", "#56b4e9", "#ff8a3d", "#2fd0a0", "#e79ac4", "#ffc14d")
"""Of `COLOURS`, in their order, on dark paper."""


def render(twin: Mapping[str, Any], twin_name: str) -> str:
    """Return the page.

    Args:
        twin: From `build_twin`.
        twin_name: Of the file with the twin, which lies beside the page.
    """
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals |= {
        "twin": twin,
        "draw": lambda figure, prefix: Markup(draw(figure, prefix)),  # matplotlib escapes its texts
        "swatch": lambda index: Markup(swatch(index)),
        "number": _number,
        "together": _together,
        "heat": lambda distance: f"d{min(9, int(10 * max(0.0, distance)))}",
    }
    colours = [
        *((light.lower(), dark) for light, dark in zip(COLOURS, _DARK, strict=True)),
        (MARK, "#9aa1a8"),
    ]
    style = environment.get_template("page.css.j2").render(colours=colours, ink=INK, grid=GRID)
    script = (TEMPLATES / "viewer.js").read_text(encoding="utf-8")
    return environment.get_template("page.html.j2").render(
        twin_name=twin_name,
        style=Markup(style),
        script=Markup(script),
        policy=_policy(style, script),
    )


def _policy(style: str, script: str) -> str:
    return (
        f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")


def _together(text: str) -> Markup:
    """A cell whose intervals and remarks move to the next line whole."""
    parts = enumerate(_TOGETHER.split(text))  # every second one is what was searched for
    whole = Markup('<span class="whole">{}</span>')
    return Markup("").join(whole.format(part) if place % 2 else escape(part) for place, part in parts)


def _number(value: Any) -> str:
    known = number(value)
    return "none" if known is None else f"{known:.4g}"
