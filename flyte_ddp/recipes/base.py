"""The base class of recipes. A recipe is a model with its data; it never sees a rank, a device or a
launcher.

This module and the built-in recipes import torch inside their methods. The agent of the ranks
only reads `defaults` and calls `prepare`, and the import of torch would cost it 3.5 s of processor
time that the ranks could use. Your own recipes may import anything at the top of the file; their
runs start a little later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from flyte_ddp.errors import ConfigError, DataError
from flyte_ddp.events import EpochFinished, Prediction, Reported

if TYPE_CHECKING:
    from torch import Size, Tensor, nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler
    from torch.utils.data import Dataset

    from flyte_ddp.config import TrainingConfig


IGNORED = -100  # target that torch's cross-entropy leaves out


class Recipe:
    """A model with its data. Define `prepare`, `datasets` and `model`; the rest has defaults for
    classification.

    Every method may be called in another process, so methods pass data to each other by files in
    `directory`, not by attributes.

    A recipe with options is a frozen dataclass with one field for each, of a type that JSON has.
    Users set them in the config by `{"recipe_options": {"field": value}}`; the methods read them as
    attributes.

    Example:
        class Majority(Recipe):
            def prepare(self, source, directory):
                torch.save(torch.randint(0, 2, (512, 7)).float(), directory / "bits.pt")
                return "512 random rows of seven bits"

            def datasets(self, directory):
                bits = torch.load(directory / "bits.pt")
                data = TensorDataset(bits, (bits.sum(dim=1) > 3).long())
                return TensorDataset(*data[:448]), TensorDataset(*data[448:])

            def model(self):
                return nn.Linear(7, 2)
    """

    defaults: ClassVar[Mapping[str, Any]] = {}
    """Defaults of this recipe for fields of `TrainingConfig`."""

    changeable_options: ClassVar[Sequence[str]] = ()
    """Options that change neither the model nor its training on the same data.

    A run resumes with other values of them.
    """

    prediction_schema: ClassVar[Any] = {}
    """Types of columns of `prediction_columns` by their names, such as {"label": "string", "box":
    "list<float32>"}: Arrow's names of types, or types of pyarrow.

    Any other column gets the type of its values in the first batch. Its numbers are float64.
    """

    slow_imports: ClassVar[Sequence[str]] = ()
    """Modules that the ranks import and that take seconds.

    A machine then imports them once for all of its ranks.
    """

    copies_from_first: ClassVar[bool] = False
    """Only the first rank builds all of a model that is sharded.

    The others call `model` inside `torch.device("meta")`, and get the weights block by block.
    """

    class_names: Sequence[str] = ()
    """Names of the classes in the order of the model's outputs; "0", "1", ... where empty."""

    def prepare(self, source: str, directory: Path) -> str:
        """Fetch and check the data, once per run, and write to `directory` the files that
        `datasets` reads.

        Args:
            source: the path or URL given by the user, or "" for the recipe's own data. Read it with
                `flyte_ddp.storage`, which has the task's credentials and retries.
            directory: an empty local directory. Every rank gets it, on other machines as a copy.

        Returns:
            A description of the data, for the log and the report.

        Raises:
            DataError: the data is missing, damaged or not of the right kind.

        Example:
            def prepare(self, source, directory):
                rows = numpy.loadtxt(io.BytesIO(read_file(source)), delimiter=",")
                numpy.save(directory / "rows.npy", rows)
                return f"{len(rows)} rows"
        """
        raise NotImplementedError

    def data_license(self, source: str) -> str:
        """Return the licence of the data that `prepare` reads from `source`, for the run card; ""
        where not known.

        Example:
            def data_license(self, source):
                if source:
                    return ""  # the user's own data
                return "CC BY 4.0"
        """
        return ""

    def datasets(self, directory: Path) -> tuple[Dataset[Any], Dataset[Any]]:
        """Return the training and the held-out data; each sample is an (input, target) pair.

        Input and target are tensors or numbers, or tuples, lists, dicts or dataclasses of them,
        nested. A batch has the same shape, of tensors whose first dimension is the batch.

        A `TensorDataset` is moved to the device as a whole if it fits, and batched there by index.
        Any other data set with `__len__` and `__getitem__` is read through a DataLoader. It may
        also have a method `prefetch(indices)`. The loader calls it with the samples of a batch
        before it reads them one by one. A class attribute `UNREADABLE` is the sample that
        replaces an unreadable one: the replacement keeps the place in the order, has weight 0,
        and is counted.

        Example:
            def datasets(self, directory):
                rows = torch.from_numpy(numpy.load(directory / "rows.npy")).float()
                data = TensorDataset(rows[:, :-1], rows[:, -1].long())
                split = len(data) * 9 // 10
                return TensorDataset(*data[:split]), TensorDataset(*data[split:])
        """
        raise NotImplementedError

    def model(self) -> nn.Module:
        """Return a model with fresh weights. The random generator is seeded before the call.

        `datasets` is called before on the same object, so it may set the number of classes.

        Example:
            def model(self):
                hidden = nn.Linear(4, 32)
                logits = nn.Linear(32, 3)
                return nn.Sequential(hidden, nn.ReLU(), logits)
        """
        raise NotImplementedError

    def initial_value(self, name: str, shape: Size) -> Tensor:
        """Return the fresh value of one parameter or buffer of the model, the same value that
        `model` gives it.

        Optional. With this method a sharded model is built inside `torch.device("meta")` and
        filled tensor by tensor, so that no rank ever holds the whole model. The random generator
        has been seeded as for `model`, but the order of the calls differs: derive a generator
        from `torch.initial_seed()` and the name.

        Example:
            def initial_value(self, name, shape):
                # `model` copies the same values into its parameters.
                if name.endswith("bias"):
                    return torch.zeros(shape)
                seed = torch.initial_seed() + zlib.crc32(name.encode())
                generator = torch.Generator().manual_seed(seed)
                return 0.02 * torch.randn(shape, generator=generator)
        """
        raise NotImplementedError

    def inputs(self, batch: Tensor) -> Tensor:
        """Convert a batch of `datasets` to the model's input, on the device; for example normalize
        it.

        By default images in bytes, (B, H, W) or (B, C, H, W), become floats in [0, 1] of shape (B,
        C, H, W).

        Example:
            def inputs(self, batch):
                images = batch.float() / 255
                mean, deviation = 0.29, 0.35
                return (images - mean) / deviation
        """
        import torch

        if not isinstance(batch, torch.Tensor) or batch.dtype != torch.uint8:
            return batch
        if batch.dim() == 3:
            batch = batch.unsqueeze(1)
        return batch.float().div_(255)

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of each sample, (B,): summed over the sample's targets, not averaged.

        By default it is the cross-entropy of logits (B, C) against classes (B,).

        Example:
            def losses(self, outputs, targets):
                return functional.cross_entropy(
                    outputs.float(), targets, reduction="none", label_smoothing=0.1
                )
        """
        from torch.nn import functional

        try:
            return functional.cross_entropy(outputs.float(), targets, reduction="none")
        except (IndexError, RuntimeError, TypeError):
            check_classes(outputs, targets)
            raise

    def num_correct(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the number of correctly predicted targets of each sample, (B,).

        Example:
            def num_correct(self, outputs, targets):
                best = outputs.topk(2, dim=1).indices
                return (best == targets.unsqueeze(1)).any(dim=1)
        """
        return outputs.argmax(dim=1) == targets

    def num_targets(self, targets: Tensor) -> Tensor | None:
        """Return the number of targets of each of the N samples, (N,); None for one each. Losses
        are means over these.

        It is called once with all targets of a `TensorDataset`, or with the targets of each batch
        that a DataLoader reads.

        Example:
            def num_targets(self, targets):
                is_word = targets != PADDING
                return is_word.sum(dim=1)
        """
        return None

    def optimizer_groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """Return the optimizer's parameter groups in the form of `torch.optim`, by default all
        parameters in one group.

        A group may have settings of its own, such as `{"params": [...], "weight_decay": 0.0}`. Its
        `lr`, by default the config's `learning_rate`, is the rate that the schedule scales, as
        `torch.optim.lr_scheduler.LambdaLR` does.

        Example:
            def optimizer_groups(self, model):
                matrices = [each for each in model.parameters() if each.dim() > 1]
                vectors = [each for each in model.parameters() if each.dim() <= 1]
                return [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        """
        return [{"params": list(model.parameters())}]

    def collate(self, samples: Sequence[Any], training: bool) -> tuple[Any, Any]:
        """Return the batch of these (input, target) pairs: inputs and targets.

        Optional; for example to pad samples of different lengths. The first dimension of the
        tensors is the batch. Other tensors, such as those of graphs, need `num_samples`. With
        `num_samples` the method may also leave samples out, and return None if it keeps none.

        A loader process calls it for each micro-batch. For held-out samples `training` is false,
        and for predicted samples each target is the sample's index. The random generators are
        seeded by the last sample.

        Example:
            def collate(self, samples, training):
                texts = [text for text, label in samples]
                labels = [label for text, label in samples]
                padded = pad_sequence(texts, batch_first=True, padding_value=PADDING)
                return padded, torch.tensor(labels)
        """
        raise NotImplementedError

    def num_samples(self, inputs: Any, targets: Any) -> int:
        """Return the number of samples of a batch that `collate` made.

        Optional; by default the number is the first dimension of the tensors. With this method
        the tensors may have any shape, and losses are means over the samples that the batches of
        all ranks have together.

        Example:
            def num_samples(self, inputs, targets):
                # A batch of graphs has one row for each node, and one target for each graph.
                return len(targets)
        """
        raise NotImplementedError

    def sampling_weights(self, dataset: Dataset[Any]) -> Any:
        """Return a number for each training sample, (N,): how often it is drawn, in proportion.

        Optional. With it an epoch is N draws with replacement, the same draws at any number of
        ranks. `dataset` is the training data of `datasets`, or the part that `sample_size` leaves.

        Example:
            def sampling_weights(self, dataset):
                labels = dataset.tensors[1]
                counts = torch.bincount(labels)
                return 1 / counts[labels]
        """
        raise NotImplementedError

    def optimizer(self, model: nn.Module, config: TrainingConfig) -> Optimizer:
        """Return an optimizer of the trained parameters of `model`, in place of the configured one.

        Optional. Return any optimizer of `torch.optim` that steps without a closure, or one of
        your own. With `fsdp` it must treat each value by itself. The argument `model` is the model
        that `model()` returned, with split parameters under `fsdp`. The method is also called for
        optimizers that are only tried, and with a model without contents, to measure the state. An
        optimizer with `train()` and `eval()` is switched around evaluations.

        Example:
            def optimizer(self, model, config):
                parameters = model.parameters()
                return torch.optim.Adagrad(parameters, lr=config.learning_rate)
        """
        raise NotImplementedError

    def schedule(
        self, optimizer: Optimizer, config: TrainingConfig, num_steps: int
    ) -> LRScheduler | Callable[[int], float]:
        """Return the schedule of the learning rates, in place of the configured one.

        Optional. The schedule is a scheduler of torch or a function. A scheduler takes a step
        after each optimizer step (`ReduceLROnPlateau` after each epoch, with the config's
        `monitor`). A function takes the optimizer step, from 0, and returns the factor of each
        group's own `lr`.

        Args:
            num_steps: optimizer steps of the whole run. A run whose scheduler depends on it does
                not resume with other `epochs`. A run with a function does.

        Example:
            def schedule(self, optimizer, config, num_steps):
                def linear_decay(step):
                    return 1 - step / num_steps

                return linear_decay
        """
        raise NotImplementedError

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        """Return the blocks that `model` repeats, such as the layers of a Transformer, in their
        order; none by default.

        They are the units in which a model is sharded.

        Example:
            def blocks(self, model):
                layers = [each for each in model if isinstance(each, nn.Linear)]
                return layers
        """
        return []

    def flops_per_sample(self, model: nn.Module) -> float:
        """Return the floating-point operations that training takes per sample, forward and
        backward; 0 for unknown.

        Where it is known, the report has the model FLOPs utilization.

        Example:
            def flops_per_sample(self, model):
                num_parameters = sum(each.numel() for each in model.parameters())
                # two for each weight in the forward pass, four in the backward pass
                return 6.0 * num_parameters
        """
        return 0.0

    def tokens_per_sample(self) -> int:
        """Return the tokens of a sample, padding included; 0 if samples have no fixed number.

        Where it is known, reports show the tokens seen, and `max_tokens` can end a run.

        Example:
            def tokens_per_sample(self):
                # The rows of `Packed` have a fixed length.
                return 512
        """
        return 0

    def metrics(self) -> Mapping[str, nn.Module | Callable[[Any, Any], Tensor]]:
        """Return the metrics of the held-out data by name; by default the accuracy, as
        `num_correct` counts it.

        Each metric is a `torchmetrics.Metric` or a function. The value of a `Metric` is one number
        or a dict of numbers. A function takes outputs and targets, and returns a value for each
        sample, (B,), summed over the sample's targets, as `losses`; the metric is the mean per
        target. Every metric is over all held-out samples, the same at any number of ranks. This
        method is called for each evaluation.

        Example:
            def metrics(self):
                def confidence(outputs, targets):
                    return outputs.softmax(dim=1).amax(dim=1)

                return {"accuracy": self.num_correct, "confidence": confidence}
        """
        return {"accuracy": self.num_correct}

    def metric_outputs(self, outputs: Any) -> Any:
        """Convert the model's outputs to what the metrics of torchmetrics compare with the targets;
        by default nothing.

        It is also the place for a sigmoid: torchmetrics guesses by each batch's values if they are
        probabilities.

        Example:
            def metric_outputs(self, outputs):
                probabilities = outputs.softmax(dim=1)
                return probabilities[:, 1]
        """
        return outputs

    def prepare_new_data(self, source: str, directory: Path) -> str:
        """Fetch and check new data, which may have no targets, for `predict_dataset`.

        By default it calls `prepare`, and it has the same arguments and return value.

        Example:
            def prepare_new_data(self, source, directory):
                rows = numpy.loadtxt(io.BytesIO(read_file(source)), delimiter=",")
                numpy.save(directory / "new_rows.npy", rows)
                return f"{len(rows)} rows without targets"
        """
        return self.prepare(source, directory)

    def predict_dataset(self, directory: Path) -> Dataset[Any]:
        """Return the inputs to predict, in their order and without targets; by default the inputs
        of the held-out data.

        It is called before `model`. If the recipe has no `class_names` by itself, they come from
        the model's state. The data set may have `key(index)`, a text or number that identifies a
        sample, such as the name of its file; by default it is the index.

        Example:
            def predict_dataset(self, directory):
                rows = numpy.load(directory / "new_rows.npy")
                return TensorDataset(torch.from_numpy(rows).float())
        """
        from torch.utils.data import TensorDataset

        _, held_out = self.datasets(directory)
        if isinstance(held_out, TensorDataset):
            return TensorDataset(held_out.tensors[0])
        return Mapped(held_out, take_input)  # type: ignore[return-value]

    def prediction_columns(self, outputs: Any) -> Mapping[str, Any]:
        """Return what is stored of the predictions of a batch, by the name of its column: a tensor
        or a list with a value for each sample.

        By default the columns are the `class` of logits (B, C) and its `probability`. Outputs are
        on the CPU, in single precision. All batches have the same columns, see
        `prediction_schema`.

        Example:
            def prediction_columns(self, outputs):
                probabilities = outputs.softmax(dim=1)
                best = probabilities.argmax(dim=1)
                return {"species": best, "scores": probabilities.tolist()}
        """
        import torch

        if not isinstance(outputs, torch.Tensor) or outputs.dim() != 2:
            raise ConfigError(
                f"{type(self).__name__}.prediction_columns: expected a method of the recipe's own, "
                "because the default is for logits (B, C)"
            )
        probability, number = outputs.softmax(dim=1).max(dim=1)
        names = list_class_names(self, outputs.shape[1])
        return {"class": [names[index] for index in number.tolist()], "probability": probability}

    def figures(self, epoch: EpochFinished) -> dict[str, float]:
        """Return further figures, by name, computed from the figures of a finished epoch; none by
        default.

        Example:
            def figures(self, epoch):
                gap = epoch.test_loss - epoch.train_loss
                return {"generalization_gap": gap}
        """
        return {}

    def on_step(self, step: Reported) -> None:
        """Do something with the figures of a step, by default nothing: rank 0 calls it at every
        `log_interval`.

        It may draw random numbers, because all draws of the training are seeded by their purpose.
        The other ranks wait for it. An exception becomes a warning.

        Example:
            def on_step(self, step):
                if step.values["gradient_norm"] > 100:
                    print(f"step {step.step}: the gradient is large")
        """

    def on_epoch(self, epoch: EpochFinished) -> None:
        """Do something with the figures of an epoch, as `on_step` with the figures of a step.

        Example:
            def on_epoch(self, epoch):
                with open("losses.csv", "a") as file:
                    print(epoch.epoch, epoch.train_loss, epoch.test_loss, sep=",", file=file)
        """

    def generate_sample(self, model: nn.Module) -> str:
        """Return a text that `model` generates, shown after each epoch; "" by default.

        Rank 0 calls it. If the model is sharded, all ranks call it, and each must call the model
        equally often.

        Example:
            def generate_sample(self, model):
                device = next(model.parameters()).device
                probabilities = model(torch.zeros(1, 4, device=device)).softmax(dim=1)
                letters = torch.multinomial(probabilities, 8, replacement=True)
                return "".join("abc"[letter] for letter in letters[0].tolist())
        """
        return ""

    def export(self, state: Mapping[str, Any], directory: Path) -> None:
        """Write files from which other programs load the model with this state dict, by default
        none.

        The files are kept beside the safetensors file with the whole state. Rank 0 calls this
        method, with tensors on the CPU.

        Args:
            directory: an empty directory. Files in its subdirectories, such as onnx/model.onnx,
                keep that relative name.

        Example:
            def export(self, state, directory):
                arrays = {name: value.numpy() for name, value in state.items()}
                numpy.savez(directory / "weights.npz", **arrays)
        """

    def report_samples(self, batch: Tensor, outputs: Tensor, targets: Tensor) -> list[Prediction]:
        """Return what the report shows of these held-out samples; all tensors are on the CPU.

        By default it shows the truth, the best guess and the score of every class, with the image
        if `batch` has bytes. It shows nothing unless outputs are logits (B, C) and targets are
        classes (B,).

        Example:
            def report_samples(self, batch, outputs, targets):
                guesses = outputs.argmax(dim=1).tolist()
                pairs = zip(targets.tolist(), guesses, strict=True)
                return [Prediction(str(truth), str(guess), scores={}) for truth, guess in pairs]
        """
        import torch

        has_tensors = isinstance(outputs, torch.Tensor) and isinstance(targets, torch.Tensor)
        if not has_tensors or outputs.dim() != 2 or targets.dim() != 1:
            return []
        if targets.is_floating_point():
            return []
        scores = outputs.float().softmax(dim=1)
        names = list_class_names(self, scores.shape[1])
        images = to_pngs(batch, len(targets))
        predictions = []
        for image, score, target in zip(images, scores, targets, strict=True):
            prediction = Prediction(
                truth=names[int(target)],
                guess=names[int(score.argmax())],
                scores=dict(zip(names, score.tolist(), strict=True)),
                image=image,
            )
            predictions.append(prediction)
        return predictions


