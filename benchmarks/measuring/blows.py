"""What is done to a run, its files, its data and its machine: the blows of `benchmarks/chaos.py`."""

import fcntl
import io
import json
import os
import random
import re
import shutil
import signal
import struct
import subprocess
import sys
import tarfile
import time
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import yaml
from PIL import Image
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from convoy.checkpoint.files import write_record
from measuring.faults import Case, Do, Fault

_ATTACK_S = 20.0


def steps(*blows: Do) -> Do:
    """One after the other."""
    return lambda case: [blow(case) for blow in blows]


def recipe(text: str) -> Do:
    """A recipe of somebody."""
    return lambda case: (case.folder / "recipe.yaml").write_text(text)


def kill_all(*pids: int) -> None:
    """SIGKILL of several processes."""
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def pause(case: Case, seconds: float, rank: int | None) -> None:
    """Stop a process for some time."""
    case.send(signal.SIGSTOP, rank)
    time.sleep(seconds)
    case.send(signal.SIGCONT, rank)


def used_less(case: Case, megabytes: int) -> None:
    """The command may not have had more memory."""
    if case.megabytes > megabytes:
        case.wrong.append(f"it used {case.megabytes} MB")


def is_as_it_was(path: Path, case: Case) -> None:
    """A file that nobody may touch is there."""
    if not path.is_file():
        case.wrong.append(f"{path} is gone")


def must_not_exist(path: Path, case: Case) -> None:
    """Nobody may have made a file, by which code shows that it ran."""
    if path.exists():
        case.wrong.append(f"{path} was made")


def expect_summary(case: Case, **values: object) -> None:
    """What the run says of itself."""
    found = json.loads((case.out / "summary.json").read_text())
    case.wrong += [f"summary: {key} is {found.get(key)!r}" for key, value in values.items() if found.get(key) != value]


def expect_named(case: Case, name: str) -> None:
    """The run's summary says something of a file."""
    if name not in (case.out / "summary.json").read_text():
        case.wrong.append(f"summary.json does not name {name}")


# What becomes of files of a run that was killed after 10 updates, with checkpoints of 3, 6 and 9.


def half(case: Case, *files: str, of: str = "half", change: Callable[[bytes], bytes] = lambda _: b"") -> None:
    """A copy of that run, some of its files changed: what they hold, by a function of it."""
    shutil.copytree(case.shared / of, case.out)
    case.done = 10
    for pattern in files:
        for path in sorted(case.out.glob(pattern)):
            path.write_bytes(change(path.read_bytes()))


def damaged(file: str, change: Callable[[bytes], bytes]) -> Do:
    """A copy of that run, of whose newest checkpoint a file is changed: the one before where that was being written."""

    def damage(case: Case) -> None:
        half(case)
        newest = max((case.out / "checkpoints").glob("step-*/checkpoint.json")).parent
        for path in newest.glob(file):
            path.write_bytes(change(path.read_bytes()))

    return damage


def flipped(content: bytes) -> bytes:
    """With one bit changed, in the middle."""
    place = len(content) // 2
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


def later(content: bytes) -> bytes:
    """A record of a format to come."""
    return content.replace(b"convoy-checkpoint-1", b"convoy-checkpoint-9")


def forged(case: Case) -> None:
    """Values that are others, with checksums that fit."""
    half(case)
    for folder in (case.out / "checkpoints").iterdir():
        record = json.loads((folder / "checkpoint.json").read_text())
        record["values"]["optimizer"] = {"odd": 1}
        write_record(folder, record["step"], record["identity"], record["values"], record["sha256"])


def foreign(case: Case, of: str, options: dict[str, object]) -> None:
    """A run directory of a stranger, whose network is what sympy makes of a sentence."""
    half(case, of=of)
    config = yaml.safe_load((case.out / "config.yaml").read_text())
    config["model"] |= {"name": "sympy:sympify", "options": options}
    (case.out / "config.yaml").write_text(yaml.safe_dump(config))


# Data


def copy(case: Case) -> None:
    """Data of the case's own."""
    case.data = case.folder / "data"
    shutil.copytree(case.shared / "data", case.data)


