"""Encode the pictures of a user's program for those who watch its run. Imports no torch."""

from __future__ import annotations

import io
from typing import Any

from flyte_ddp.errors import ConfigError

MAX_SIDE = 1024  # pixels
MAX_BYTES = 256 << 10  # the largest PNG; larger pictures are scaled down


def encode_picture(picture: Any) -> bytes:
    """Return a PNG of a figure of matplotlib, an image of PIL, or an array or tensor, (H, W),
    (H, W, C) or (C, H, W) with C of 1, 3 or 4: bytes, or floats in [0, 1].

    Raises:
        ConfigError: it is none of these.
    """
    from PIL import Image

    if hasattr(picture, "savefig"):
        figure = io.BytesIO()
        picture.savefig(figure, format="png", bbox_inches="tight")
        picture = Image.open(figure)
    image = picture
    if not isinstance(picture, Image.Image):
        image = _to_image(picture)
    if image.mode in ("P", "PA"):
        image = image.convert("RGBA")
    if image.mode not in ("1", "L", "LA", "RGB", "RGBA"):
        image = image.convert("RGB")
    side = MAX_SIDE
    while True:
        smaller, file = image.copy(), io.BytesIO()
        smaller.thumbnail((side, side))
        smaller.save(file, "PNG")
        if file.tell() <= MAX_BYTES:
            return file.getvalue()
        side = 3 * min(side, *smaller.size) // 4


def _to_image(picture: Any) -> Any:
    """Return an image of PIL made of an array. Raises as `encode_picture`."""
    import numpy as np
    from PIL import Image

    try:
        if hasattr(picture, "detach"):
            picture = picture.detach().cpu()
        array = np.asarray(picture)
        if not array.size:
            raise ValueError("it is empty")
        if array.ndim == 3 and array.shape[0] in (1, 3, 4) and array.shape[2] not in (1, 3, 4):
            array = np.moveaxis(array, 0, 2)
        if array.dtype.kind in "bf":
            array = 255 * np.nan_to_num(array.astype(np.float32))
        array = np.clip(array, 0, 255).astype(np.uint8)
        if array.shape[2:] == (1,):
            array = array[:, :, 0]
        return Image.fromarray(array)
    except (TypeError, ValueError, IndexError) as error:
        raise ConfigError(
            "session.show: expected a figure of matplotlib, an image of PIL, or an array (H, W), "
            f"(H, W, C) or (C, H, W), got {type(picture).__name__}: {error}"
        ) from error
