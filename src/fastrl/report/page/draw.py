"""One figure of the twin as inline SVG: text stays text, ids are its own, colours are attributes that the page's
style sheet replaces in the dark. No style attribute is left, so the page can forbid them."""

import io
import re
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from fastrl.report.plots import COLOURS, LINES, MARKERS, STYLE, plt

INK = "#1a1a1a"
GRID = "#e6e6e6"
MARK = "#8a8a8a"
_STYLE = {
    **STYLE,
    "svg.fonttype": "none",
    "text.parse_math": False,
    "axes.edgecolor": INK, "axes.labelcolor": INK, "text.color": INK, "xtick.color": INK, "ytick.color": INK,
    "axes.titlecolor": INK, "grid.color": GRID,
}  # fmt: skip
_PRESENTATION = {
    "fill", "fill-opacity", "fill-rule", "opacity", "stroke", "stroke-dasharray", "stroke-dashoffset",
    "stroke-linecap", "stroke-linejoin", "stroke-opacity", "stroke-width", "text-anchor", "font-size", "font-weight",
}  # fmt: skip


def look(index: int) -> dict[str, Any]:
    """Colour, line and marker of the n-th method: 36 methods look different, in print too."""
    turn = index // len(COLOURS)
    return {
        "color": COLOURS[index % len(COLOURS)],
        "linestyle": LINES[(index + turn) % len(LINES)],
        "marker": MARKERS[(index + turn) % len(MARKERS)],
    }


def draw(figure: Mapping[str, Any], prefix: str) -> str:
    """Return a figure as an <svg> element whose ids begin with `prefix`."""
    is_wide = figure["kind"] in ("stack", "interval")
    rows = len(figure["series"][0]["y"]) if figure["kind"] == "stack" else len(figure["series"])
    size = (6.4, (1.3 if figure["kind"] == "stack" else 0.8) + 0.34 * rows) if is_wide else (4.6, 3.2)
    with plt.rc_context(_STYLE):
        drawing, axes = plt.subplots(figsize=size, layout="constrained")
        try:
            _KINDS[figure["kind"]](axes, figure)
            axes.set(xlabel=figure["x"], ylabel=figure["y"])
            return _svg(drawing, prefix, figure["summary"])
        finally:
            plt.close(drawing)


def swatch(index: int) -> str:
    """A short line as the n-th method is drawn, for a legend in the page."""
    style = look(index)
    dashes = {"--": "6 3", "-": "none", "-.": "7 3 1 3", ":": "1 3"}
    kind = style["linestyle"]
    pattern = dashes[kind] if isinstance(kind, str) else " ".join(str(2 * part) for part in kind[1])
    return (
        '<svg class="swatch" viewBox="0 0 34 10" width="34" height="10" aria-hidden="true">'
        f'<line x1="1" y1="5" x2="33" y2="5" stroke="{style["color"].lower()}" stroke-width="2.4" '
        f'stroke-dasharray="{pattern}"/></svg>'
    )


def _lines(axes: Axes, figure: Mapping[str, Any]) -> None:
    is_step, is_accuracy = figure["kind"] == "step", "accuracy" in figure["y"]
    for series in figure["series"]:
        style = look(series["look"])
        marker = style.pop("marker") if is_accuracy else style.pop("marker") and None
        drawn = axes.step if is_step else axes.plot
        options: dict[str, Any] = {"where": "mid"} if is_step else {}
        for seed in series["seeds"]:
            drawn(seed["x"], seed["y"], color=style["color"], linewidth=0.7, alpha=0.3, **options)
        options |= {"marker": marker, "markersize": 3.5} if marker else {}
        drawn(series["x"], series["y"], linewidth=1.8, zorder=30 - series["look"], **style, **options)
    if is_step:
        axes.set_ylim(bottom=0)
        axes.margins(y=0.15)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    else:
        axes.set_xlim(left=0)
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.xaxis.set_major_formatter(lambda value, _: _short(value))
    axes.yaxis.set_major_formatter(lambda value, _: _short(value))
    _mark(axes, figure["line"])


