"""Packages that only a part of this library needs, and the extras that bring them. Imports none of
them.
"""

from __future__ import annotations

import importlib.util

from flyte_ddp.errors import ConfigError

# the extra in pyproject.toml that brings each package
EXTRAS = {
    "adlfs": "azure",
    "gcsfs": "gcs",
    "huggingface_hub": "text",
    "matplotlib": "reports",
    "mlflow": "mlflow",
    "opentelemetry": "otel",
    "optuna": "sweep",
    "pandas": "sweep",
    "pyarrow": "streams",
    "sklearn": "digits",
    "tensorboard": "tensorboard",
    "tokenizers": "text",
    "torchmetrics": "metrics",
    "transformers": "text",
}


def is_installed(package: str) -> bool:
    """Return whether a package can be imported. Does not import it."""
    return importlib.util.find_spec(package) is not None


def how_to_install(package: str, extra: str = "") -> str:
    """Return the line that says that a package is missing, and the command that brings it."""
    return f"expected the package {package}: pip install 'flyte-ddp[{extra or EXTRAS[package]}]'"


def require(purpose: str, *packages: str, extra: str = "") -> None:
    """Check that packages are installed.

    Args:
        purpose: what needs them, for the message.
        extra: name of the extra that brings them; "" for the one in `EXTRAS`.

    Raises:
        ConfigError: a package is not installed.
    """
    for package in packages:
        if not is_installed(package):
            raise ConfigError(f"{purpose}: {how_to_install(package, extra)}")
