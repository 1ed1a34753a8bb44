"""The process behind `fastrl.rewards.engine`: math-verify over JSON lines on stdin and stdout.

It may hang on a hostile expression: then it is killed, and nobody else waits. LaTeX is parsed by a grammar; the parsers
of plain text, which would evaluate what they read, are not used.
"""

import json
import sys
from typing import Any


def compare(prediction: str | None, gold: str) -> str:
    """Return unparsable_gold, unparsable_prediction, right or wrong; without a prediction the first or wrong."""
    from math_verify import LatexExtractionConfig, parse, verify

    def parsed(text: str) -> list[Any]:
        settings: dict[str, Any] = {"fallback_mode": "no_fallback", "parsing_timeout": None}
        return parse(f"${text}$", extraction_config=[LatexExtractionConfig()], **settings)

    meant = parsed(gold)
    if not meant:
        return "unparsable_gold"
    if prediction is None:
        return "wrong"
    said = parsed(prediction)
    if not said:
        return "unparsable_prediction"
    return "right" if verify(meant, said, timeout_seconds=None) else "wrong"


def main() -> None:
    import logging

    import math_verify  # noqa: F401  (before the first question, whose time is limited)

    logging.disable(logging.CRITICAL)  # what it cannot parse is our answer, not news
    compare("1", "1")
    print("ready", flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        print(compare(question["prediction"], question["gold"]), flush=True)


if __name__ == "__main__":
    main()
