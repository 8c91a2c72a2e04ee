"""Drawn images of four shapes, for a recipe of images without data from the user."""

from __future__ import annotations

import random
from pathlib import Path

SIZE = 64  # pixels per side
NUM_TRAIN, NUM_HELD_OUT = 60, 20  # images of each class
SEED = 0
# hue in degrees, and number of sides
SHAPES = {"circle": (0, 40), "pentagon": (90, 5), "square": (180, 4), "triangle": (270, 3)}


def draw_images(directory: Path) -> None:
    """Write `train` and `val`, each with a folder of PNGs for each class. Every call writes the
    same files.

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
                x, y = draws.uniform(0.38, 0.62) * SIZE, draws.uniform(0.38, 0.62) * SIZE
                radius = draws.uniform(0.2, 0.32) * SIZE
                angle = draws.uniform(0, 360)
                shade = (hue + draws.randint(-30, 30)) % 360
                saturation, lightness = draws.randint(40, 90), draws.randint(45, 75)
                colour = ImageColor.getrgb(f"hsl({shade}, {saturation}%, {lightness}%)")
                brush.regular_polygon((x, y, radius), num_sides, angle, colour)
                image.save(folder / f"{number:03d}.png")
