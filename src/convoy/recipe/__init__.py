"""What a training is described by: every key of a recipe, its meaning and its checks."""
