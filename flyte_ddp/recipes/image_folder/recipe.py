"""Recipe `image_folder`: transfer learning on a directory with a folder of images for each class,
at any fsspec URL.

`prepare` lists the images and writes an index of them. The images are read from the URL, sample by
sample, so on a cluster every node must reach the URL.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import re
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from flyte_ddp.config.fields import field, validate
from flyte_ddp.data.readers import KEY, Fields
from flyte_ddp.data.shards import Shards
from flyte_ddp.data.splits import describe_splits, open_splits, read_note
from flyte_ddp.errors import ConfigError
from flyte_ddp.events import Prediction
from flyte_ddp.recipes.base import Recipe
from flyte_ddp.recipes.contents import report_left_out
from flyte_ddp.recipes.image_folder import shapes
from flyte_ddp.recipes.image_folder.files import (
    FileReader,
    UnreadableImage,
    decode_image,
    list_images,
    open_storage,
)
from flyte_ddp.recipes.image_folder.index import ImageList, read_index, split_images, write_index
from flyte_ddp.recipes.image_folder.models import build_model, check_architecture
from flyte_ddp.recipes.image_folder.shards import CLASS

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.utils.data import Dataset

IMAGE_SIZE = 224  # pixels; torchvision's weights were trained with this size
# ImageNet's statistics, which torchvision's weights expect
MEAN, STANDARD_DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
# share of an image's area; torchvision's 0.08 is for long trainings from fresh weights
CROP_SCALE = (0.35, 1.0)
MAX_ASPECT = 16  # largest ratio of the sides of an image that is resized whole
# A prediction in the report has so many pixels per side, and so many of the likeliest classes.
SHOWN_SIZE, SHOWN_SCORES = 64, 10
OWN_IMAGES = "images"  # directory of the drawn images in the prepared data
SHARDS = "shards.json"  # file that replaces the index of images if the data are shards

logger = logging.getLogger(__name__)


@dataclass
class ImageFolder(Recipe):
    """A torchvision model with a new last layer on the user's images. Raises ConfigError for an
    option out of bounds.
    """

    # name of a classification model in torchvision, such as mobilenet_v3_small or vit_b_16
    architecture: str = "resnet18"
    # layers that are trained: all, or head (the last one)
    trainable: str = field("all", choices=("all", "head"))
    # pixels of a side that the model sees; 0: 64 for drawn images, 224 for all others
    image_size: int = field(0, minimum=0)
    augment: bool = True  # crop and flip training images randomly
    # share of the images that is held out if there is no directory of held-out images
    held_out: float = field(0.2, above=0, below=1)
    min_images: int = field(2, minimum=1)  # training images that each class must have
    # An unreadable image fails the run, or (skip) keeps its place with weight 0.
    unreadable: str = field("fail", choices=("fail", "skip"))
    # True reads public buckets without credentials; otherwise they come from the environment.
    anonymous: bool = False
    # size of a machine's copies of shards; 0: 64 or half of the free space on the disk
    cache_gib: float = field(0.0, minimum=0)

    changeable_options = ("min_images", "anonymous", "cache_gib")
    defaults = {
        "epochs": 5,
        "global_batch_size": 32,
        "evaluation_batch_size": 64,
        "learning_rate": 1e-3,
        "weight_decay": 1e-4,
        "schedule": "one_cycle",
        "data_workers": 2,
    }

    def __post_init__(self) -> None:
        validate(self, "recipe_options.")
        patch = 1  # The side of an image must be a multiple of so many pixels.
        transformer = re.fullmatch(r"vit_[a-z]_(\d+)", self.architecture)
        if transformer:
            patch = int(transformer[1])
        if self.image_size % patch:
            raise ConfigError(
                f"recipe_options.image_size: expected a multiple of {patch}, got {self.image_size}"
            )

    def prepare(self, source: str, directory: Path) -> str:
        """Write the index of the images, with each image's class and split.

        Args:
            source: a directory or URL. It contains either folders such as `train` and `val`, or the
                classes' folders themselves, or the shards that `flyte-ddp shards` wrote from these.
                If it contains classes' folders, a share of the images is held out. "" draws images
                of four shapes.
        """
        check_architecture(self.architecture)
        classes = self._read_classes(source)
        if classes:
            return self._prepare_shards(source, classes, directory)
        if source:
            url, files, others = list_images(source, self.anonymous)
            image_size, how = IMAGE_SIZE, f"read from {url}"
        else:
            shapes.draw_images(directory / OWN_IMAGES)
            _, drawn, others = list_images(str(directory / OWN_IMAGES))
            # The time of the drawing must not count as another version of the images.
            files = [dataclasses.replace(file, version="") for file in drawn]
            url, image_size, how = OWN_IMAGES, shapes.SIZE, "drawn here"
        train, test, description = split_images(
            source or OWN_IMAGES, files, others, self.held_out, self.min_images
        )
        write_index(directory, url, self.image_size or image_size, train, test)
        return f"{description}, {how}{report_left_out(others)}"

    def _read_classes(self, source: str) -> list[str]:
        """Return the names of the classes of shards; empty if the source has no such shards."""
        if not source:
            return []
        note = read_note(open_storage(source, self.anonymous))
        return list(note.get("classes", []))

    def _prepare_shards(self, source: str, classes: list[str], directory: Path) -> str:
        if self.anonymous:
            raise ConfigError(
                f"recipe_options.anonymous: expected false, because {source} has shards, got true"
            )
        facts, description = describe_splits(open_storage(source, False))
        note = {**facts, "classes": classes, "image_size": self.image_size or IMAGE_SIZE}
        (directory / SHARDS).write_text(json.dumps(note), encoding="utf-8")
        return f"{description}: images of {len(classes):,} classes"

    def prepare_new_data(self, source: str, directory: Path) -> str:
        """Write the index of the images, in folders or not. "" draws images as `prepare`. If the
        data are shards, the held-out images are predicted.
        """
        if not source or self._read_classes(source):
            return self.prepare(source, directory)
        check_architecture(self.architecture)
        url, files, others = list_images(source, self.anonymous)
        images = [("", file) for file in files]  # New images have no classes.
        write_index(directory, url, self.image_size or IMAGE_SIZE, [], images)
        return f"{len(files):,} images, read from {url}{report_left_out(others)}"

    def datasets(self, directory: Path) -> tuple[Dataset[Any], Dataset[Any]]:
        """Return the images in bytes, (3, S, S), and the numbers of their classes."""
        if (directory / SHARDS).exists():
            note = json.loads((directory / SHARDS).read_text(encoding="utf-8"))
            self.class_names, self._image_size = note["classes"], note["image_size"]
            unreadable = "fail"
            if self.unreadable == "skip":
                unreadable = "ignore"
            return open_splits(  # type: ignore[return-value]
                note["url"],
                ToSample(self._image_size, self.augment),
                ToSample(self._image_size, False),
                unreadable=unreadable,
                cache_gib=self.cache_gib or None,
            )
        index = read_index(directory)
        self.class_names = index.classes or self.class_names
        self._image_size = index.image_size  # `model` reads it.
        if index.url == OWN_IMAGES:
            reader = FileReader(str(directory / OWN_IMAGES))
        else:
            reader = FileReader(index.url, self.anonymous)
        # A prediction leaves no image out.
        skips = self.unreadable == "skip" and bool(index.classes)
        train = Images(index.train, reader, index.image_size, self.augment, skips)
        test = Images(index.test, reader, index.image_size, False, skips)
        return train, test  # type: ignore[return-value]

    def model(self) -> nn.Module:
        """Return the architecture with a last layer for the classes, which `datasets` must have
        found before.
        """
        model, head = build_model(self.architecture, len(self.class_names), self._image_size)
        if self.trainable == "head":
            for name, parameter in model.named_parameters():
                parameter.requires_grad = name.startswith(f"{head}.")
        return model

    def inputs(self, batch: Tensor) -> Tensor:
        pixels = super().inputs(batch)
        mean, deviation = (
            pixels.new_tensor(values).view(3, 1, 1) for values in (MEAN, STANDARD_DEVIATION)
        )
        return pixels.sub_(mean).div_(deviation)

    def report_samples(self, batch: Tensor, outputs: Tensor, targets: Tensor) -> list[Prediction]:
        """Return the default predictions with smaller images and only the likeliest classes, as the
        report needs.
        """
        from torch.nn import functional

        if batch.shape[-1] > SHOWN_SIZE:
            small = functional.interpolate(
                batch.float(), size=SHOWN_SIZE, mode="bilinear", antialias=True
            )
            batch = small.round_().clamp_(0, 255).to(batch.dtype)
        return [
            dataclasses.replace(shown, scores=dict(Counter(shown.scores).most_common(SHOWN_SCORES)))
            for shown in super().report_samples(batch, outputs, targets)
        ]


@dataclass(eq=False)
class Images:
    """One split as samples: (image in bytes (3, S, S), number of its class).

    An image that cannot be read is an error. With `skips` it keeps its place with weight 0.
    """

    images: ImageList
    reader: FileReader
    image_size: int
    augments: bool
    skips: bool
    UNREADABLE: ClassVar[object] = Shards.UNREADABLE  # see `Recipe.datasets`
    _ahead: dict[int, Future[bytes]] = dataclasses.field(default_factory=dict, init=False)
    # skipped samples that this process has logged
    _told: set[int] = dataclasses.field(default_factory=set, init=False)

    def __len__(self) -> int:
        return len(self.images)

    def key(self, sample: int) -> str:
        """Return the name of the image's file, relative to the data's URL."""
        return self.images.file(sample).name

    def prefetch(self, indices: Sequence[int]) -> None:
        """Begin to read the samples of the next calls of `__getitem__`, several at once."""
        self._ahead = {sample: self.reader.begin(self.images.file(sample)) for sample in indices}

    def __getitem__(self, sample: int) -> Any:
        file, future = self.images.file(sample), self._ahead.pop(sample, None)
        try:
            if future:
                contents = future.result()
            else:
                contents = self.reader.read(file)
            image = self.reader.decode(file, contents)
        except UnreadableImage as error:
            if not self.skips:
                raise
            if sample not in self._told:
                self._told.add(sample)
                logger.warning("%s; it keeps its place, with weight 0", error)
            return self.UNREADABLE
        tensor = to_tensor(image, self.image_size, self.augments)
        return tensor, int(self.images.labels[sample])


@dataclass(frozen=True)
class ToSample:
    """Turns a record of shards into a sample like the samples of `Images`."""

    image_size: int
    augments: bool

    def __call__(self, fields: Fields) -> tuple[Tensor, int]:
        contents = next(fields[name] for name in fields if name not in (KEY, CLASS))
        tensor = to_tensor(decode_image(contents), self.image_size, self.augments)
        return tensor, int(fields[CLASS])


def to_tensor(image: Any, size: int, augments: bool) -> Tensor:
    """Return a decoded image in bytes, (3, size, size). `augments` crops and flips at random."""
    from torchvision import transforms

    if augments:
        image = transforms.RandomHorizontalFlip()(
            transforms.RandomResizedCrop(size, CROP_SCALE)(image)
        )
    else:
        # The crop keeps seven eighths of the shorter side, as torchvision's own evaluation does.
        # Only the middle of a very long image is resized: a whole image of 3 x 6,000 pixels would
        # become 256 x 512,000.
        longest = MAX_ASPECT * min(image.size)
        if max(image.size) > longest:
            image = transforms.CenterCrop([min(side, longest) for side in reversed(image.size)])(
                image
            )
        image = transforms.CenterCrop(size)(transforms.Resize(size * 8 // 7)(image))
    tensor: Tensor = transforms.PILToTensor()(image)
    return tensor
