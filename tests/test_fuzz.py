"""Whatever is typed, or stands in a file: it is taken, or refused in one short sentence, in little time and memory."""

import hashlib
import itertools
import json
import os
import pickle
import pickletools
import random
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors import safe_open

from convoy.checkpoint.files import STATE, Checkpoint, write_record
from convoy.checkpoint.store import CheckpointStore, read_checkpoint
from convoy.data import pack
from convoy.data.config import DataConfig
from convoy.data.dataset import open_data, open_files
from convoy.data.decode import BadImage, finish_picture, open_picture
from convoy.data.packed import INDEX, PackOptions, index_file
from convoy.documents import read_mapping
from convoy.errors import ConvoyError
from convoy.plans.fit import parse_fix
from convoy.plans.plan import Plan
from convoy.recipe.recipe import Recipe, check_names, load_recipe
from convoy.recipe.schema import fields_of
from data.made import encoded, picture, tar_members, write_cifar, write_mnist, write_parquet, write_tar
from training.scenarios import put

LONGEST = 1_000
"""Characters of a sentence about what was typed, however long that was."""
PLAIN = """sample filter channel height width replicate owt serial auto mesh layers conv fc1 * features.* ~ ~x ~root sgd
adamw cosine null true false .nan .inf 1e999 -1 0 2 3.5 07 90ep 10ba 5% 2d lenet timm: os:system a.b:c"""
WORDS = PLAIN.split()
MARKS = [*"=,:;{}[]()\"'&*!|>%@`#~?/\\.-+ \t\n\r\x00\x1b\x7f\u202e\udcff\ufeffé图", "~x/", "../", "- "]
MARKS += [": ", "${", "<<"]
KEYS = ["", ".", "..", "model.name.x", *dict.fromkeys(key for key, _, _ in fields_of(Recipe))]
VALID = """mesh: {sample: 2, filter: 2}
layers:
  conv*: {sample: sample}
  '*': {sample: sample, filter: filter}
"""


def text(draw: random.Random, longest: int = 12) -> str:
    """Words and marks in any order, now and then one of them very often."""
    parts = [draw.choice(draw.choice((WORDS, MARKS))) for _ in range(draw.randrange(longest))]
    if draw.random() < 0.05:
        parts.insert(0, draw.choice([*WORDS, *MARKS, "x"]) * draw.choice((300, 5_000)))
    return "".join(parts)


def broken(draw: random.Random, good: str) -> str:
    """Something right with a few places changed."""
    letters = list(good)
    for _ in range(draw.randrange(1, 4)):
        at = draw.randrange(len(letters) + 1)
        letters[at : at + draw.randrange(3)] = text(draw, 3)
    return "".join(letters)


def change(draw: random.Random) -> str:
    key = draw.choice(KEYS) if draw.random() < 0.8 else text(draw, 4)
    return f"{key}{draw.choice(('=', '=', '=', ''))}{text(draw, 4)}"


