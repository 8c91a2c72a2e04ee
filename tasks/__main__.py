"""`python -m tasks image` and `python -m tasks version` print what `make image` and `make register` use."""

from __future__ import annotations

import sys

from tasks.settings import SettingsError, load_settings, require_image

if __name__ == "__main__":
    try:
        settings = load_settings()
        print(require_image(settings.image) if sys.argv[1:] == ["image"] else settings.version)  # noqa: T201
    except SettingsError as error:
        sys.exit(str(error))
