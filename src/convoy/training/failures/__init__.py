"""What can go wrong while a run goes on: signals, hangs, losses that are not finite."""
