"""Recipes of your own. They travel with every registration and image, and to every driver, worker and rank.

cp examples/wine.py recipes/
pyflyte run workflows/single_node.py single_node_training_wf --recipe recipes.wine.Wine
"""
