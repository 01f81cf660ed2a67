"""The ranks of a run as the trainer sees them: who computes what, and what they tell each other."""
