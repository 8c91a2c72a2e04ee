"""A user's project: how to make one, its settings.toml, and the limits for its launches."""
