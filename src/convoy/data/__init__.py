"""Pictures from files to batches: formats, decoding, augmentation, the order of samples, loading, mixing."""