def uneven(case: Case) -> None:
    """Data of the case's own, of more than one size, so that they are read from their files again and again."""
    copy(case)
    Image.effect_noise((40, 30), 90).convert("RGB").save(case.data / "train/b/0.png")


def hosts(name: str, change: Callable[[Path], object]) -> Do:
    """Two hosts with data of the same name, of which the second one's are changed."""
    return partial(_hosts, name=name, change=change)


def _hosts(case: Case, name: str, change: Callable[[Path], object]) -> None:
    for rank in range(2):
        shutil.copytree(case.shared / "data", case.folder / f"host-{rank}" / "data")
    case.data = Path("data")
    change(case.folder / "host-1" / "data" / name)


def repaint(path: Path) -> None:
    """Another picture, of another size in bytes."""
    Image.new("RGB", (28, 28), (1, 2, 3)).save(path)


def one_color(case: Case) -> None:
    """A picture for which the network gives what is not finite."""
    copy(case)
    repaint(case.data / "train/a/5.png")


def cifar(case: Case, content: bytes) -> None:
    """A folder with CIFAR's Python files, all of which hold the same."""
    case.data = case.folder / "cifar-10-batches-py"
    case.data.mkdir()
    for name in ("batches.meta", "test_batch", *(f"data_batch_{number}" for number in range(1, 6))):
        (case.data / name).write_bytes(content)


def doubled(depth: int) -> bytes:
    """A pickle whose key is a pair of pairs of pairs …: short to write, endless to hash."""
    return b"\x80\x04}(" + b"K\x01" + b"2\x86" * depth + b"K\x01u."


