r"""Is a completion in the format that was asked for? One rule for each published reward, all of linear time."""

import re

from fastrl.rewards.extraction import extract_boxed

_AROUND_TAGS = re.compile(r"\s*([<>/])\s*")
_THINK_TO_ANSWER = re.compile(r"</think>\s*<answer>")


def has_format(text: str, tag: str = "think") -> bool:
    r"""Tell whether a completion is one <tag>...</tag> with reasoning in it and then a filled \boxed{}.

    Words around the box are allowed, words before <tag> and further such tags are not.
    """
    opening, closing = f"<{tag}>", f"</{tag}>"
    if text.count(opening) != 1 or text.count(closing) != 1 or not text.lstrip().startswith(opening):
        return False
    reasoning, closed, rest = text.lstrip().removeprefix(opening).partition(closing)
    return bool(closed) and bool(reasoning.strip()) and bool(extract_boxed(rest))


def has_thinking_format(text: str) -> bool:
    r"""The paper's format: <thinking>...</thinking>, then \boxed{}."""
    return has_format(text, "thinking")


def has_easyr1_format(text: str) -> bool:
    r"""EasyR1's `math` format: the whole completion is <think>.*</think>.*\boxed{.*}.*

    As there, white space around <, > and / is taken out first, and tags may repeat.
    """
    squeezed = _AROUND_TAGS.sub(r"\1", text)
    _, closed, rest = squeezed.removeprefix("<think>").partition("</think>")
    _, boxed, content = rest.partition(r"\boxed{")
    return squeezed.startswith("<think>") and bool(closed) and bool(boxed) and "}" in content


def has_r1v_format(text: str) -> bool:
    """R1-V's format: the whole completion is <think>.*</think> <answer>.*</answer>, over several lines or not."""
    body = text.strip()
    tagged = body.startswith("<think>") and body.endswith("</answer>")
    return tagged and _THINK_TO_ANSWER.search(body, len("<think>"), len(body) - len("</answer>")) is not None
