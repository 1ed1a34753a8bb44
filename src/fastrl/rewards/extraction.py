r"""Where in a completion does the answer stand? Linear time, whatever a model wrote."""

import re

_BRACES = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)
_THINKING_ENDS = re.compile(r"</think(?:ing)?>")
_OPEN, _CLOSE = "<answer>", "</answer>"


def extract_answer(text: str) -> str | None:
    r"""Return the answer that a completion states, stripped; None if it states none.

    Only what follows the last closing thinking tag counts, where there is one and an answer stands behind it: a box
    in the reasoning is an intermediate result. There, the last filled <answer>...</answer> is meant, or the box inside
    it, else the last \boxed{...}.
    """
    ends = [match.end() for match in _THINKING_ENDS.finditer(text)]
    if ends:
        stated = _stated(text[ends[-1] :])
        if stated is not None:
            return stated
    return _stated(text)


def _stated(text: str) -> str | None:
    tagged = extract_tagged(text)
    if tagged is None:
        return extract_boxed(text)
    boxed = extract_boxed(tagged)
    return tagged if boxed is None else boxed


def extract_tagged(text: str) -> str | None:
    """Return the content of the last <answer>...</answer> that holds something, stripped; None if there is none.

    It may span lines. A tag that is never closed is passed over; of tags inside each other the innermost is meant.
    """
    end = len(text)
    while (end := text.rfind(_CLOSE, 0, end)) >= 0:
        start = text.rfind(_OPEN, 0, end)
        if start < 0:
            return None
        content = text[start + len(_OPEN) : end].strip()
        if content and _CLOSE not in content:
            return content
    return None


def extract_boxed(text: str) -> str | None:
    r"""Return the content of the last balanced \boxed{...}, stripped; None if there is none.

    Braces nest, escaped braces (\{ and \}) do not count, a box that is never closed is passed over. Of
    boxes inside each other the innermost of the last is meant.
    """
    open_braces: list[re.Match[str]] = []
    last_start, content = -1, None
    for brace in _BRACES.finditer(text):
        if brace[0].endswith("{") and brace[0] != r"\{":
            open_braces.append(brace)
        elif brace[0] == "}" and open_braces:
            opening = open_braces.pop()
            if opening[0] != "{" and opening.start() > last_start:
                last_start, content = opening.start(), text[opening.end() : brace.start()].strip()
    return content
