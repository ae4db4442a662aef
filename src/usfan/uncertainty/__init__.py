"""The posterior of the last layer: fit in one pass, predictive and certainty by draws in logit space."""