class Mapped:
    """A data set that returns `function(sample, index)` in place of each sample.

    Data set and function are pickled for `data_workers`, so a module must define the function.
    """

    def __init__(self, dataset: Any, function: Callable[[Any, int], Any]) -> None:
        self.dataset, self.function = dataset, function
        for name in ("key", "prefetch", "describe_shards", "list_samples"):
            if hasattr(dataset, name):
                setattr(self, name, getattr(dataset, name))

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        sample = self.dataset[index]
        if sample is getattr(self.dataset, "UNREADABLE", self):
            name = index
            if hasattr(self, "key"):
                name = self.key(index)
            raise DataError(f"data: sample {name} cannot be read, and none is left out here")
        return self.function(sample, index)


def take_input(sample: Any, index: int) -> Any:
    """Return the input of an (input, target) pair."""
    return sample[0]


def list_class_names(recipe: Recipe, num_outputs: int = 0) -> list[str]:
    """Return the recipe's `class_names` as text. A recipe without names gets "0", "1", ... up to
    `num_outputs`.

    `class_names` may be numbers, an array, a dict of names and numbers, or a method that returns
    one of these.
    """
    found: Any = recipe.class_names
    if callable(found):
        found = found()
    if isinstance(found, Mapping):
        names_by_number = any(isinstance(each, str) for each in found.values())
        if names_by_number:
            found = list(found.values())
        else:
            numbers = found
            found = sorted(numbers, key=lambda name: numbers[name])
    if hasattr(found, "tolist"):
        found = found.tolist()
    return [str(name) for name in found or range(num_outputs)]


