"""What holds a training back, and which one change would help most: what was measured, and what follows from it."""
