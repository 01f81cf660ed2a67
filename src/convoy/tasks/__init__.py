"""What a network is trained for: losses, metrics and evaluations of each kind of targets."""