class Call:
    """Calls `os.system` when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (f"touch {self.mark}",)


def aliases(depth: int) -> str:
    """YAML of lists of nine aliases each of the list before."""
    return "\n".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9 if n else ['1'])}]" for n in range(depth))


def png(path: Path, width: int, height: int, depth: int, rows: int = 0) -> None:
    """A gray picture of nothing but black, in few bytes; only some of its rows are there, if so many are named."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, depth, 0, 0, 0, 0)
    packer = zlib.compressobj(9)
    content = b"".join(packer.compress(bytes(1 + width * depth // 8)) for _ in range(rows or height)) + packer.flush()
    signature = b"\x89PNG\r\n\x1a\n"
    path.write_bytes(signature + chunk(b"IHDR", header) + chunk(b"IDAT", content) + chunk(b"IEND", b""))


def tar(case: Case) -> None:
    """A pack of pictures whose members lead out of the folder, through `..`, an absolute path and links."""
    case.data = case.folder / "shards"
    case.data.mkdir()
    with tarfile.open(case.data / "train-000000.tar", "w") as archive:
        for number, name in enumerate(("../../escaped", str(case.folder / "escaped"), *map(str, range(40)))):
            for suffix, source in ((".png", case.shared / "data/train/a/0.png"), (".cls", None)):
                member = tarfile.TarInfo(f"{name}{number}{suffix}")
                content = source.read_bytes() if source else str(number % 2).encode()
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
        link = tarfile.TarInfo("link.png")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)


def packed(case: Case) -> None:
    """The data as a pack."""
    other = Case(Fault("pack", "", "fine"), case.shared, case.folder / "packing")
    other.start(f"data pack {case.data} {case.folder / 'pack'}")
    if other.finish()[0]:
        case.wrong.append("the data could not be packed")


def victim(case: Case, link: str) -> None:
    """A folder of somebody else, to which a link leads where Convoy writes."""
    packed(case)
    (case.folder / "victim").mkdir()
    (case.folder / "victim" / "precious.npz").write_text("all my work")
    (case.folder / "dest").mkdir()
    (case.folder / "dest" / link).symlink_to(case.folder / "victim")


# Disks, folders, users


def mount(case: Case, path: Path, size: str) -> None:
    """A small file system, which nobody but this program and what it starts can see."""
    path.mkdir(exist_ok=True)
    subprocess.run(("mount", "-t", "tmpfs", "-o", f"size={size}", "chaos", str(path)), check=True)


def small_disk(case: Case, size: str) -> None:
    """A run directory on a disk with little room."""
    mount(case, case.folder / "disk", size)
    case.out = case.folder / "disk" / "run"


def unmounted(case: Case) -> None:
    """The disk is gone."""
    subprocess.run(("umount", "--lazy", str(case.folder / "disk")), check=True)


def room(case: Case) -> None:
    """More room on that disk."""
    subprocess.run(("mount", "-o", "remount,size=20m", str(case.folder / "disk")), check=True)


def lock(case: Case) -> None:
    """A user who may read the run directory locks what there is to lock in it."""
    case.folder.chmod(0o755)
    half(case)
    if (pid := os.fork()) == 0:
        try:
            os.setsid()
            os.setuid(65534)
            file = os.open(case.out / ".lock", os.O_RDONLY)
            fcntl.flock(file, fcntl.LOCK_EX)
            (case.folder / "locked").touch()
        except OSError:
            os._exit(0)
        time.sleep(60)
        os._exit(0)
    time.sleep(0.3)
    case.others.append(pid)


def left_folder(case: Case) -> None:
    """What a launcher has left that was killed an hour ago."""
    folder = case.folder / "convoy-launch-old"
    folder.mkdir(0o700)
    os.utime(folder, (time.time() - 3600,) * 2)


def swept(case: Case) -> None:
    """Remove the folders of those who start ranks, as a sweep of the temporary directory does."""
    folders = list(case.folder.glob("convoy-launch-*"))
    for folder in folders:
        shutil.rmtree(folder)
    case.wrong += [] if folders else ["there was no folder to sweep"]


def attack(case: Case) -> None:
    """As another user of this machine: look for stores of the run on all ports, and write into them."""
    inodes = {
        re.sub(r"\D", "", str(link.readlink()))
        for pid in (*case.processes(), *case.pids)
        for link in Path(f"/proc/{pid}/fd").iterdir()
    }
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    ports = [int(line[1].partition(":")[2], 16) for line in lines if line[3] == "0A" and line[9] in inodes]
    control = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    code = (
        "import datetime, os, sys, torch.distributed as dist\nos.setuid(65534)\n"
        "dist.TCPStore('127.0.0.1', int(sys.argv[1]), None, False, datetime.timedelta(seconds=2)).set('a', 'b')"
    )
    tries = {
        port: subprocess.Popen([sys.executable, "-c", code, str(port)], stderr=subprocess.DEVNULL)
        for port in (*ports, control.port)
    }
    end = time.monotonic() + _ATTACK_S
    case.wait(lambda: time.monotonic() > end or all(each.poll() is not None for each in tries.values()), "the attack")
    for each in tries.values():
        each.kill()
        each.wait()
    found = [port for port, each in tries.items() if each.returncode == 0]
    if found != [control.port]:
        case.wrong.append(
            f"another user could write into stores on ports {found}; that of the attack is {control.port}"
        )


def second(case: Case, line: str, says: str) -> None:
    """Another command at the same time, which must be refused."""
    other = Case(Fault("second", "", "refused", says), case.shared, case.folder / "second")
    other.out = case.out
    other.start(line)
    status, _ = other.finish()
    if status != 2 or not re.search(says, other.said()):
        case.wrong.append(f"the second one: status {status}: {other.said()[-300:]}")
    other.end()


LONG = "--epochs {updates}ba --set evaluate_every=200ba"
"""More of a command: as many updates as kills need."""


def kills(case: Case) -> None:
    """Kill a random rank at a random moment of each new set of ranks, as often as the case says."""
    random.seed(0)
    case.done = None
    (case.folder / "go").touch()
    for number in range(1, case.kills + 1):
        gone = {case.rank(0), case.rank(1), *case.pids}
        time.sleep(random.uniform(0.0, 0.5))
        case.send(signal.SIGKILL, random.randrange(2))
        case.wait(partial(_goes_on, case, gone, number), "an update of the next ranks")


def _goes_on(case: Case, gone: set[int], number: int) -> bool:
    """Whether two ranks that were not there before have gone on, or begun anew, for that many a time."""
    begun = len(re.findall("going on after|how these numbers follow", case.said())) > number
    return begun and len({case.rank(0), case.rank(1)} - gone) == 2
