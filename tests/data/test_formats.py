"""Every format, made small: the pictures, labels, names and sizes that come out."""

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

from convoy.data import DataConfig, evaluation_batches, open_data
from convoy.data.dataset import CIFAR10, CIFAR100, IMAGENET, MNIST
from convoy.data.mnist import SPLIT_SEED
from convoy.data.sources import PixelSource
from data.made import (
    dump,
    encoded,
    picture,
    pixels,
    tar_members,
    write_cifar,
    write_columns,
    write_folder,
    write_idx,
    write_mnist,
    write_parquet,
    write_tar,
)


def opened(path, **options):
    return open_data(DataConfig(path=str(path), **options))


def names(source) -> list[str]:
    return [source.name(i) for i in range(len(source))]


def test_mnist_mini_is_split_for_good():
    data = opened("mnist-mini")
    assert (data.name, len(data.train), len(data.test)) == ("mnist-mini", 4000, 1000)
    assert (np.bincount(data.test.labels) == 100).all()
    assert (np.bincount(data.train.labels) == 400).all()
    assert (data.image_size, data.channels, data.mean, data.std) == (28, 1, *MNIST)
    assert data.notes == ()
    assert SPLIT_SEED == 1998
    # Which digits are in the test split must never change, or results could not be compared.
    assert [int(data.test.name(i).rsplit(" ", 1)[1]) for i in range(5)] == [0, 5, 11, 15, 20]
    assert not set(names(data.train)) & set(names(data.test))


@pytest.mark.parametrize("end", ["", ".gz"])
def test_mnist_files(tmp_path, end):
    write_mnist(tmp_path, end=end)
    data = opened(tmp_path)
    assert (len(data.train), len(data.test), data.classes) == (40, 10, [str(i) for i in range(10)])
    np.testing.assert_array_equal(data.train.load(7), pixels(40, 28, 28, 1, 0)[7, :, :, 0])
    assert data.train.labels[17] == 7
    assert data.train.name(7) == f"train-images-idx3-ubyte{end}, picture 7"


def test_mnist_names_with_a_dot(tmp_path):
    write_mnist(tmp_path)
    for file in list(tmp_path.iterdir()):
        file.rename(tmp_path / file.name.replace("-idx", ".idx"))
    assert len(opened(tmp_path).train) == 40


def test_mnist_in_color_and_in_another_size(tmp_path):
    write_mnist(tmp_path)
    data = opened(tmp_path, channels=3, image_size=32)
    assert (data.channels, data.image_size, len(data.mean)) == (3, 32, 3)
    batch = next(evaluation_batches(data, DataConfig(image_size=32, workers=0), batch=4))
    assert tuple(batch.images.shape) == (4, 3, 32, 32)


@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize(("version", "statistics"), [(10, CIFAR10), (100, CIFAR100)])
def test_cifar_files(tmp_path, binary, version, statistics):
    inner = write_cifar(tmp_path, version, binary)
    for path in (tmp_path, inner):
        data = opened(path)
        assert (data.name, len(data.classes), data.image_size, data.channels) == (f"cifar{version}", version, 32, 3)
        assert (len(data.train), len(data.test)) == (100 if version == 10 else 20, 20)
        assert (data.mean, data.std) == statistics
        assert data.classes[3] == "class3"
        expected = pixels(20, 3, 32, 32, 0).reshape(20, 3, 32, 32)[5].transpose(1, 2, 0)
        np.testing.assert_array_equal(data.train.load(5), expected)
        assert data.train.labels[:20].tolist() == list(range(20)) if version == 100 else True
        assert data.train.labels[13] == 13 % version


def test_cifar_in_grey(tmp_path):
    data = opened(write_cifar(tmp_path, 10, True), channels=1)
    assert data.train.load(0).mode == "L"
    assert data.mean == pytest.approx((0.4809,), abs=1e-3)


def test_folders_with_a_split(tmp_path):
    write_folder(tmp_path / "train", ("b", "a"), num=3)
    write_folder(tmp_path / "val", ("a", "b"), num=2)
    (tmp_path / "train" / "a" / "notes.txt").write_text("no picture")
    (tmp_path / "train" / "a" / "._001.jpg").write_text("what macOS leaves behind")
    (tmp_path / "train" / ".cache").mkdir()
    (tmp_path / "README.md").write_text("")
    data = opened(tmp_path)
    assert (data.classes, data.train.labels.tolist(), data.test.labels.tolist()) == (
        ["a", "b"],
        [0] * 3 + [1] * 3,
        [0, 0, 1, 1],
    )
    assert names(data.train)[:2] == ["train/a/000.jpg", "train/a/001.jpg"]
    assert data.train.load(0).size == (80, 70)
    assert (data.image_size, data.resize, data.channels, data.mean, data.std) == (224, 256, 3, *IMAGENET)