def attempts(draw: random.Random, folder: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    """What is tried, by its text."""
    line = draw.choice((text(draw), broken(draw, "sample=2,filter=2")))
    yield line, lambda: Plan.parse(line, 2)
    document = broken(draw, VALID)
    yield document, lambda: Plan.parse(document)
    file = folder / "file.yaml"
    file.write_bytes(document.encode("utf-8", "surrogatepass"))
    yield f"file {document!r}", lambda: Plan.parse(str(file))
    fix = draw.choice((text(draw), broken(draw, "classifier.*=filter")))
    yield fix, lambda: parse_fix(fix)
    changes = ["model.name=lenet", "data.path=mnist-mini", *(change(draw) for _ in range(draw.randrange(1, 3)))]
    yield str(changes), lambda: check_names(load_recipe("default", changes))
    name = text(draw, 5)
    yield name, lambda: load_recipe(name, ["data.path=mnist-mini"])
    recipe = broken(draw, "model: {name: lenet}\noptimizer: {name: sgd, lr: 0.1}\nepochs: 3ep\nbatch: 32\n")
    other = folder / "recipe.yaml"
    other.write_bytes(recipe.encode("utf-8", "surrogatepass"))
    yield f"recipe {recipe!r}", lambda: load_recipe(str(other), ["data.path=mnist-mini"])


def test_whatever_is_typed_is_taken_or_refused_in_a_sentence(tmp_path: Path) -> None:
    """CONVOY_FUZZ=1000 tries more."""
    for seed in range(int(os.environ.get("CONVOY_FUZZ", "100"))):
        for typed, attempt in attempts(random.Random(seed), tmp_path):
            try:
                attempt()
            except ConvoyError as error:
                assert 0 < len(str(error)) <= LONGEST, typed
            except Exception as error:
                raise AssertionError(f"{type(error).__name__} for {typed!r}, seed {seed}") from error


# What stands in files: readers of data sets, runs and pictures, in a process of their own that may be ended.

ODD: list[Any] = [None, True, -1, 0, 1, 2**31, 2**63, 2**200, 1e308, float("nan"), "", "../x", "x" * 2_000]
ODD += [[], {}, [[]]]
INTEGERS = [0, 1, 2, 127, 128, 255, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63, 2**64 - 1]


def damaged(draw: random.Random, content: bytes) -> bytes:
    """Some bytes changed, put in, left out, or cut off."""
    result = bytearray(content)
    for _ in range(draw.choice((1, 1, 2, 5, 20))):
        at, number = draw.randrange(len(result) + 1), draw.choice(INTEGERS)
        size = draw.choice([size for size in (1, 2, 4, 8) if number < 256**size])
        part = number.to_bytes(size, draw.choice(("little", "big")))
        again = result[at : at + draw.choice((1, 8, 100))] * draw.choice((1, 2, 50))
        rest = len(result) if draw.random() < 0.3 else 0
        changed, cut = (1, draw.randbytes(1)), (draw.choice((1, 4, 100)), b"")
        length, part = draw.choice([changed, (size, part), (0, part), cut, (0, again), (rest, b"")])
        result[at : at + length] = part
    return bytes(result)


def forged(draw: random.Random, value: Any) -> Any:
    """A document with a few odd values in it."""
    if draw.random() < 0.15 or not isinstance(value, dict | list) or not value:
        return draw.choice(ODD)
    value = value.copy()
    key = draw.choice(list(value) if isinstance(value, dict) else range(len(value)))
    if isinstance(value, dict) and draw.random() < 0.2:
        value[draw.choice(("", "../x", "x", "\x1b"))] = value.pop(key)
    else:
        value[key] = forged(draw, value[key])
    return value


def damage(draw: random.Random, folder: Path) -> None:
    file = draw.choice(sorted(path for path in folder.rglob("*") if path.is_file()))
    file.write_bytes(damaged(draw, file.read_bytes()))


def make_pack(folder: Path) -> None:
    write_tar(folder.with_name("x") / "x.tar", tar_members(6, width=20, height=20))
    kind, opened = open_files(DataConfig(path=str(folder.with_name("x"))))
    pack.pack(kind, opened, folder, PackOptions(), None, 1)


def forge_index(draw: random.Random, folder: Path) -> None:
    """An index whose checksums fit."""
    with safe_open(folder / INDEX, "np") as file:
        arrays = {key: file.get_tensor(key).copy() for key in file.keys()}  # noqa: SIM118
        document = json.loads(file.metadata()["convoy.pack"])
    if draw.random() < 0.5:
        document = forged(draw, document)
    for _ in range(draw.randrange(3)):
        name = draw.choice(list(arrays))
        array = arrays[name]
        if draw.random() < 0.2:
            arrays[name] = array.astype(draw.choice(("u1", "i8", "f4"))) if draw.random() < 0.5 else array[None]
        elif array.size:
            array.flat[draw.randrange(array.size)] = np.array(draw.choice(INTEGERS), np.uint64).astype(array.dtype)
    with suppress(TypeError, AttributeError):  # no document, or one that JSON does not have
        (folder / INDEX).write_bytes(index_file(arrays, document))


def forge_tar(draw: random.Random, folder: Path) -> None:
    """Headers whose checksums fit."""
    content = bytearray((folder / "train.tar").read_bytes())
    for _ in range(draw.randrange(1, 4)):
        start = 512 * draw.randrange(len(content) // 512)
        block = bytearray(damaged(draw, bytes(content[start : start + 512])).ljust(512, b"\0")[:512])
        block[156:157] = draw.choice((b"0", b"0", b"x", b"L", b"S", b"g", b"1", b"5", b"K", b"V"))
        block[148:156] = b" " * 8
        block[148:156] = b"%06o\0 " % sum(block)
        content[start : start + 512] = block
    (folder / "train.tar").write_bytes(content)


def forge_pickle(draw: random.Random, folder: Path) -> None:
    """Instructions in another order, or any others."""
    (file,) = folder.glob("*/test_batch")
    places = [place for _, _, place in pickletools.genops(file.read_bytes())]
    parts = [file.read_bytes()[one:two] for one, two in itertools.pairwise(places)]
    parts += [code.code.encode("latin1") for code in pickletools.opcodes]
    chosen = list(parts[: len(places) - 1]) if draw.random() < 0.5 else []
    for _ in range(draw.choice((1, 3, 30))):
        at = draw.randrange(len(chosen) + 1)
        chosen[at : at + draw.randrange(2)] = [draw.choice(parts)] * draw.choice((1, 1, 1, 2, 70))
    file.write_bytes(b"\x80\x02" * (draw.random() < 0.5) + b"".join(chosen) + b".")


def make_cifar(folder: Path) -> None:
    file = write_cifar(folder, 10, False, num=2) / "test_batch"
    file.write_bytes(pickle.dumps(pickle.loads(file.read_bytes()), 4))


def make_tar(folder: Path) -> None:
    write_tar(folder / "train.tar", tar_members(6, width=20, height=20), format=tarfile.PAX_FORMAT)


def make_parquet(folder: Path) -> None:
    images = [encoded(picture(20, 20, seed=seed)) for seed in range(6)]
    write_parquet(folder / "train.parquet", images, [0, 1] * 3, ["a", "b"])


def make_yaml(folder: Path) -> None:
    folder.mkdir()
    text = "model: {name: lenet, options: {a: [1, 2.5, 1e-3]}}\noptimizer:\n  name: sgd\n  lr: 0.1\n"
    (folder / "x.yaml").write_text(text + "classes:\n- a\n- 'b'\n")


def make_checkpoint(folder: Path) -> None:
    tensors = {"weight": torch.ones(3, 2), "count": torch.tensor(3), "none": torch.empty(0, dtype=torch.bfloat16)}
    store = CheckpointStore(folder.with_name("store"))
    put(store, Checkpoint(3, "x", tensors, {"loop": {"progress": {"best_step": 3}}})).rename(folder)


def forge_checkpoint(draw: random.Random, folder: Path) -> None:
    """Files that fit their checksums."""
    (shard,) = (folder / STATE).iterdir()
    content = shard.read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    text = json.dumps(forged(draw, header)).encode()
    shard.write_bytes(draw.choice((len(text), len(text), *INTEGERS)).to_bytes(8, "little") + text + content[-32:])
    checksums = {shard.name: hashlib.sha256(shard.read_bytes()).hexdigest()}
    values = forged(draw, {"loop": {"progress": {}}})
    names = forged(draw, checksums) if draw.random() < 0.3 else checksums
    with suppress(TypeError, ValueError):  # JSON does not have that
        write_record(folder, draw.choice((3, 3, *ODD)), draw.choice(("x", "x", *ODD)), values, names)


def make_pictures(folder: Path) -> None:
    folder.mkdir()
    for kind in ("JPEG", "PNG", "WEBP", "GIF", "TIFF", "BMP", "JPEG2000", "PPM", "TGA", "DDS", "ICO", "SGI", "PCX"):
        (folder / kind).write_bytes(encoded(picture(16, 16), kind))
    (folder / "16").write_bytes(encoded(picture(16, 16, "I;16")))
    (folder / "alpha").write_bytes(encoded(picture(16, 16, "RGBA")))


def read_data(folder: Path) -> None:
    data = open_data(DataConfig(path=str(folder), bad_images="skip", workers=0))
    for source in (data.train, data.test):
        for sample in range(min(len(source), 8)):
            with suppress(BadImage):
                assert source.load(sample).mode in ("L", "RGB")


def read_pictures(folder: Path) -> None:
    for file in folder.iterdir():
        with suppress(BadImage):
            finish_picture(open_picture(file.read_bytes(), file.name), file.name, (8, 8))


class Reader(NamedTuple):
    """How files are made, forged and read, and how many MB that may take."""

    make: Callable[[Path], object]
    forge: Callable[[random.Random, Path], None]
    read: Callable[[Path], object]
    megabytes: int = 100


READERS = {
    "pack": Reader(make_pack, forge_index, read_data),
    "tar": Reader(make_tar, forge_tar, read_data),
    "cifar": Reader(make_cifar, forge_pickle, read_data),
    "mnist": Reader(lambda folder: write_mnist(folder, 3, 2, ".gz"), damage, read_data),
    "yaml": Reader(make_yaml, damage, lambda folder: read_mapping(folder / "x.yaml", "recipe")),
    "parquet": Reader(make_parquet, damage, read_data),
    "checkpoint": Reader(make_checkpoint, forge_checkpoint, read_checkpoint),
    "pictures": Reader(make_pictures, damage, read_pictures, 800),
}
LONGEST_S = 20
"""Seconds that a small file may take on a busy machine."""


def memory(key: str) -> int:
    """MB by /proc."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) // 1024


def read_whatever(root: Path, seconds: float, seed: str, first: int = 0) -> None:
    """Damage and read files for so long; the number of the case that begins is printed."""
    for name, reader in READERS.items():
        reader.make(root / name)
        reader.read(root / name)
    until = time.monotonic() + seconds
    for number in itertools.count(first):
        if time.monotonic() > until and number >= 2 * len(READERS):
            return
        print(number, flush=True)
        name = list(READERS)[number % len(READERS)]
        draw, folder, reader = random.Random(f"{seed} {number}"), root / str(number) / name, READERS[name]
        shutil.copytree(root / name, folder)  # a new place, as readers keep files open by their paths
        draw.choice((damage, reader.forge))(draw, folder)
        Path("/proc/self/clear_refs").write_text("5")  # from here on the peak counts anew
        before = memory("VmRSS")
        signal.alarm(LONGEST_S)  # ends this process, wherever it is
        try:
            reader.read(folder)
        except ConvoyError as error:
            assert 0 < len(str(error)) <= LONGEST and str(error).isprintable(), (name, error)
        signal.alarm(0)
        assert memory("VmHWM") - before <= reader.megabytes, (name, memory("VmHWM") - before)
        shutil.rmtree(folder.parent)


@pytest.mark.timeout(0)
@pytest.mark.parametrize("seconds", [1, pytest.param(8, marks=pytest.mark.slow)])
def test_whatever_stands_in_a_file_is_read_or_refused_in_a_sentence(seconds: int, tmp_path: Path) -> None:
    """CONVOY_FUZZ_S=3600 -m slow tries for an hour, CONVOY_FUZZ_SEED others."""
    longer = os.environ.get("CONVOY_FUZZ_S", seconds) if seconds > 3 else seconds
    seed = os.environ.get("CONVOY_FUZZ_SEED", str(seconds))
    ended = subprocess.run(
        [sys.executable, __file__, str(tmp_path), str(longer), seed],
        capture_output=True,
        text=True,
        timeout=float(longer) + 120,
    )
    last = ended.stdout.split()[-1:]
    assert ended.returncode == 0, f"case {last} of seed {seed}, ended by {ended.returncode}: {ended.stderr[-3_000:]}"


if __name__ == "__main__":
    torch.set_num_threads(1)
    read_whatever(Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3], *map(int, sys.argv[4:]))