def _points(axes: Axes, figure: Mapping[str, Any]) -> None:
    for series in figure["series"]:
        style = look(series["look"])
        axes.errorbar(
            series["x"],
            series["y"],
            yerr=_reach(series, "y"),
            markersize=5,
            capsize=3,
            linewidth=1.6,
            **style,
        )
    _mark(axes, figure["line"])


def _stack(axes: Axes, figure: Mapping[str, Any]) -> None:
    names = figure["series"][0]["y"]
    left = [0.0] * len(names)
    for series in figure["series"]:
        axes.barh(
            range(len(names)), series["x"], left=left, height=0.62, label=series["label"],
            color=COLOURS[series["look"] % len(COLOURS)],
        )  # fmt: skip
        left = [start + width for start, width in zip(left, series["x"], strict=True)]
    _named_rows(axes, names)
    axes.figure.legend(loc="outside lower center", ncols=3)


def _interval(axes: Axes, figure: Mapping[str, Any]) -> None:
    for row, series in enumerate(figure["series"]):
        style = {**look(series["look"]), "linestyle": "none"}
        axes.errorbar(
            series["x"], [row], xerr=_reach(series, "x"), markersize=6, capsize=4, linewidth=1.8, **style
        )
    _named_rows(axes, [series["label"] for series in figure["series"]])
    _mark(axes, figure["line"])


def _named_rows(axes: Axes, names: list[str]) -> None:
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)


_KINDS = {"line": _lines, "step": _lines, "points": _points, "stack": _stack, "interval": _interval}


def _reach(series: Mapping[str, Any], axis: str) -> list[list[float]]:
    """Distances to the ends of the intervals; 0 where there is none."""
    rows = list(zip(series[axis], series["low"], series["high"], strict=True))
    below = [0.0 if low is None else max(0.0, value - low) for value, low, _ in rows]
    above = [0.0 if high is None else max(0.0, high - value) for value, _, high in rows]
    return [below, above]


def _mark(axes: Axes, line: Mapping[str, Any] | None) -> None:
    if line is None:
        return
    if "y" in line:
        axes.axhline(line["y"], color=MARK, linewidth=1, zorder=1)
    else:
        axes.axvline(line["x"], color=MARK, linewidth=1, zorder=1)


def _short(value: float) -> str:
    """1500000 as 1.5M, 1500 as 1.5k."""
    for size, name in ((1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if name == 'k' else size):g}{name}"
    return f"{value:g}"


def _svg(drawing: Any, prefix: str, summary: str) -> str:
    buffer = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    drawing.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    root = ET.fromstring(buffer.getvalue())
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        element.text = element.text if element.tag == "text" else None
        element.tail = None
        for child in [child for child in element if child.tag.rpartition("}")[2] in ("style", "metadata")]:
            element.remove(child)
        _attributes(element, prefix)
    for name in ("width", "height", "version", "id"):
        root.attrib.pop(name, None)
    root.attrib.update({"role": "img", "aria-label": summary})
    return ET.tostring(root, encoding="unicode")


def _attributes(element: ET.Element, prefix: str) -> None:
    given, element.attrib = element.attrib, {}
    for name, value in given.items():
        local = name.rpartition("}")[2]
        if local == "id":
            element.set("id", f"{prefix}-{value}")
        elif local == "href":
            element.set("href", f"#{prefix}-{value[1:]}")
        elif local == "style":
            for key, found in _declarations(value):
                element.set(key, found)
        else:
            element.set(local, re.sub(r"url\(#(.*?)\)", rf"url(#{prefix}-\1)", value))


def _declarations(style: str) -> list[tuple[str, str]]:
    """Declarations of a style attribute that are attributes of their own; `font:` gives its size and weight."""
    found = []
    for declaration in style.split(";"):
        key, _, value = (part.strip() for part in declaration.partition(":"))
        if key == "font":
            size = re.search(r"([\d.]+)px", value)
            found += [("font-size", size[1])] if size else []
            key, value = "font-weight", "bold" if "bold" in value else ""
        if key in _PRESENTATION and value:
            found.append((key, value))
    return found
