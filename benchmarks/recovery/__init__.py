"""The same faults for this package and torchrun elastic: `python -m
benchmarks.recovery`.
"""