def test_a_tree_is_split_by_a_seed(tmp_path):
    write_folder(tmp_path, ("a", "b"), num=10)
    one, same, other = opened(tmp_path), opened(tmp_path), opened(tmp_path, split_seed=1)
    assert names(one.test) == names(same.test) != names(other.test)
    assert one.test.labels.tolist() == [0, 1]
    assert sorted(names(one.train) + names(one.test)) == sorted(f"{c}/{i:03d}.jpg" for c in "ab" for i in range(10))
    assert "2 of its 20 samples are held out" in one.notes[0]
    assert len(opened(tmp_path, validation_fraction=0.5).test) == 10


def test_folders_in_class_folders_and_links(tmp_path):
    write_folder(tmp_path / "set", ("a", "b"))
    deep = tmp_path / "set" / "a" / "more"
    deep.mkdir()
    (deep / "x.PNG").write_bytes(encoded(picture()))
    (deep / "loop").symlink_to(tmp_path / "set" / "a", target_is_directory=True)
    elsewhere = tmp_path / "elsewhere.jpg"
    elsewhere.write_bytes(encoded(picture(), "JPEG"))
    (tmp_path / "set" / "b" / "linked.jpg").symlink_to(elsewhere)
    data = opened(tmp_path / "set")
    found = sorted(names(data.train) + names(data.test))
    assert len(found) == 10
    assert "a/more/x.PNG" in found
    assert "b/linked.jpg" in found


def test_small_pictures_of_one_size_go_into_memory(tmp_path):
    write_folder(tmp_path / "train", num=5, width=20, height=20)
    write_folder(tmp_path / "val", num=2, width=20, height=20)
    told = []
    data = open_data(DataConfig(path=str(tmp_path)), progress=lambda *what: told.append(what))
    assert isinstance(data.train, PixelSource)
    assert data.image_size == 20
    assert names(data.train)[0] == "train/cat/000.jpg"
    with Image.open(tmp_path / "train" / "cat" / "000.jpg") as image:
        np.testing.assert_array_equal(data.train.load(0), image)
    assert ("decoding the training pictures", 10, 10) in told


def test_small_pictures_of_different_sizes_do_not(tmp_path):
    write_folder(tmp_path, num=40, width=20, height=20)
    (tmp_path / "dog" / "007.jpg").write_bytes(encoded(picture(21, 20), "JPEG"))
    data = opened(tmp_path)
    assert not isinstance(data.train, PixelSource)
    assert data.image_size == 224


