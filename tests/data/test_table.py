"""labels.csv: which task it is of, targets that stay with their pictures, packs of it, and what is refused."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from convoy.data.config import DataConfig
from convoy.data.dataset import open_data
from convoy.errors import ConvoyError
from data.made import packed, trained


def write_table(folder: Path, text: str, num: int = 6) -> Path:
    """Pictures 0.png, …, of 40×30 pixels in blocks, their masks 0-mask.png, …, whose classes their grey says."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(num):
        classes = np.random.default_rng(number).integers(0, 3, (6, 8)).repeat(5, 0).repeat(5, 1).astype(np.uint8)
        Image.fromarray(80 * classes).save(folder / f"{number}.png")
        Image.fromarray(classes).save(folder / f"{number}-mask.png")
    (folder / "labels.csv").write_text(text)
    return folder / "labels.csv"


def config(path: Path, **options: object) -> DataConfig:
    return DataConfig.model_validate({"path": str(path), "workers": 0, **options})


def rows(*labels: str) -> str:
    return "\n".join(["path,label", *(f"{number}.png,{label}" for number, label in enumerate(labels))])


MASKS = rows(*(f"{number}-mask.png" for number in range(6)))


@pytest.mark.parametrize(
    ("text", "task", "classes"),
    [
        (rows(*"aabbab"), "classification", ["a", "b"]),
        (rows(*"123120").replace("path,label\n", ""), "classification", ["0", "1", "2", "3"]),
        (rows(*["b", "9" * 5000] * 3), "classification", ["9" * 5000, "b"]),
        (rows("a;b", "b", "", "c;a", "a", "c"), "multi-label", ["a", "b", "c"]),
        (rows("1", "2.5", "3", "4", "5", "-6"), "regression", ["label"]),
        (rows(*["1,2"] * 6).replace("label", "x,y"), "regression", ["x", "y"]),
        (MASKS, "segmentation", ["0", "1", "2"]),
        (rows(*["1,0", "0,1", "1,1"] * 2).replace("label", "Cat,Dog"), "multi-label", ["Cat", "Dog"]),
        ('\ufeff"image_path","label"' + rows(*"aabbab").removeprefix("path,label"), "classification", ["a", "b"]),
        (rows(*"aabbab").replace(",", ";"), "classification", ["a", "b"]),
        (f",{rows(*'556677')}".replace("\n", "\n8,").replace("label", "age"), "classification", ["5", "6", "7"]),
    ],
)
def test_labels_say_the_task_and_a_pack_has_them(text: str, task: str, classes: list[str], tmp_path: Path) -> None:
    table = write_table(tmp_path / "data", text)
    packed(table, tmp_path / "pack")
    of_table, of_pack = (config(path, image_size=16, channels=1) for path in (table, tmp_path / "pack"))
    for section in (of_table, of_pack):
        data = open_data(section)
        assert (data.task, data.classes, len(data.train) + len(data.test)) == (task, classes, 6)
    for one, other in zip(trained(of_table, num=2, batch=3), trained(of_pack, num=2, batch=3), strict=True):
        assert torch.equal(one.images, other.images) and torch.equal(one.targets, other.targets)


@pytest.mark.parametrize("crop", ["none", "pad", "random-resized"])
def test_masks_go_where_their_pictures_go(crop: str, tmp_path: Path) -> None:
    table = write_table(tmp_path / "data", MASKS)
    augment = {"crop": crop, "flip": True, "interpolation": "nearest"}
    section = config(table, image_size=20, resize=24, channels=1, augment=augment)
    for batch in (*trained(section, batch=4), *trained(section.model_copy(update={"workers": 1}), batch=4)):
        there = batch.targets != 255
        assert torch.equal(batch.images[:, 0][there], 80 * batch.targets[there])
        assert (batch.images[:, 0][~there] == 0).all() and there.all() == (crop != "pad")
    erasing = config(table, image_size=20, resize=24, channels=1, augment=augment | {"random_erasing": 1.0})
    for batch, erased in zip(trained(section, batch=4), trained(erasing, batch=4), strict=True):
        assert torch.equal(batch.targets, erased.targets) and not torch.equal(batch.images, erased.images)


def test_an_absolute_path_is_of_the_picture_that_it_names(tmp_path: Path) -> None:
    for place, grey in ("named", 10), ("other/pictures", 200):  # the latter is ../pictures of where the table lies
        (tmp_path / place).mkdir(parents=True)
        for number in range(3):
            Image.new("L", (80, 80), grey).save(tmp_path / place / f"{number}.png")
    table = write_table(tmp_path / "other" / "data", "")
    table.write_text("\n".join(["path,label", *(f"{tmp_path}/pictures/{n}.png,{'aba'[n]}" for n in range(3))]))
    (tmp_path / "pictures").symlink_to(tmp_path / "named")
    (tmp_path / "link").symlink_to(table.parent)
    assert open_data(config(tmp_path / "link")).train.load(0).getpixel((0, 0)) == 10


