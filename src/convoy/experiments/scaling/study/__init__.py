"""What is measured: the configurations, what they share, and on what machine."""
