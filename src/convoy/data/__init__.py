"""Pictures from files to batches: formats, decoding, augmentation, the order of samples, loading, mixing."""

from convoy.data.batch import Batch
from convoy.data.config import AugmentConfig, DataConfig, MixConfig
from convoy.data.dataset import DataSet, open_data
from convoy.data.decode import BadImage
from convoy.data.loader import evaluation_batches, num_workers, training_batches
from convoy.data.mixing import mix
from convoy.data.normalise import Normalise
from convoy.data.order import Order
from convoy.data.sources import Source

__all__ = [
    "AugmentConfig",
    "BadImage",
    "Batch",
    "DataConfig",
    "DataSet",
    "MixConfig",
    "Normalise",
    "Order",
    "Source",
    "evaluation_batches",
    "mix",
    "num_workers",
    "open_data",
    "training_batches",
]
