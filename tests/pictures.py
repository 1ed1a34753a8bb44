"""Small pictures for tests of data."""

import io

from PIL import Image, ImageDraw


def line_png(colour: int, size: tuple[int, int] = (40, 30)) -> bytes:
    """A PNG file: white paper with a line across, of one shade of red for each colour."""
    image = Image.new("RGB", size, "white")
    ImageDraw.Draw(image).line((0, 0, *size), fill=(colour, 0, 0), width=3)
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()
