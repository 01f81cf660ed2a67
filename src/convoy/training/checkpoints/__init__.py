"""Checkpoints: what one is, how ranks write it together beside the training, and when it is time for one."""