SPLIT = "path,label,split\n0.png,a,train\n1.png,b,train\n2.png,a,val\n"


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        (rows(*"aab", "a\n9.png,b"), {}, "line 6: '9.png' is missing"),
        (rows("a", "3.5", "a"), {}, "mixes kinds of labels: 'a' in line 2 is a name, '3.5' in line 3 a number"),
        (rows("1", "2", "x"), {"task": "regression"}, "line 4: 'x' is no number"),
        (SPLIT, {}, "line 3: no held-out row has the class 'b'"),
        (SPLIT + "3.png,b,val\n4.png,c,val\n", {}, "line 6: no training row has the class 'c'"),
        (SPLIT.replace("val", "later"), {}, "line 4: 'later' is no split"),
        (SPLIT + "1.png,b,val\n./0.png,a,val\n", {}, "line 5: '1.png' is in val as 'b', and by line 3 in train as 'b'"),
        (rows("a", "b\n./0.png,b"), {}, "line 4: './0.png' is in train as 'b', and by line 2 in train as 'a'"),
        (rows("a", "b", ""), {}, "line 4 has no label: write one, or where there may be none, say --task multi-label"),
        (rows("1,0", "0,1").replace("label", "a,b"), {"task": "classification"}, "takes one column, not a, b"),
        (rows("1,0", "0,2").replace("label", "a,b"), {"task": "multi-label"}, "line 3: '2' is not 0 or 1"),
        (rows("1,a", "2,b").replace("label", "id,breed"), {}, "call the one column that is to be learnt label"),
        (rows("a", "b,c"), {}, "line 3 has 3 columns: a path and its label are needed, and nothing beyond the 2"),
        ("what,label\n0.png,a\n", {}, "begins with 'what, label', no picture that is there: begin it with path,label"),
        (rows("1.5", "1e38", "1e39"), {}, "line 4: '1e39' is beyond 3.4e+38, the largest number of float32"),
        (rows("0-mask.png", "negative.tif"), {}, "negative.tif is a mask with the value -3"),
        (rows("0-mask.png", "both.png"), {}, "are 0, 1, 2, 200, beside 255, which counts nowhere, but classes are"),
        (rows("black.png", "black.png"), {}, "are 0, beside 255, which counts nowhere, but classes are numbered"),
        (rows("black.png", "black.png"), {"classes": ["a", "b"]}, "are 0, beside 255, which counts nowhere, but"),
        (rows("a", "b", ""), {"task": "classification"}, "line 4 has no label"),
        (rows("a", "b"), {"classes": ["a", "c"]}, "line 3: 'b' is none of data.classes"),
        (MASKS, {"classes": ["a", "b"]}, "0-mask.png has the value 2, but the classes are 0 to 1"),
        (rows("0-mask.png", "small.png"), {}, "small.png has 3×2 pixels, but its picture 1.png has 40×30"),
        (rows("0-mask.png", "color.png"), {}, "color.png is a mask in RGB"),
        (rows("a", "b"), {"task": "segmentation"}, "line 2: 'a' is missing"),
        ("path,label\n", {}, "has no rows"),
        ("0.png\n", {}, "line 1 has 1 columns"),
    ],
)
def test_what_is_wrong_is_refused_in_a_sentence(
    text: str, options: dict[str, object], words: str, tmp_path: Path
) -> None:
    table = write_table(tmp_path / "data", text)
    Image.new("L", (3, 2)).save(table.with_name("small.png"))
    Image.new("RGB", (40, 30)).save(table.with_name("color.png"))
    Image.fromarray(np.array([[0, 200]], np.uint8).repeat(30, 0).repeat(20, 1)).save(table.with_name("both.png"))
    Image.fromarray(np.array([[0, 255]], np.uint8).repeat(30, 0).repeat(20, 1)).save(table.with_name("black.png"))
    Image.new("I", (40, 30), -3).save(table.with_name("negative.tif"))
    task = str(options.pop("task", "auto"))
    with pytest.raises(ConvoyError) as refused:
        open_data(DataConfig.model_validate({"path": str(table), **options}), task=task)
    assert words in str(refused.value)


def test_two_classes_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="classes names 'a' twice"):
        config(tmp_path, classes=["a", "a", "b"])
