"""Classifiers: backbones, the network of the recipe, wrapped foreign modules, and the folder that is saved."""
