"""What a task of either Flyte does: it opens places, shows reports, trains, predicts and promotes.

Plain values and functions, which import neither SDK. `flyte/` and `flyte2/` convert their values.
"""
