"""From a row to what a model is asked: the template around the problem, messages, and how long they are."""

import math
from collections.abc import Callable
from importlib.resources import files
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image

from fastrl.config import did_you_mean
from fastrl.data.rows import IMAGE, Row
from fastrl.types import ConfigError

Template = Callable[[str], str]
"""Problem -> what the user message says."""
PIXELS_PER_TOKEN = 28
"""Side of the square of pixels that is one token of Qwen2.5-VL; of Qwen3-VL it is 32."""


def template_names() -> list[str]:
    """Templates that ship with FastRL, named after the reward they go with."""
    return sorted(
        file.name.removesuffix(".jinja") for file in _shipped().iterdir() if file.name.endswith(".jinja")
    )


def template_text(name_or_path: str) -> str:
    """Return the text of a template: the name of a shipped one, or the path of a .jinja file.

    Raises:
        ConfigError: neither.
    """
    path = Path(name_or_path).expanduser()
    names = template_names()
    if name_or_path in names:
        return (_shipped() / f"{name_or_path}.jinja").read_text(encoding="utf-8")
    if path.suffix != ".jinja" or not path.is_file():
        raise ConfigError(
            f"template {name_or_path!r} is neither the path of a .jinja file nor one that ships with FastRL."
            f"{did_you_mean(name_or_path, names)} Shipped: {', '.join(names)}."
        )
    return path.read_text(encoding="utf-8")


def read_template(name_or_path: str) -> Template:
    """Read a template that puts instructions around `{{ content }}`, as EasyR1's format prompts do.

    Raises:
        ConfigError: no such template, or one that is not valid or does not use `content`.
    """
    # Sandboxed: a template comes with data from elsewhere.
    from jinja2 import StrictUndefined, TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    source = template_text(name_or_path)
    environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined, autoescape=False)
    try:
        template = environment.from_string(source)
        probe = "the problem of this template's check"
        uses_content = probe in template.render(content=probe)
    except TemplateError as error:
        raise ConfigError(
            f"template {name_or_path!r}: {error}. Only {{{{ content }}}} is given to it."
        ) from error
    if not uses_content:
        raise ConfigError(
            f"template {name_or_path!r} leaves out the problem. Write {{{{ content }}}} where it belongs."
        )
    return lambda content: str(template.render(content=content))


def messages(
    row: Row, template: Template | None, system: str | None, *, as_blocks: bool
) -> list[dict[str, Any]]:
    """The conversation that asks for a row's answer.

    Args:
        row: Its problem goes into the user message.
        template: Around the problem; None = the bare problem.
        system: System message; None = none.
        as_blocks: Contents are lists of blocks, for models that see images; else texts, `<image>` marks included.
    """
    chat = [] if system is None else [("system", system)]
    chat.append(("user", row.problem if template is None else template(row.problem)))
    return [{"role": role, "content": blocks(text) if as_blocks else text} for role, text in chat]


def blocks(text: str) -> list[dict[str, str]]:
    """Text with `<image>` marks as content blocks: {"type": "image"} for a mark, {"type": "text", "text"} between."""
    first, *rest = text.split(IMAGE)
    found = [{"type": "text", "text": first}] if first.strip() else []
    for part in rest:
        found.append({"type": "image"})
        if part.strip():
            found.append({"type": "text", "text": part.strip("\n")})
    return found


def image_tokens(width: int, height: int, max_pixels: int | None = None, side: int = PIXELS_PER_TOKEN) -> int:
    """Tokens of an image by the rule of Qwen's processors: sides rounded to `side`, then shrunk into `max_pixels`."""
    rows, columns = (max(1, round(length / side)) for length in (height, width))
    if max_pixels is not None and rows * columns * side * side > max_pixels:
        shrink = math.sqrt(height * width / max_pixels)
        rows, columns = (max(1, math.floor(length / shrink / side)) for length in (height, width))
    return rows * columns


def token_count(
    model: str | None = None,
    *,
    template: Template | None = None,
    system: str | None = None,
    max_pixels: int | None = None,
) -> Callable[[Row], int]:
    """Return a function that counts the tokens of a row's prompt.

    Args:
        model: Folder or hub name of a model: its own processor counts, exactly. None = the images alone, by Qwen's
            rule: a lower bound.
        template, system: Around the problem.
        max_pixels: Largest image for the model; larger ones are shrunk.
    """
    if model is None:
        return lambda row: sum(image_tokens(*_size(picture.read()), max_pixels) for picture in row.images)
    from transformers import AutoProcessor

    given = {} if max_pixels is None else {"max_pixels": max_pixels}
    processor: Any = AutoProcessor.from_pretrained(model, **given)

    def count(row: Row) -> int:
        asked = messages(row, template, system, as_blocks=bool(row.images))
        if not row.images:
            return len(processor.apply_chat_template(asked, add_generation_prompt=True, return_dict=False))
        rendered = processor.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
        images = [picture.decode() for picture in row.images]
        return len(processor(text=[rendered], images=images)["input_ids"][0])

    return count


def _size(data: bytes) -> tuple[int, int]:
    with Image.open(BytesIO(data)) as image:
        return image.size


def _shipped() -> Any:
    return files("fastrl.data") / "templates"
