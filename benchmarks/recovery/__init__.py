"""The same faults for this package, torchrun elastic and Ray Train: `python -m
benchmarks.recovery`.
"""
