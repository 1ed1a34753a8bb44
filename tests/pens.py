"""A drawing pen that remembers what it drew."""

from fastrl.data.diagrams import FONT, SIZE


class Recorder:
    """Stands in for a drawing pen: passes everything on, remembers lines and where labels ended up."""

    def __init__(self, draw):
        self.draw, self.labels, self.lines = draw, {}, []

    def __getattr__(self, name):
        return getattr(self.draw, name)

    def line(self, points, **how):
        self.lines.append(points)
        self.draw.line(points, **how)

    def text(self, position, text, **how):
        box = self.draw.textbbox(position, text, font=FONT)
        assert 0 <= min(box) <= max(box) <= SIZE, (text, box)
        self.labels.setdefault(text, []).append(((box[0] + box[2]) / 2, (box[1] + box[3]) / 2))
        self.draw.text(position, text, **how)

    @property
    def numbers(self):
        """The numbers in the picture with their places, from top to bottom."""
        found = [
            (place, int(text)) for text, places in self.labels.items() if text != "x" for place in places
        ]
        return sorted(found, key=lambda item: item[0][1])
