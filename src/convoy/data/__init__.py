"""Pictures from files to batches: formats, decoding, augmentation, the order of samples, loading, mixing."""

from typing import TYPE_CHECKING

from convoy.late import lazily

if TYPE_CHECKING:
    from convoy.data.batch import Batch as Batch
    from convoy.data.config import AugmentConfig as AugmentConfig
    from convoy.data.config import DataConfig as DataConfig
    from convoy.data.config import MixConfig as MixConfig
    from convoy.data.dataset import DataSet as DataSet
    from convoy.data.dataset import open_data as open_data
    from convoy.data.decode import BadImage as BadImage
    from convoy.data.loader import evaluation_batches as evaluation_batches
    from convoy.data.loader import num_workers as num_workers
    from convoy.data.loader import training_batches as training_batches
    from convoy.data.order import Order as Order
    from convoy.data.sources import Source as Source
    from convoy.data.transforms import Normalize as Normalize
    from convoy.data.transforms import mix as mix

__getattr__ = lazily(
    __name__,
    {
        "batch": "Batch",
        "config": "AugmentConfig DataConfig MixConfig",
        "dataset": "DataSet open_data",
        "decode": "BadImage",
        "loader": "evaluation_batches num_workers training_batches",
        "order": "Order",
        "sources": "Source",
        "transforms": "Normalize mix",
    },
)
