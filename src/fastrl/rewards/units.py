"""Units of answers: 8cm, 400cm², 40海里, 65°, 1.5 hours. Read from the end of a text; a dimension and a scale."""

import re
from dataclasses import dataclass
from fractions import Fraction

_LENGTH = {
    "1/1000": "mm millimeter millimeters millimetre millimetres 毫米",
    "1/100": "cm centimeter centimeters centimetre centimetres 厘米",
    "1/10": "dm decimeter decimeters decimetre decimetres 分米",
    "1": "m meter meters metre metres 米",
    "1000": "km kilometer kilometers kilometre kilometres 千米 公里",
    "1852": "海里 nmi nautical\\s+miles? ",
    "0.0254": "in inch inches 英寸",
    "0.3048": "ft foot feet 英尺",
    "0.9144": "yd yard yards",
    "1609.344": "mi mile miles 英里",
}
_OTHER = {
    "angle": {"1": "° º ˚ \\^\\s*\\\\circ \\^\\s*\\{\\s*\\\\circ\\s*\\} \\\\circ \\\\degree degrees? deg 度"},
    "radian": {"1": "rad radians?"},
    "time": {
        "1": "s sec secs seconds? 秒",
        "60": "min mins minutes? 分钟",
        "3600": "h hr hrs hours? 小时",
        "86400": "days? 天",
    },
    "mass": {"1": "g grams? 克", "1000": "kg kilograms? 千克 公斤"},
    "money": {"1": "元 yuan dollars?"},
    "percent": {"1/100": "\\\\% % percent"},
    "": {"1": "units? square\\s+units? 个 人"},
}
_POWERS = {"square": 2, "sq": 2, "平方": 2, "cubic": 3, "立方": 3, "2": 2, "3": 3}


def _table() -> dict[str, tuple[str, Fraction]]:
    table = {name: ("length", Fraction(scale)) for scale, names in _LENGTH.items() for name in names.split()}
    for dimension, scales in _OTHER.items():
        table |= {
            name: (dimension, Fraction(scale)) for scale, names in scales.items() for name in names.split()
        }
    return table


_TABLE = _table()
_NAMES = sorted(_TABLE, key=len, reverse=True)
_UNIT = re.compile(
    r"(?:(?P<before>square|sq|cubic)\s*\.?\s*|(?P<hanzi>平方|立方))?"
    r"(?:" + "|".join(f"(?P<u{i}>{name})" for i, name in enumerate(_NAMES)) + r")"
    r"(?:\s*(?:\^|\*\*)\s*\{?\s*(?P<raised>[23])\s*\}?|(?P<plain>[23]))?\s*\.?\s*\Z"
)
_LATIN = re.compile(r"[A-Za-z\\]\Z")


@dataclass(frozen=True)
class Unit:
    """A dimension, such as length2 for areas, and how many base units one of it is."""

    dimension: str
    scale: Fraction


def split_unit(text: str) -> tuple[str, Unit | None]:
    """Take a unit off the end of a text: "4√{3}cm^{2}" -> ("4√{3}", area). Without one, the text and None."""
    for match in _UNIT.finditer(text, max(0, len(text) - 40)):
        before = text[: match.start()]
        starts_latin = match[0][:1].isascii() and match[0][:1].isalpha()
        if not before.strip() or (starts_latin and _LATIN.search(before)):
            continue  # no number before it, or the end of a longer word
        name = next(name for i, name in enumerate(_NAMES) if match[f"u{i}"] is not None)
        dimension, scale = _TABLE[name]
        power = next(
            (_POWERS[found] for found in match.group("before", "hanzi", "raised", "plain") if found), 1
        )
        if power > 1 and dimension not in ("length", ""):
            continue
        return before.rstrip(), Unit(f"{dimension}{power}" if power > 1 else dimension, scale**power)
    return text, None