def check_classes(outputs: Any, targets: Any) -> None:
    """Check targets against the logits (B, C, ...) of a cross-entropy. Raises DataError if a target
    is not a class.

    On a GPU the cross-entropy itself ends the process some steps later, and its error does not
    name the target.
    """
    import torch

    if isinstance(targets, (list, tuple)) and targets and isinstance(targets[0], str):
        raise DataError(
            f"data: expected the numbers of classes as targets, got {targets[0]!r}: number the "
            "classes in a fixed order, such as by sorted(names).index(name)"
        )
    has_classes = (
        isinstance(outputs, torch.Tensor)
        and outputs.dim() > 1
        and isinstance(targets, torch.Tensor)
        and not targets.is_floating_point()
    )
    if not has_classes:
        return
    classes = targets.long()[targets.long() != IGNORED]
    if not len(classes):
        return
    lowest, highest = (int(each) for each in classes.aminmax())
    if lowest < 0:
        wrong = lowest
    elif highest >= outputs.shape[1]:
        wrong = highest
    else:
        return
    raise DataError(
        f"data: expected classes from 0 to {outputs.shape[1] - 1} as targets, because the "
        f"model has {outputs.shape[1]} outputs, got {wrong}: "
        "number the classes from 0, or give the model an output for each"
    )


def to_pngs(batch: Any, num_samples: int) -> list[bytes]:
    """Return each sample of a batch as `to_png` does; b"" for each if `batch` is not a tensor of
    samples.
    """
    import torch

    if isinstance(batch, torch.Tensor) and len(batch) == num_samples:
        return [to_png(sample) for sample in batch]
    return [b""] * num_samples


def to_png(sample: Tensor) -> bytes:
    """Return `sample` as a PNG if it is an image in bytes, (H, W) or (1 or 3, H, W); else b""."""
    import io

    import torch
    from PIL import Image

    if sample.dtype != torch.uint8 or sample.dim() not in (2, 3):
        return b""
    if sample.dim() == 3 and sample.shape[0] == 1:
        sample = sample[0]
    elif sample.dim() == 3:
        sample = sample.permute(1, 2, 0)
    file = io.BytesIO()
    Image.fromarray(sample.contiguous().numpy()).save(file, "PNG")
    return file.getvalue()
