"""What a machine does beside the training, and what is advised from that."""
