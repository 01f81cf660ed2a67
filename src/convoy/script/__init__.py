"""What a training script of one's own calls besides `parallelize`: data, losses, evaluation, saving."""
