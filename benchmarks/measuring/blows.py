"""The blows of `benchmarks/chaos.py` that are no line of a shell, and what has to be looked at by more than one."""

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
from pathlib import Path

import yaml
from PIL import Image
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from convoy.bench.emulated import network
from convoy.checkpoint.files import write_record
from measuring.faults import Case, Do, Fault, perform

LONG = "--epochs ${updates}ba --set evaluate_every=200ba"
"""More of a command: as many updates as kills need."""
SMALL_DISK = "mkdir disk; mount -t tmpfs chaos disk -o mode=755"
FLIP = (
    f"{sys.executable} -c 'import sys; from pathlib import Path; file = Path(sys.argv[1]); "
    "content = bytearray(file.read_bytes()); content[len(content) // 2] ^= 1; file.write_bytes(content)'"
)
"""Changes one bit of a file, in the middle."""
ONE_COLOR = f"{sys.executable} -c 'import sys; from PIL import Image; Image.new(\"RGB\", (28, 28)).save(sys.argv[1])'"
"""Puts a picture in the place of another, of another size in bytes, for which the network gives what is not finite."""
_ATTACK_S = 20.0


def used_less(megabytes: int) -> Do:
    """Look: the command may not have had more memory."""
    return lambda case: case.wrong.append(f"it used {case.megabytes} MB") if case.megabytes > megabytes else None


def forged(case: Case) -> None:
    """A run whose checkpoints have other values, with checksums that fit."""
    shutil.copytree(case.shared / "half", case.out)
    for folder in (case.out / "checkpoints").glob("step-*"):
        record = json.loads((folder / "checkpoint.json").read_text())
        record["values"]["optimizer"] = {"odd": 1}
        write_record(folder, record["step"], record["identity"], record["values"], record["sha256"])


def foreign(of: str) -> Do:
    """A run directory of a stranger, whose network is what sympy makes of a sentence that calls os.system."""

    def make(case: Case) -> None:
        shutil.copytree(case.shared / of, case.out)
        config = yaml.safe_load((case.out / "config.yaml").read_text())
        options = {"a": f"__import__('os').system('touch {case.folder}/called')"}
        config["model"] |= {"name": "sympy:sympify", "options": options}
        (case.out / "config.yaml").write_text(yaml.safe_dump(config))

    return make


class Call:
    """Calls `os.system` when it is unpickled."""

    def __init__(self, case: Case) -> None:
        self.mark = case.folder / "called"

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (f"touch {self.mark}",)


def uneven(case: Case) -> None:
    """Data of the case's own, of more than one size, so that they are read from their files again and again."""
    shutil.copytree(case.shared / "data", case.folder / "data")
    Image.effect_noise((40, 30), 90).convert("RGB").save(case.folder / "data/train/b/0.png")


def cifar(content: Callable[[Case], bytes]) -> Do:
    """A folder with CIFAR's Python files, all of which hold the same."""

    def make(case: Case) -> None:
        case.data = case.folder / "cifar-10-batches-py"
        case.data.mkdir()
        for name in ("batches.meta", "test_batch", *(f"data_batch_{number}" for number in range(1, 6))):
            (case.data / name).write_bytes(content(case))

    return make


def png(width: int, height: int, depth: int, rows: int = 0) -> Do:
    """A gray picture of nothing but black, in few bytes; only some of its rows are there, if so many are named."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    def make(case: Case) -> None:
        header = struct.pack(">IIBBBBB", width, height, depth, 0, 0, 0, 0)
        packer = zlib.compressobj(9)
        pixels = b"".join(packer.compress(bytes(1 + width * depth // 8)) for _ in range(rows or height))
        chunks = chunk(b"IHDR", header) + chunk(b"IDAT", pixels + packer.flush()) + chunk(b"IEND", b"")
        (case.folder / "picture.png").write_bytes(b"\x89PNG\r\n\x1a\n" + chunks)

    return make


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


def _beside(case: Case, line: str, status: int, says: str = "") -> None:
    """Another command, in a folder within the case's, to its end."""
    other = Case(Fault("", "", ""), case.shared, case.folder / "beside")
    other.data, other.out = case.data, case.out
    other.start(line)
    found, _ = other.finish()
    other.end()
    if found != status or not re.search(says, other.said()):
        case.wrong.append(f"another command: status {found}: {other.said()[-300:]}")


def second(line: str, says: str) -> Do:
    """Another command at the same time, which must be refused."""
    return lambda case: _beside(case, line, 2, says)


def packed(then: str) -> Do:
    """The data as a pack, and a line of a shell."""

    def make(case: Case) -> None:
        _beside(case, f"data pack $data {case.folder}/pack", 0)
        perform(case, then)

    return make


def packed_alike(case: Case) -> None:
    """Look: the pack is, byte for byte, one that was made at once."""
    _beside(case, f"data pack $data {case.folder}/other", 0)
    perform(case, "diff -r pack other")


def two_networks(case: Case) -> None:
    """Each host in a network namespace, with a link to a switch."""
    made = network.made_hosts(network.prefix(), {"node0": "", "node1": ""})
    case.hosts = list(case.stack.enter_context(made).values())


def cut(case: Case) -> None:
    """The second host's link is cut."""
    perform(case, f"ip -n {case.hosts[1].namespace.replace('host1', 'switch')} link set port1 down")


def lock(case: Case) -> None:
    """A user who may read the run directory locks what there is to lock in it."""
    case.folder.chmod(0o755)
    shutil.copytree(case.shared / "half", case.out)
    if (pid := os.fork()) == 0:
        try:
            os.setsid()
            os.setuid(65534)
            fcntl.flock(os.open(case.out / ".lock", os.O_RDONLY), fcntl.LOCK_EX)
            time.sleep(60)
        finally:
            os._exit(0)
    case.stack.callback(os.waitpid, pid, 0)
    case.stack.callback(os.kill, pid, signal.SIGKILL)
    time.sleep(0.3)


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
    end = time.monotonic() + _ATTACK_S * case.slack
    case.wait(lambda: time.monotonic() > end or all(each.poll() is not None for each in tries.values()), "the attack")
    for each in tries.values():
        each.kill()
        each.wait()
    found = [port for port, each in tries.items() if each.returncode == 0]
    if found != [control.port]:
        case.wrong.append(f"another user could write into stores on ports {found}; the attack's is {control.port}")


def kills(case: Case) -> None:
    """Kill a random rank at a random moment of each new set of ranks, as often as the case says."""
    random.seed(0)
    case.done = None
    (case.folder / "go").touch()
    for number in range(1, case.kills + 1):
        gone = {case.rank(0), case.rank(1), *case.pids}
        time.sleep(random.uniform(0.0, 0.5))
        os.kill(case.rank(random.randrange(2)), signal.SIGKILL)

        def goes_on(gone: set[int] = gone, number: int = number) -> bool:
            begun = len(re.findall("going on after|how these numbers follow", case.said())) > number
            return begun and len({case.rank(0), case.rank(1)} - gone) == 2

        case.wait(goes_on, "an update of the next ranks")
