"""The work of a task of either Flyte: open places, show reports, train, predict and promote.

The modules take plain values and import neither SDK. `flyte/` and `flyte2/` convert the values.
"""
