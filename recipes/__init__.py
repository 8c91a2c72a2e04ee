"""Recipes of your own, each a module or a package. All files here reach every task, driver, worker
and rank.

examples/README.md describes recipes: `cp examples/recipes/wine.py recipes/`, then `--recipe
recipes.wine.Wine`.
"""
