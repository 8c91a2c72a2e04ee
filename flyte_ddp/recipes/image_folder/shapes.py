"""Drawn images of four shapes, for a recipe of images without data from the user."""

from __future__ import annotations

import random
from pathlib import Path

SIZE = 64  # pixels, of each side
NUM_TRAIN, NUM_HELD_OUT = 60, 20  # images of each class
SEED = 0
# hue in degrees, and sides
SHAPES = {"circle": (0, 40), "pentagon": (90, 5), "square": (180, 4), "triangle": (270, 3)}


def draw_images(directory: Path) -> None:
    """Write `train` and `val`, each with a folder of PNGs for each class; the same files every
    time.

    Each class has a shape and a hue, so a few epochs are enough to learn them. Shade, size,
    position, angle, background and specks are random for each image.
    """
    from PIL import Image, ImageColor, ImageDraw

    for split, count in (("train", NUM_TRAIN), ("val", NUM_HELD_OUT)):
        for name, (hue, num_sides) in SHAPES.items():
            folder = directory / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                draws = random.Random(f"{SEED} {split} {name} {number}")
                background = tuple(draws.randrange(0, 110) for _ in range(3))
                image = Image.new("RGB", (SIZE, SIZE), background)
                brush = ImageDraw.Draw(image)
                for _ in range(60):  # specks
                    colour = ImageColor.getrgb(f"hsl({draws.randrange(360)}, 60%, 70%)")
                    brush.point((draws.randrange(SIZE), draws.randrange(SIZE)), colour)
                brush.regular_polygon(
                    tuple(
                        draws.uniform(low, high) * SIZE
                        for low, high in ((0.38, 0.62), (0.38, 0.62), (0.2, 0.32))
                    ),
                    num_sides,
                    draws.uniform(0, 360),
                    ImageColor.getrgb(
                        f"hsl({(hue + draws.randint(-30, 30)) % 360}, {draws.randint(40, 90)}%, "
                        f"{draws.randint(45, 75)}%)"
                    ),
                )
                image.save(folder / f"{number:03d}.png")
