"""Parquet files and tars that are damaged, incomplete or contradict each other."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.made import encoded, picture, tar_members, write_columns, write_folder, write_parquet, write_tar
from data.wrong import Cases, check_refusal

wrong = Cases()


def jpegs(num: int = 4) -> list[bytes]:
    return [encoded(picture(seed=i), "JPEG") for i in range(num)]


@wrong("several columns of images: say which by --set data.image_column=…, of left, right")
def parquet_with_two_columns_of_pictures(root: Path):
    write_columns(root / "x.parquet", left=jpegs(), right=jpegs(), label=[0, 1, 0, 1])


@wrong("several columns of labels: say which by --set data.label_column=…, of target, class")
def parquet_with_two_columns_of_labels(root: Path):
    write_columns(root / "x.parquet", image=jpegs(), target=[0, 1, 0, 1], **{"class": [0, 1, 0, 1]})


@wrong("data.image_column is no column", image_column="picture")
def parquet_without_the_column_that_is_named(root: Path):
    write_parquet(root / "x.parquet", jpegs(), [0, 1, 0, 1])


@wrong("column extra of .* holds no bytes of pictures", image_column="extra")
def parquet_whose_named_column_has_no_pictures(root: Path):
    write_columns(root / "x.parquet", image=jpegs(), label=[0, 1, 0, 1], extra=[1, 2, 3, 4])


@wrong("has label 'ant', which no training sample has: .*--set data.train=")
def parquet_label_of_the_test_alone(root: Path):
    write_parquet(root / "train.parquet", jpegs(), ["cat", "dog"] * 2)
    write_parquet(root / "test.parquet", jpegs(), ["cat", "ant"] * 2)


@wrong("has label 2, out of range: the classes to train on are 0 to 1")
def parquet_number_of_the_test_alone(root: Path):
    write_parquet(root / "train.parquet", jpegs(), [0, 1, 0, 1])
    write_parquet(root / "test.parquet", jpegs(), [0, 1, 2, 1])


@wrong("has no column of labels")
def parquet_column_of_the_test_alone(root: Path):
    write_columns(root / "train.parquet", image=jpegs())
    write_parquet(root / "test.parquet", jpegs(), [0, 1, 0, 1])


@wrong("data.train=lesson is no .parquet file below", train="lesson")
def parquet_without_the_files_that_are_named(root: Path):
    write_parquet(root / "lessons.parquet", jpegs(), [0, 1, 0, 1])


@wrong("is no parquet file, or is cut off or damaged")
def parquet_whose_names_are_no_text(root: Path):
    file = write_parquet(root / "x.parquet", jpegs(), [0, 1, 0, 1])
    file.write_bytes(file.read_bytes().replace(b"label", b"labe\xff"))


@wrong("is no parquet file, or is cut off or damaged")
def parquet_whose_numbers_of_rows_differ(root: Path):
    file = write_parquet(root / "x.parquet", jpegs(), [0, 1, 0, 1], rows=4)
    content = file.read_bytes()
    at = content.rindex(b"\x16\x08")  # 4, as thrift writes the group's number of rows
    file.write_bytes(content[:at] + b"\x16\x0a" + content[at + 2 :])


@wrong("no column of pictures .* its columns are a, label")
def parquet_without_pictures(root: Path):
    pq.write_table(pa.table({"a": [1, 2], "label": [0, 1]}), root / "x.parquet")


@wrong("no column of labels .* its columns are image, kind")
def parquet_without_labels(root: Path):
    write_parquet(root / "x.parquet", jpegs(), [0, 1, 0, 1], label="kind")


@wrong("label .* is double")
def parquet_with_fractions_as_labels(root: Path):
    write_parquet(root / "x.parquet", jpegs(), [0.0, 1.0, 0.5, 1.0])


@wrong("label 7, out of range: the classes to train on are 0 to 1")
def parquet_label_out_of_range(root: Path):
    write_parquet(root / "x.parquet", jpegs(), [0, 1, 7, 1], ("a", "b"))


@wrong("label -1, out of range.*withheld")
def parquet_withheld_labels(root: Path):
    write_parquet(root / "train.parquet", jpegs(), [0, 1, 0, 1], ("a", "b"))
    write_parquet(root / "test.parquet", jpegs(), [-1] * 4, ("a", "b"))


@wrong("1 rows without a label")
def parquet_null_label(root: Path):
    write_parquet(root / "x.parquet", jpegs(), [0, 1, None, 1])


@wrong("no parquet file, or is cut off")
def parquet_truncated(root: Path):
    file = write_parquet(root / "x.parquet", jpegs(), [0, 1, 0, 1])
    file.write_bytes(file.read_bytes()[:-100])


@wrong("no parquet file, or is cut off")
def parquet_empty_file(root: Path):
    (root / "x.parquet").write_bytes(b"")
    return root / "x.parquet"


@wrong("holds no rows")
def parquet_without_rows(root: Path):
    write_parquet(root / "x.parquet", [], np.zeros(0, np.int64))


@wrong("has other columns")
def parquet_shards_that_differ(root: Path):
    write_parquet(root / "train-0.parquet", jpegs(), [0, 1, 0, 1])
    write_parquet(root / "train-1.parquet", jpegs(), [0, 1, 0, 1], label="labels")


@wrong("belongs to no split")
def parquet_shard_of_no_split(root: Path):
    write_parquet(root / "train-0.parquet", jpegs(), [0, 1, 0, 1])
    write_parquet(root / "extra.parquet", jpegs(), [0, 1, 0, 1])


@wrong("no .parquet file for training")
def parquet_without_training_files(root: Path):
    write_parquet(root / "test-0.parquet", jpegs(), [0, 1, 0, 1])


@wrong("only has 1 picture|only 1 picture")
def parquet_of_one_row(root: Path):
    write_parquet(root / "x.parquet", jpegs(1), [0], ("a", "b"))


@wrong("holds no .tar file", format="webdataset")
def folder_without_tars(root: Path):
    write_folder(root)


@wrong("has no label for 0-0002.jpg: a sample needs 0-0002.cls")
def tar_without_a_label(root: Path):
    members = tar_members(4)
    del members["0-0002.cls"]
    write_tar(root / "x.tar", members)


@wrong("has a label for 0-0002 but no picture")
def tar_without_a_picture(root: Path):
    members = tar_members(4)
    del members["0-0002.jpg"]
    write_tar(root / "x.tar", members)


@wrong("label 'cat' in 0-0002.cls, but a label is a whole number")
def tar_label_as_text(root: Path):
    write_tar(root / "x.tar", tar_members(4) | {"0-0002.cls": b"cat"})


@wrong("is no JSON")
def tar_broken_json(root: Path):
    members = tar_members(4) | {"0-0002.json": b"[" * 100_000}
    del members["0-0002.cls"]
    write_tar(root / "x.tar", members)


@wrong("label 99999999 in .*out of range|has label 99999999, out of range")
def tar_label_too_large(root: Path):
    write_tar(root / "x.tar", tar_members(4) | {"0-0002.cls": b"99999999"})


@wrong("out of range: the classes to train on are 0 to 1")
def tar_negative_label(root: Path):
    write_tar(root / "x.tar", tar_members(4) | {"0-0002.cls": b"-1"})


@wrong("has label 1, out of range|only 1 class")
def tar_with_too_few_names(root: Path):
    write_tar(root / "x.tar", tar_members(4))
    (root / "classes.txt").write_text("cat\n")


@wrong("has label 2, out of range: the classes to train on are 0 to 1")
def tar_label_of_the_test_alone(root: Path):
    write_tar(root / "train.tar", tar_members(4))
    write_tar(root / "test.tar", tar_members(3, num_classes=3))


@wrong("has two pictures that may be meant by the label of a: call one a, as a name ends at its first dot")
def tar_with_two_pictures_of_a_label(root: Path):
    write_tar(root / "x.tar", {"a.left.png": encoded(picture()), "a.right.png": encoded(picture()), "a.cls": b"0"})


@wrong("has two members .cls of 0-0001")
def tar_with_two_labels_of_a_name(root: Path):
    write_tar(root / "x.tar", tar_members(4) | {"./0-0001.cls": b"1"})


@wrong("has two pictures 0-0001")
def tar_with_two_pictures_of_a_name(root: Path):
    write_tar(root / "x.tar", tar_members(4) | {"0-0001.png": encoded(picture())})


@wrong("holds no samples")
def tar_without_samples(root: Path):
    write_tar(root / "x.tar", {"readme": b"nothing"})


@wrong("is no tar file, or is cut off")
def tar_truncated(root: Path):
    file = write_tar(root / "x.tar", tar_members(4))
    file.write_bytes(file.read_bytes()[: 512 * 3 + 100])


@wrong("is no tar file, or is cut off")
def tar_that_is_none(root: Path):
    (root / "x.tar").write_bytes(b"hello" * 1000)


@wrong("is compressed")
def tar_compressed(root: Path):
    write_tar(root / "x.tar", tar_members(4), mode="w:gz")


@pytest.mark.parametrize(("make", "message", "options"), wrong)
def test_it_is_refused_in_one_sentence(make, message, options, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check_refusal(tmp_path, make, message, options)
