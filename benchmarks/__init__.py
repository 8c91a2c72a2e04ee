"""Performance as ratios, each pair measured in one run: `make bench`. No test depends on any of
it.
"""
