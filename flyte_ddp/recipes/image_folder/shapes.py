"""Drawn images of four shapes, for a recipe of images without data from the user."""

from __future__ import annotations

import random
from pathlib import Path

SIZE = 64  # pixels, of each side
NUM_TRAIN, NUM_HELD_OUT = 60, 20  # images of each class
SEED = 0


def draw_images(directory: Path) -> None:
    """Write `train` and `val`, each with a folder of PNGs for each class; the same files every
    time.

    Each class has a shape and a hue, so a few epochs are enough to learn them. Shade, size,
    position, angle, background and specks are random for each image.
    """
    from PIL import Image, ImageColor, ImageDraw

    # Hue in degrees, and corners around (0, 0) at a distance of about 1; the circle is a polygon
    # too.
    classes = {
        "circle": (0, _polygon(40, 0.9)),
        "cross": (
            90,
            [
                *((-0.3, -1), (0.3, -1), (0.3, -0.3), (1, -0.3), (1, 0.3), (0.3, 0.3)),
                *((0.3, 1), (-0.3, 1), (-0.3, 0.3), (-1, 0.3), (-1, -0.3), (-0.3, -0.3)),
            ],
        ),
        "square": (180, _polygon(4, 1.1)),
        "triangle": (270, _polygon(3, 1.1)),
    }
    for split, count in (("train", NUM_TRAIN), ("val", NUM_HELD_OUT)):
        for name, (hue, points) in classes.items():
            folder = directory / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                draws = random.Random(f"{SEED} {split} {name} {number}")
                image = Image.new(
                    "RGB", (SIZE, SIZE), tuple(draws.randrange(0, 110) for _ in range(3))
                )
                brush = ImageDraw.Draw(image)
                for _ in range(60):  # specks
                    colour = ImageColor.getrgb(f"hsl({draws.randrange(360)}, 60%, 70%)")
                    brush.point((draws.randrange(SIZE), draws.randrange(SIZE)), colour)
                shade = (
                    (hue + draws.randint(-30, 30)) % 360,
                    draws.randint(40, 90),
                    draws.randint(45, 75),
                )
                brush.polygon(
                    _place(points, draws), ImageColor.getrgb("hsl({}, {}%, {}%)".format(*shade))
                )
                image.save(folder / f"{number:03d}.png")


def _polygon(num_corners: int, radius: float) -> list[tuple[float, float]]:
    import cmath

    turns = (
        cmath.rect(radius, 2 * cmath.pi * corner / num_corners) for corner in range(num_corners)
    )
    return [(turn.real, turn.imag) for turn in turns]


def _place(points: list[tuple[float, float]], draws: random.Random) -> list[tuple[float, float]]:
    import cmath

    turn = cmath.rect(draws.uniform(0.2, 0.32) * SIZE, draws.uniform(0, 2 * cmath.pi))
    centre = complex(draws.uniform(0.38, 0.62) * SIZE, draws.uniform(0.38, 0.62) * SIZE)
    placed = (centre + turn * complex(*point) for point in points)
    return [(point.real, point.imag) for point in placed]
