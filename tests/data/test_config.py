import pytest
from pydantic import ValidationError

from convoy.data import AugmentConfig, DataConfig, MixConfig

WRONG = [
    ({"pathh": "x"}, "pathh"),
    ({"path": ""}, "path"),
    ({"format": "jpeg"}, "format"),
    ({"path": "photos", "format": "mnist-mini"}, "contradict"),
    ({"path": "mnist-mini", "format": "cifar"}, "contradict"),
    ({"image_size": 0}, "image_size"),
    ({"image_size": 224, "resize": 200}, "set resize to at least 224"),
    ({"channels": 2}, "channels"),
    ({"mean": [0.5]}, "both or neither"),
    ({"mean": [0.5, 0.5], "std": [1, 1]}, "1 or 3"),
    ({"mean": [0.5], "std": [1, 1, 1]}, "1 and 3"),
    ({"mean": [0.5], "std": [1], "channels": 3}, "channels=3"),
    ({"mean": [0.5], "std": [0]}, "above 0"),
    ({"workers": -1}, "workers"),
    ({"bad_images": "ignore"}, "bad_images"),
    ({"validation_fraction": 1.0}, "validation_fraction"),
    ({"split_seed": -1}, "split_seed"),
    ({"augment": {"crop": "center"}}, "crop"),
    ({"augment": {"pad": 4}}, "set crop=pad"),
    ({"augment": {"crop": "pad", "pad": -1}}, "pad"),
    ({"augment": {"scale": [0.1, 1.0]}}, "set crop=random-resized"),
    ({"augment": {"crop": "random-resized", "scale": [0.5, 0.1]}}, "smallest <= largest"),
    ({"augment": {"crop": "random-resized", "scale": [0, 1]}}, "0 < smallest"),
    ({"augment": {"crop": "random-resized", "ratio": [0, 1]}}, "0.01 <= smallest"),
    ({"augment": {"crop": "pad", "ratio": [1, 2]}}, "set crop=random-resized"),
    ({"augment": {"color_jitter": 1.5}}, "color_jitter"),
    ({"augment": {"rand_augment": "m9"}}, "nN-mM"),
    ({"augment": {"rand_augment": "n2-m30"}}, "M from 1 to 29"),
    ({"augment": {"interpolation": "cubic"}}, "interpolation"),
    ({"channels": 1, "augment": {"pca_noise": 0.1}}, "pca_noise needs colors"),
    ({"channels": 1, "augment": {"rand_augment": "n2-m9"}}, "rand_augment needs colors"),
    ({"mix": {"mixup": -1}}, "mixup"),
]


@pytest.mark.parametrize(("section", "word"), WRONG, ids=[str(section) for section, _ in WRONG])
def test_wrong_sections_are_refused_with_what_to_change(section, word):
    with pytest.raises(ValidationError, match=word):
        DataConfig(**section)


def test_defaults_survive_writing_and_reading():
    config = DataConfig(
        path="x", augment=AugmentConfig(crop="random-resized", scale=(0.2, 1)), mix=MixConfig(mixup=0.2)
    )
    assert DataConfig(**config.model_dump(mode="json")) == config
    assert DataConfig(**DataConfig().model_dump(mode="json")) == DataConfig()


def test_rand_augment_numbers():
    assert AugmentConfig(rand_augment="n3-m12").rand_augment_numbers == (3, 12)
    assert AugmentConfig().rand_augment_numbers is None
    assert not MixConfig().on
    assert MixConfig(cutmix=1).on
