"""Pictures from files to batches: formats, decoding, augmentation, the order of samples, loading, mixing."""

from typing import TYPE_CHECKING

from convoy.late import lazily

if TYPE_CHECKING:
    from convoy.data.batch import Batch
    from convoy.data.config import AugmentConfig, DataConfig, MixConfig
    from convoy.data.dataset import DataSet, open_data
    from convoy.data.decode import BadImage
    from convoy.data.loader import evaluation_batches, num_workers, training_batches
    from convoy.data.order import Order
    from convoy.data.sources import Source
    from convoy.data.transforms import Normalize, mix

__all__ = [
    "AugmentConfig",
    "BadImage",
    "Batch",
    "DataConfig",
    "DataSet",
    "MixConfig",
    "Normalize",
    "Order",
    "Source",
    "evaluation_batches",
    "mix",
    "num_workers",
    "open_data",
    "training_batches",
]

__getattr__ = lazily(
    __name__,
    {
        "AugmentConfig": "config",
        "BadImage": "decode",
        "Batch": "batch",
        "DataConfig": "config",
        "DataSet": "dataset",
        "MixConfig": "config",
        "Normalize": "transforms",
        "Order": "order",
        "Source": "sources",
        "evaluation_batches": "loader",
        "mix": "transforms",
        "num_workers": "loader",
        "open_data": "dataset",
        "training_batches": "loader",
    },
)
