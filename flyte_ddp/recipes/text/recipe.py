"""Recipe `text`: a causal language model on text of the user's own, or on the reference topics that
come with Python.

The losses of a run are in nats per token. Beside them stand nats per byte, which compare between
tokenizers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flyte_ddp.config.extras import require
from flyte_ddp.config.fields import field, validate
from flyte_ddp.data.documents import NO_TARGET
from flyte_ddp.errors import ConfigError, DataError
from flyte_ddp.events import EpochFinished
from flyte_ddp.recipes.base import Recipe
from flyte_ddp.recipes.text.corpus import CHATS, SAMPLES, WINDOWS, Corpus
from flyte_ddp.storage import has_password, redact_url

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.utils.data import Dataset

    from flyte_ddp.recipes.text.tokens import Tokenizer

MODEL, TOKENIZER = "model", "tokenizer"  # directories of the prepared data
SIZES = ("layers", "width", "heads", "dropout")  # options that only the default model has
# settings of the text that is generated after each epoch
SAMPLE_TOKENS, SAMPLE_TEMPERATURE, SAMPLE_TOP_P = 200, 0.8, 0.95


@dataclass
class Text(Recipe):
    """A causal language model of transformers: it predicts each token of a text from the tokens
    before it.

    Samples are windows of `context` tokens, in the integer type of the files. Inputs and targets
    are both (T,); targets are the inputs shifted by one. All windows have equally many targets, so
    each window counts as one target, and its loss is the mean over its tokens.

    Or samples are rows of whole documents or chats, with attention inside each. Inputs are the
    tokens and their positions, (2, T). A target is -100 where nothing is learned, such as a
    question. Losses are sums over the targets of a row.

    Raises:
        ConfigError: an option lies outside the limits given beside it.
    """

    # name of a model on the Hub, or path or URL of a directory, from which training starts
    pretrained: str = field("")
    # config of transformers, with its model_type, for a fresh model
    architecture: dict[str, Any] = field(factory=dict)
    # Without `pretrained` and `architecture` a fresh Llama is trained. The next four are its sizes.
    layers: int = field(4, minimum=1)
    width: int = field(128, minimum=1)  # width of the residual stream, a multiple of 2 x heads
    heads: int = field(4, minimum=1)  # attention heads in each layer
    dropout: float = field(0.0, minimum=0, below=1)  # dropout of the attention weights
    # windows: running text, whatever begins or ends in it; documents: rows of whole documents;
    # chats: rows of chats in JSON lines, of which the answers alone are learned
    samples: str = field(WINDOWS, choices=SAMPLES)
    # tokens that the model sees at once: the window of a sample
    context: int = field(128, minimum=1)
    # kind of tokens; bpe: trained on the data; auto: those of `pretrained`, or bytes
    tokens: str = field("auto", choices=("auto", "bytes", "bpe"))
    vocabulary: int = field(4096, minimum=300)  # number of tokens of a bpe
    held_out: float = field(0.1, above=0, below=1)  # share of the documents that is held out
    # text between two documents in a text file; "" makes each file a document
    separator: str = field("")
    # pattern of the names of files in a directory, such as "*.py"; "" for text and Parquet
    files: str = field("")
    column: str = field("text")  # column with the text in Parquet files
    prompt: str = field("")  # beginning of the text that is generated after each epoch
    # size of a machine's copies of shards; 0: 64 or half of what is free on the disk
    cache_gib: float = field(0.0, minimum=0)

    changeable_options = ("prompt", "cache_gib")
    copies_from_first = True
    # All models need most of what this module imports.
    slow_imports = ("transformers.models.llama.modeling_llama",)
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
                f"recipe_options.width: expected a multiple of {2 * self.heads} (2 x heads), got "
                f"{self.width}"
            )
        sizes = [name for name in SIZES if getattr(self, name) != getattr(type(self), name)]
        given = [name for name in ("pretrained", "architecture") if getattr(self, name)] + sizes
        if len(given) > 1 and given != sizes:
            raise ConfigError(
                f"recipe_options: expected one of pretrained, architecture and sizes, got {given}"
            )
        if has_password(self.pretrained):
            raise ConfigError(
                "recipe_options.pretrained: expected a URL without a password, got "
                f"{redact_url(self.pretrained)!r}"
            )

    def prepare_new_data(self, source: str, directory: Path) -> str:
        raise DataError(
            "recipe text: expected a recipe that predicts samples, got one that generates: "
            "workflows/text.py continues a text"
        )

    def prepare(self, source: str, directory: Path) -> str:
        """Tokenize the text into `train.bin` and `held_out.bin`, or into shards of documents, and
        fetch the model.

        Args:
            source: path or URL of a file or a directory with text, packed with gzip or not, with
                Parquet, or with the shards that `flyte-ddp shards` wrote from these; "" for the
                topics that come with Python.
        """
        require("recipe text", "tokenizers", "transformers")
        from flyte_ddp.recipes.text import pretrained
        from flyte_ddp.recipes.text.documents import write_rows
        from flyte_ddp.recipes.text.shards import prepare_written, read_text_note
        from flyte_ddp.recipes.text.token_files import FACTS_FILE, prepare_shards

        corpus = Corpus(source, self.separator, self.files, self.column)
        if self.samples == CHATS:
            corpus = Corpus(source, "\n", self.files or "*.jsonl*")
        model = directory / MODEL
        config: dict[str, Any] = {}
        if self.pretrained:
            config = pretrained.fetch_model(self.pretrained, model)
        written = read_text_note(self, source)
        tokenizer = self._choose_tokenizer(corpus, written, model, source)
        if not self.pretrained:
            config = {"vocab_size": tokenizer.size, **(self.architecture or self._llama())}
            config |= {"bos_token_id": tokenizer.end, "eos_token_id": tokenizer.end}
            model.mkdir()
            (model / pretrained.CONFIG).write_text(json.dumps(config), encoding="utf-8")
        # The default model is known to fit, and the import takes seconds.
        if self.pretrained or self.architecture:
            name = "pretrained"
            if not self.pretrained:
                name = "architecture"
            pretrained.make_config(config, f"recipe_options.{name}", tokenizer.size, self.context)
        tokenizer.save(directory / TOKENIZER)
        if written:
            return prepare_written(source, written, directory)
        if self.samples != WINDOWS:
            given = corpus, directory, tokenizer, self.samples, self.held_out, self.context
            facts, description = write_rows(*given)
            (directory / FACTS_FILE).write_text(json.dumps(facts), encoding="utf-8")
            return description
        return prepare_shards(corpus, directory, tokenizer, self.held_out, self.context)

    def _choose_tokenizer(
        self, corpus: Corpus, written: Mapping[str, Any] | None, model: Path, source: str
    ) -> Tokenizer:
        """Return the tokenizer of the written shards, the model's tokenizer, or a new one.

        Raises:
            ConfigError: the model has another tokenizer than the shards.
        """
        from flyte_ddp.recipes.text import tokens
        from flyte_ddp.recipes.text.token_files import sample_texts

        is_models = self.tokens == "auto" and bool(self.pretrained)
        if written:
            tokenizer = tokens.Tokenizer(written["tokenizer"])
            if is_models and tokens.read_tokenizer(model).files != tokenizer.files:
                raise ConfigError(
                    "recipe_options.pretrained: expected a model with the tokenizer of the shards "
                    f"at {redact_url(source)}, got {redact_url(self.pretrained)} with another"
                )
            return tokenizer
        if is_models:
            return tokens.read_tokenizer(model)
        if self.tokens == "bpe":
            texts = sample_texts(corpus, self.held_out)
            return tokens.train_tokenizer(texts, self.vocabulary)
        return tokens.byte_tokenizer()

    def _llama(self) -> dict[str, Any]:
        return {
            "model_type": "llama",
            "num_hidden_layers": self.layers,
            "hidden_size": self.width,
            # two thirds of 4 x width, as usual with SwiGLU
            "intermediate_size": 32 * math.ceil(self.width / 12),
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "max_position_embeddings": self.context,
            "tie_word_embeddings": True,
            "attention_dropout": self.dropout,
        }

    def data_license(self, source: str) -> str:
        if source:
            return ""
        return "PSF-2.0"  # licence of Python's documentation

    def datasets(self, directory: Path) -> tuple[Dataset[Any], Dataset[Any]]:
        import torch
        from torch.utils.data import TensorDataset

        from flyte_ddp.recipes.text.documents import open_rows
        from flyte_ddp.recipes.text.shards import open_windows
        from flyte_ddp.recipes.text.token_files import (
            FACTS_FILE,
            HELD_OUT_FILE,
            TRAIN_FILE,
            read_windows,
        )
        from flyte_ddp.recipes.text.tokens import read_tokenizer

        # `model`, `figures` and `generate_sample` read these.
        self._directory = directory
        self._bytes_per_token = json.loads((directory / FACTS_FILE).read_text("utf-8"))
        self._tokenizer = read_tokenizer(directory / TOKENIZER)
        url, cache_gib = self._bytes_per_token.get("url"), self.cache_gib or None
        if self.samples != WINDOWS:
            place = url or str(directory)
            return open_rows(place, self.samples, self.context, cache_gib)  # type: ignore[return-value]
        if url:
            return open_windows(url, cache_gib)  # type: ignore[return-value]

        def load(file: str) -> TensorDataset:
            windows = read_windows(directory / file, self._tokenizer, self.context)
            return TensorDataset(*map(torch.from_numpy, windows))

        return load(TRAIN_FILE), load(HELD_OUT_FILE)

    def model(self) -> nn.Module:
        """Return the model for the tokens of the data, which `datasets` must have read before."""
        from flyte_ddp.recipes.text.model import open_model

        return open_model(self._directory / MODEL, self._tokenizer)

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        names: Any = getattr(model.get_submodule("model"), "_no_split_modules", None) or ()
        return [each for each in model.modules() if type(each).__name__ in names]

    def optimizer_groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """Return the matrices, which decay, and the embeddings, biases and norms, which do not."""
        from torch import nn

        embeddings = {id(each.weight) for each in model.modules() if isinstance(each, nn.Embedding)}
        groups: tuple[list[Tensor], list[Tensor]] = [], []
        for parameter in model.parameters():
            groups[parameter.dim() < 2 or id(parameter) in embeddings].append(parameter)
        return [{"params": groups[0]}, {"params": groups[1], "weight_decay": 0.0}]

    def inputs(self, batch: Tensor) -> Tensor:
        return batch.long()

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy of each window, or the sum of each row, (B,), for logits
        (B, T, V) and tokens (B, T).
        """
        from torch.nn import functional

        losses = functional.cross_entropy(
            outputs.flatten(0, 1).float(), targets.flatten().long(), reduction="none"
        )
        return self._sum(losses.view(targets.shape))

    def num_correct(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the share of correctly predicted tokens of each window, or their number in each
        row, (B,).
        """
        return self._sum((outputs.argmax(dim=2) == targets.long()).float())

    def num_targets(self, targets: Tensor) -> Tensor | None:
        if self.samples == WINDOWS:
            return None
        return (targets != NO_TARGET).sum(dim=1)

    def _sum(self, values: Tensor) -> Tensor:
        """Return the mean over a window's tokens, or the sum over a row's."""
        if self.samples == WINDOWS:
            return values.mean(dim=1)
        return values.sum(dim=1)

    def flops_per_sample(self, model: nn.Module) -> float:
        """Return 6 operations per parameter and token, plus the operations of attention, as the
        PaLM paper counts them (2022).
        """
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        config: Any = model.get_submodule("model").config.get_text_config()  # type: ignore[operator,union-attr]
        attention = 12 * config.num_hidden_layers * config.hidden_size * self.context
        return float(self.context * (6 * num_parameters + attention))

    def tokens_per_sample(self) -> int:
        return self.context

    def figures(self, epoch: EpochFinished) -> dict[str, float]:
        """Return the perplexity per token and the losses per byte."""
        nats_per_byte = epoch.test_loss / self._bytes_per_token["held_out"]
        train_nats_per_byte = epoch.train_loss / self._bytes_per_token["train"]
        return {
            "perplexity": math.exp(min(epoch.test_loss, 700.0)),
            "bits_per_byte": nats_per_byte / math.log(2),
            "nats_per_byte": nats_per_byte,
            "train_nats_per_byte": train_nats_per_byte,
        }

    def generate_sample(self, model: nn.Module) -> str:
        from flyte_ddp.recipes.text.model import generate_text

        return generate_text(model, self.prompt, SAMPLE_TOKENS, SAMPLE_TEMPERATURE, SAMPLE_TOP_P)  # type: ignore[arg-type]

    def export(self, state: Mapping[str, Any], directory: Path) -> None:
        """Write the model and its tokenizer as a directory of transformers."""
        from flyte_ddp.recipes.text.model import export_model

        export_model(state, directory)