def test_small_grey_pictures_stay_grey(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
        for i in range(4):
            (tmp_path / name / f"{i}.png").write_bytes(encoded(picture(28, 28, "L", seed=i)))
    data = opened(tmp_path)
    assert (data.channels, data.image_size) == (1, 28)


def test_bad_small_pictures_are_skipped_by_name(tmp_path):
    write_folder(tmp_path, num=20, width=20, height=20)
    (tmp_path / "dog" / "005.jpg").write_bytes(b"")
    data = opened(tmp_path, bad_images="skip")
    bad = {source.name(i): reason for source in (data.train, data.test) for i, reason in source.bad.items()}
    assert bad == {"dog/005.jpg": "is an empty file"}


@pytest.mark.parametrize("struct", [True, False])
def test_parquet_with_names_in_its_metadata(tmp_path, struct):
    images = [encoded(picture(seed=i), "JPEG", quality=95) for i in range(10)]
    labels = [i % 3 for i in range(10)]
    for split in ("train", "validation", "test"):
        withheld = [-1] * 10 if split == "test" else labels
        write_parquet(
            tmp_path / f"data/{split}-00000-of-00001.parquet",
            images,
            withheld,
            ("x", "y", "z"),
            struct=struct,
            image="img",
        )
    data = opened(tmp_path)
    assert (data.classes, data.train.labels.tolist(), len(data.test)) == (["x", "y", "z"], labels, 10)
    for i in (0, 9, 4, 2):
        assert data.train.load(i).tobytes() == Image.open(_stream(images[i])).tobytes()
    assert data.train.name(4) == "train-00000-of-00001.parquet, row 4"
    assert data.test.name(0).startswith("validation")


def _stream(data: bytes):
    import io

    return io.BytesIO(data)


def test_parquet_shards_and_a_single_file(tmp_path):
    for shard in range(3):
        images = [encoded(picture(seed=10 * shard + i), "JPEG") for i in range(4 + shard)]
        write_parquet(tmp_path / f"train-{shard}.parquet", images, [i % 2 for i in range(4 + shard)])
    data = opened(tmp_path, validation_fraction=0.2)
    assert len(data.train) + len(data.test) == 15
    assert data.classes == ["0", "1"]
    everything = {data.train.load(i).tobytes() for i in range(len(data.train))}
    assert len(everything) == 12
    single = opened(tmp_path / "train-2.parquet", validation_fraction=0.5)
    assert (single.name, len(single.train), len(single.test)) == ("train-2", 3, 3)
    assert sorted(names(single.train) + names(single.test)) == [f"train-2.parquet, row {i}" for i in range(6)]


def test_parquet_with_labels_as_text(tmp_path):
    images = [encoded(picture(seed=i), "JPEG") for i in range(6)]
    write_parquet(tmp_path / "train.parquet", images, ["dog", "cat"] * 3)
    write_parquet(tmp_path / "test.parquet", images, ["cat", "dog"] * 3)
    data = opened(tmp_path)
    assert (data.classes, data.train.labels.tolist()) == (["cat", "dog"], [1, 0] * 3)
    assert data.test.labels.tolist() == [0, 1] * 3


@pytest.mark.parametrize("values", [["dog", "cat"] * 3, [1, 0] * 3, [True, False] * 3])
def test_parquet_with_labels_by_a_dictionary(tmp_path, values):
    images = [encoded(picture(seed=i), "JPEG") for i in range(6)]
    labels = pa.array(values) if isinstance(values[0], bool) else pa.array(values).dictionary_encode()
    write_columns(tmp_path / "train.parquet", image=pa.array(images).dictionary_encode(), label=labels)
    data = opened(tmp_path, validation_fraction=0.5)
    both = sorted((data_of.name(i), data_of.labels[i]) for data_of in (data.train, data.test) for i in range(3))
    assert [label for _, label in both] == [1, 0] * 3
    assert data.classes == (["cat", "dog"] if isinstance(values[0], str) else ["0", "1"])
    assert data.train.load(0).size == picture().size


def test_parquet_columns_are_chosen_by_name_or_by_the_recipe(tmp_path):
    masks, images = ([encoded(picture(side, side)) for _ in range(6)] for side in (17, 28))
    write_columns(tmp_path / "x.parquet", mask=masks, Image=images, coarse_label=[0, 1] * 3, fine_label=[0, 1, 2] * 2)
    data = opened(tmp_path)
    assert (data.image_size, len(data.classes)) == (28, 3)
    assert data.notes[0] == "Image is taken of the columns mask, Image: data.image_column chooses"
    data = opened(tmp_path, image_column="mask", label_column="coarse_label")
    assert (data.image_size, len(data.classes), len(data.notes)) == (17, 2, 1)


def test_files_to_train_on_can_be_named(tmp_path):
    images = [encoded(picture(seed=i), "JPEG") for i in range(4)]
    for name, number in (("lessons-0", 4), ("lessons-1", 3), ("exam", 2)):
        write_parquet(tmp_path / f"{name}.parquet", images[:number], ([0, 1] * 2)[:number])
    data = opened(tmp_path, train="lessons-*", test="exam.parquet")
    assert (len(data.train), len(data.test)) == (7, 2)
    write_parquet(tmp_path / "deep" / "x.parquet", images, [0, 1] * 2)
    data = opened(tmp_path, train="deep", test="lessons-1.parquet")
    assert (data.train.name(0), len(data.test)) == ("x.parquet, row 0", 3)
    data = opened(tmp_path, train=".")
    assert len(data.train) + len(data.test) == 13


def test_a_class_without_training_pictures_is_said(tmp_path):
    images = [encoded(picture(seed=i), "JPEG") for i in range(4)]
    write_parquet(tmp_path / "train.parquet", images, [0, 1] * 2, ("cat", "dog", "ant"))
    write_parquet(tmp_path / "test.parquet", images, [0, 2] * 2, ("cat", "dog", "ant"))
    assert opened(tmp_path).notes == ("no training picture is of ant, which the test has",)


def test_parquet_of_cifar_goes_into_memory(tmp_path):
    images = [encoded(picture(32, 32, seed=i)) for i in range(20)]
    fine = [f"fine{i}" for i in range(100)]
    write_parquet(tmp_path / "train.parquet", images, list(range(20)), fine, image="img", label="fine_label")
    write_parquet(tmp_path / "test.parquet", images[:5], list(range(5)), fine, image="img", label="fine_label")
    data = opened(tmp_path)
    assert isinstance(data.train, PixelSource)
    assert (len(data.classes), data.mean, data.image_size) == (100, CIFAR100[0], 32)


def test_tars(tmp_path):
    members = tar_members(6)
    write_tar(tmp_path / "train-000.tar", members)
    write_tar(tmp_path / "train-001.tar", tar_members(6, seed=1))
    write_tar(tmp_path / "val-000.tar", tar_members(4, seed=2))
    data = opened(tmp_path)
    assert (len(data.train), len(data.test), data.classes) == (12, 4, ["0", "1"])
    assert data.train.labels.tolist() == [0, 1] * 6
    assert data.train.load(3).tobytes() == Image.open(_stream(members["0-0003.jpg"])).tobytes()
    assert data.train.name(7) == "train-001.tar/1-0001.jpg"
    (tmp_path / "classes.txt").write_text("cat\ndog\n")
    assert opened(tmp_path).classes == ["cat", "dog"]
    single = opened(tmp_path / "train-000.tar", validation_fraction=0.5)
    assert (len(single.train), len(single.test), single.name) == (3, 3, "train-000")


def test_tar_names_with_dots(tmp_path):
    image, label = encoded(picture(), "JPEG"), "{}.cls".format
    stems = ["22.05", "22.06", "photo.1.2", "plain", "sub.dir/x", "v1.0/22.05"]
    members = {}
    for number, stem in enumerate(stems):
        members |= {f"{stem}.jpg": image, label(stem): str(number % 2).encode()}
    members |= {"y.jpg": image, "y.json": b'{"label": 1}', "y.mask.png": image, "y.json.txt": b"", "z.big.jpg": image}
    members |= {label("z"): b"1", "lone.05.jpg": image}
    write_tar(tmp_path / "train.tar", members)
    data = opened(tmp_path, validation_fraction=0.5)
    found = {
        source.name(i).removeprefix("train.tar/"): source.labels[i]
        for source in (data.train, data.test)
        for i in range(len(source))
    }
    wanted = {f"{stem}.jpg": number % 2 for number, stem in enumerate(stems)}
    assert found == {**wanted, "y.jpg": 1, "z.big.jpg": 1}
    assert set(data.notes[0].removeprefix("left out: ").split(", ")) == {"1 .mask.png", "1 .json.txt", "1 .05.jpg"}


def test_tar_members_of_all_kinds(tmp_path):
    import io
    import tarfile

    image = encoded(picture(), "PNG")
    path = tmp_path / "set.tar"
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        for name, kind in (("dir", tarfile.DIRTYPE), ("link.jpg", tarfile.SYMTYPE), ("node.jpg", tarfile.CHRTYPE)):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "/etc/passwd"
            tar.addfile(info)
        for name, content in {
            "../../outside.png": image,
            "../../outside.cls": b"1",
            "/etc/absolute.png": image,
            "/etc/absolute.json": b'{"label": 0, "text": "x"}',
            "sub.dir/" + "long" * 60 + ".seg.png": b"another kind of member",
            "./dir/b.v1.txt": b"text",
            "dir/b.JPEG": encoded(picture(), "JPEG"),
            "dir/b.cls": b" 1\n",
            "dir/b.json": b"{}",
            "bell\x07.png": image,
            "bell\x07.cls": b"0",
        }.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    data = opened(path, validation_fraction=0.5)
    assert sorted(names(data.train) + names(data.test)) == [
        "set.tar/../../outside.png",
        "set.tar//etc/absolute.png",
        "set.tar/bell\\x07.png",
        "set.tar/dir/b.JPEG",
    ]
    assert not (tmp_path.parent.parent / "outside.png").exists()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["set.tar"]


def test_a_protocol_of_today_and_numpy_of_today_write_readable_cifar(tmp_path):
    inner = write_cifar(tmp_path, 100, False)
    data = np.asfortranarray(pixels(20, 3, 32, 32, 0).reshape(20, -1))
    dump(inner / "train", {"data": data, "fine_labels": list(range(20))})
    np.testing.assert_array_equal(
        np.asarray(opened(tmp_path).train.load(3)), data[3].reshape(3, 32, 32).transpose(1, 2, 0)
    )


def test_idx_reader_refuses_more_dimensions_than_it_knows(tmp_path):
    write_mnist(tmp_path)
    write_idx(tmp_path / "train-labels-idx1-ubyte", np.zeros((40, 2)))
    with pytest.raises(ValueError, match="no idx file of labels"):
        opened(tmp_path)
