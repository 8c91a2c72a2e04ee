"""Draw images of four shapes: the data of recipe `image_folder` when the user names no source."""

from __future__ import annotations

import random
from pathlib import Path

SIZE = 64  # pixels per side
IMAGES_PER_CLASS = {"train": 60, "val": 20}  # number of images, by split
NUM_SPECKS = 60  # coloured pixels in the background of each image
SEED = 0
# By class: hue in degrees, and number of sides. A polygon with 40 sides looks like a circle.
SHAPES = {"circle": (0, 40), "pentagon": (90, 5), "square": (180, 4), "triangle": (270, 3)}


def draw_images(directory: Path) -> None:
    """Write `train` and `val`, each with a folder of PNGs for each class, to an empty `directory`.
    Every call draws the same images.

    Each class has a shape and a hue, so a model learns them in a few epochs. The exact hue, the
    brightness, size, position, angle, background and specks are random for each image.
    """
    from PIL import Image, ImageColor, ImageDraw

    for split, count in IMAGES_PER_CLASS.items():
        for name, (class_hue, num_sides) in SHAPES.items():
            folder = directory / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                rng = random.Random(f"{SEED} {split} {name} {number}")
                background = tuple(rng.randrange(0, 110) for _ in range(3))
                image = Image.new("RGB", (SIZE, SIZE), background)
                canvas = ImageDraw.Draw(image)
                for _ in range(NUM_SPECKS):
                    colour = ImageColor.getrgb(f"hsl({rng.randrange(360)}, 60%, 70%)")
                    canvas.point((rng.randrange(SIZE), rng.randrange(SIZE)), colour)
                x, y = rng.uniform(0.38, 0.62) * SIZE, rng.uniform(0.38, 0.62) * SIZE
                radius = rng.uniform(0.2, 0.32) * SIZE
                angle = rng.uniform(0, 360)
                hue = (class_hue + rng.randint(-30, 30)) % 360
                saturation, lightness = rng.randint(40, 90), rng.randint(45, 75)
                colour = ImageColor.getrgb(f"hsl({hue}, {saturation}%, {lightness}%)")
                canvas.regular_polygon((x, y, radius), num_sides, angle, colour)
                image.save(folder / f"{number:03d}.png")
