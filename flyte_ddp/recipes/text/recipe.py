"""Recipe `text`: a language model on text of the user's own, or on the reference topics that come with Python.

The losses of a run are in nats per token. Beside them stand nats per byte, which compare between tokenizers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flyte_ddp.config.extras import require
from flyte_ddp.config.fields import field, validate
from flyte_ddp.errors import ConfigError
from flyte_ddp.events import EpochFinished, Prediction
from flyte_ddp.recipes.base import Recipe
from flyte_ddp.storage import has_password, redact_url

if TYPE_CHECKING:
    from torch import Size, Tensor, nn
    from torch.utils.data import Dataset

    from flyte_ddp.recipes.text.shards import Facts
    from flyte_ddp.recipes.text.tokens import Tokenizer

SAMPLE_TOKENS, SAMPLE_TEMPERATURE, SAMPLE_TOP_P = 200, 0.8, 0.95  # of the text shown after each epoch
SHOWN_TOKENS, SHOWN_SCORES = 24, 10  # of a prediction in the report


@dataclass
class Text(Recipe):
    """A decoder-only Transformer that predicts each token of a text from those before it.

    Samples are windows of `context` tokens, in the type in which the files have them, both (T,); targets are the inputs
    shifted by one. All windows have as many targets, so each counts as one, and its loss is the mean over its tokens.

    Raises:
        ConfigError: an option lies outside the limits given beside it.
    """

    layers: int = field(4, minimum=1)
    width: int = field(128, minimum=2)  # of the residual stream; a multiple of 2 x heads
    heads: int = field(4, minimum=1)  # of attention in each layer
    context: int = field(128, minimum=1)  # tokens that the model sees at once: the window of a sample
    dropout: float = field(0.0, minimum=0, below=1)
    tokens: str = field("bytes", choices=("bytes", "bpe"))  # bpe: byte-pair encoding, trained on the data
    vocabulary: int = field(4096, minimum=300, maximum=32_768)  # tokens of a bpe, of which files have 16 bits
    vocabulary_of: str = field("")  # path or URL of a model state whose bpe is used instead of a new one
    held_out: float = field(0.1, above=0, below=1)  # share of the documents
    separator: str = field("")  # between two documents in a text file; "" makes each file a document
    files: str = field("")  # pattern of the names of files in a directory, such as "*.py"; "" for text and Parquet
    column: str = field("text")  # of Parquet files
    prompt: str = field("")  # beginning of the text shown after each epoch

    changeable_options = ("prompt", "vocabulary_of")  # the tokenizer is part of the data
    defaults = {
        "epochs": 3,
        "global_batch_size": 16,
        "evaluation_batch_size": 32,
        "learning_rate": 3e-3,
        "weight_decay": 0.1,
        "warmup_steps": 50,
        "gradient_clip_norm": 1.0,
    }

    def __post_init__(self) -> None:
        validate(self, "recipe_options.")
        if self.width % (2 * self.heads):
            raise ConfigError(
                f"recipe_options.width: expected a multiple of {2 * self.heads} (2 x heads), got {self.width}"
            )
        if self.vocabulary_of and (self.tokens != "bpe" or has_password(self.vocabulary_of)):
            raise ConfigError(
                'recipe_options.vocabulary_of: expected a URL without a password, and {"tokens": "bpe"} with it, got '
                f"{redact_url(self.vocabulary_of)!r} and tokens {self.tokens!r}"
            )
        # Set by `datasets` for `model` and the figures.
        self._facts: Facts | None = None

    def prepare(self, source: str, directory: Path) -> str:
        """Tokenize the text into `train.bin` and `held_out.bin`.

        Args:
            source: path or URL of a file or a directory with text, packed with gzip or not, or Parquet; "" for the
                topics that come with Python.
        """
        if self.tokens == "bpe":
            require("recipe_options.tokens", "tokenizers")
        from flyte_ddp.recipes.text.corpus import Corpus
        from flyte_ddp.recipes.text.shards import prepare_shards, sample_texts
        from flyte_ddp.recipes.text.tokens import load_tokenizer, make_tokenizer, train_bpe

        corpus = Corpus(source, self.separator, self.files, self.column)
        if self.tokens == "bytes":
            tokenizer = make_tokenizer("")
        elif self.vocabulary_of:
            tokenizer = load_tokenizer(self.vocabulary_of)
        else:
            tokenizer = train_bpe(sample_texts(corpus, self.held_out), self.vocabulary)
        return prepare_shards(corpus, directory, tokenizer, self.held_out, self.context)

    def data_license(self, source: str) -> str:
        return "" if source else "PSF-2.0"  # Python's documentation

    def adapt_to(self, initial_state: str) -> Text:
        """Return the recipe with the vocabulary of the model with this state, unless one is named."""
        if self.tokens != "bpe" or self.vocabulary_of:
            return self
        return dataclasses.replace(self, vocabulary_of=initial_state)

    def datasets(self, directory: Path) -> tuple[Dataset[Any], Dataset[Any]]:
        import warnings

        import torch
        from torch.utils.data import TensorDataset

        from flyte_ddp.recipes.text.shards import HELD_OUT, TRAIN, read_facts, read_windows

        self._facts = read_facts(directory)
        tokenizer = self._tokenizer()

        def load(file: str) -> TensorDataset:
            windows = read_windows(directory / file, tokenizer, self.context)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="The given NumPy array is not writable")  # nobody writes
                return TensorDataset(*map(torch.from_numpy, windows))

        return load(TRAIN), load(HELD_OUT)

    def model(self) -> nn.Module:
        """Return the Transformer for the vocabulary of the data, which `datasets` must have read before.

        Its weights are a function of the random generator's seed. Inside `torch.device("meta")` it has none.
        """
        import torch

        from flyte_ddp.recipes.text.model import Shape, TextModel

        tokenizer = self._tokenizer()
        shape = Shape(tokenizer.size, self.context, self.layers, self.width, self.heads)
        device = torch.get_default_device()
        with torch.device("meta"):  # whose modules draw no weights that are then drawn again
            model = TextModel(shape, self.dropout, tokenizer.definition)
        model.to_empty(device=device)
        model.reset_parameters(torch.initial_seed())
        return model

    def initial_value(self, name: str, shape: Size) -> Tensor:
        import torch

        from flyte_ddp.recipes.text.model import initial_value

        return initial_value(name, shape, self.layers, torch.initial_seed())

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        return list(model.get_submodule("blocks").children())

    def optimizer_groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """Return the matrices, which decay, and the embedding and the norms, which do not."""
        decays = {
            name: parameter.dim() > 1 and name != "embedding.weight" for name, parameter in model.named_parameters()
        }
        parameters = dict(model.named_parameters())
        return [
            {"params": [parameters[name] for name in parameters if decays[name]]},
            {"params": [parameters[name] for name in parameters if not decays[name]], "weight_decay": 0.0},
        ]

    def inputs(self, batch: Tensor) -> Tensor:
        return batch.long()

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy of each window, (B,), of logits (B, T, V) against tokens (B, T)."""
        from torch.nn import functional

        losses = functional.cross_entropy(outputs.flatten(0, 1).float(), targets.flatten().long(), reduction="none")
        return losses.view(targets.shape).mean(dim=1)

    def num_correct(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the share of correctly predicted tokens of each window, (B,)."""
        return (outputs.argmax(dim=2) == targets.long()).float().mean(dim=1)

    def flops_per_sample(self, model: nn.Module) -> float:
        """Return 6 operations per parameter and token, and those of attention, as the PaLM paper counts them (2022)."""
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        return float(self.context * (6 * num_parameters + 12 * self.layers * self.width * self.context))

    def figures(self, epoch: EpochFinished) -> dict[str, float]:
        """Return the perplexity per token, the losses per byte, and the speed in tokens."""
        assert self._facts is not None  # the epoch had data
        nats_per_byte = epoch.test_loss / self._facts.held_out.bytes_per_token
        return {
            "perplexity": math.exp(min(epoch.test_loss, 700.0)),
            "bits_per_byte": nats_per_byte / math.log(2),
            "nats_per_byte": nats_per_byte,
            "train_nats_per_byte": epoch.train_loss / self._facts.train.bytes_per_token,
            "tokens_per_second": epoch.samples_per_second * self.context,
        }

    def generate_sample(self, model: nn.Module) -> str:
        from flyte_ddp.recipes.text.generate import generate_text

        return generate_text(model, self.prompt, SAMPLE_TOKENS, SAMPLE_TEMPERATURE, SAMPLE_TOP_P)  # type: ignore[arg-type]

    def export(self, state: Mapping[str, Any], directory: Path) -> None:
        """Write the model and its tokenizer as a directory of transformers."""
        from flyte_ddp.recipes.text.export import save_for_transformers

        save_for_transformers(state, directory)

    def predictions(self, batch: Tensor, outputs: Tensor, targets: Tensor) -> list[Prediction]:
        """Show the last token of each window, with the text before it."""
        tokenizer = self._tokenizer()

        def name(token: int) -> str:
            return "(end)" if token == tokenizer.end else tokenizer.decode([token])

        shown = []
        for row, logits, target in zip(batch.long().tolist(), outputs[:, -1], targets[:, -1].tolist(), strict=True):
            scores, tokens = logits.float().softmax(dim=0).topk(min(SHOWN_SCORES, len(logits)))
            names = [name(token) for token in tokens.tolist()]
            likely: dict[str, float] = {}
            for token, score in zip(names, scores.tolist(), strict=True):  # some bytes are no text alone
                likely[token] = likely.get(token, 0.0) + score
            text = tokenizer.decode([token for token in row[-SHOWN_TOKENS:] if token != tokenizer.end])
            shown.append(Prediction(truth=name(target), guess=names[0], scores=likely, text=f"…{text}"))
        return shown

    def _tokenizer(self) -> Tokenizer:
        from flyte_ddp.recipes.text.tokens import make_tokenizer

        if self._facts is None:
            raise RuntimeError("text: datasets() must be called first: it reads the tokenizer of the data")
        return make_tokenizer(self._facts.tokenizer)
