"""How a fault is done to a command of Convoy, and what has become of it; the blows that are no line of a shell."""

import ctypes
import fcntl
import hashlib
import io
import json
import os
import pickle
import random
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tarfile
import time
import zlib
from functools import cache
from pathlib import Path

import numpy as np
import torch
import yaml
from PIL import Image
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from convoy.bench import namespaces
from convoy.checkpoint.files import write_record
from measuring.faults import GROUPS, LINE, RESUME, Case, Fault, state_of

_STATUSES = {"identical": (0,), "fine": (0,), "refused": (2,), "noticed": (1, 2, *range(-19, 0))}
_ATTACK_S = 20.0


def perform(case: Case, blow: str) -> None:
    """Do what a row says: a function below with the words behind it, or a line of a shell, every part of which has to
    end with status 0."""
    if blow.startswith("="):
        name, _, words = blow[1:].partition(" ")
        globals()[name](case, words)
    elif blow:
        line = ["sh", "-ec", blow]
        variables = os.environ | case.variables(blow)
        done = subprocess.run(line, cwd=case.folder, env=variables, capture_output=True, text=True, check=False)
        case.wrong += [f"{blow}: {done.stdout}{done.stderr}"] if done.returncode else []


def lacking(needs: str) -> str:
    """Why a fault cannot be done here, or nothing."""
    if needs == "root":
        return "" if os.geteuid() == 0 else "only root can be another user too"
    if needs == "mounts":
        return "" if _may_mount() else "needs the right to mount a small file system"
    if needs == "groups":
        able = all(os.access(GROUPS / kind / "cgroup.procs", os.W_OK) for kind in ("pids", "memory"))
        return "" if able else "needs control groups (version 1) that it may write"
    return "" if not needs or shutil.which(needs) else f"{needs} is not installed"


@cache
def _may_mount() -> bool:
    """Whether this program may mount; what it mounts then is seen by nobody else, and goes with it."""
    is_apart = sys.platform == "linux" and ctypes.CDLL(None).unshare(0x00020000) == 0  # CLONE_NEWNS
    return is_apart and not subprocess.run(("mount", "--make-rprivate", "/"), capture_output=True).returncode


def do(case: Case) -> Case:
    """Do a fault, and look at what has become of it."""
    try:
        _do(case, case.fault)
        case.sentence = case.sentence.replace(f"{case.folder}/", "").replace(socket.gethostname(), "HOST")
    except Exception as error:
        case.wrong.append(f"{type(error).__name__}: {error}")
    finally:
        case.end()
    return case


def _do(case: Case, fault: Fault) -> None:
    def check(is_right: bool, otherwise: str) -> None:
        case.wrong += [] if is_right else [otherwise]

    perform(case, fault.before)
    if (case.folder / "host-0").exists():
        case.data = Path("data")
    elif (case.folder / "data").exists():
        case.data = case.folder / "data"
    if (case.folder / "cache").exists():
        case.cache = case.folder / "cache"
    if (case.folder / "disk").exists():
        case.out = case.folder / "disk/run"
    case.done = 10 if (case.out / "metrics.jsonl").exists() else None  # of the run that was killed
    struck, note = time.monotonic(), case.folder / "at"
    case.start(f"{fault.line} {fault.options}", fault.at if fault.strike else None)
    if fault.strike:
        case.wait(lambda: note.exists() or state_of(case.pids[0])[0] in "Z", "the place of the blow")
        check(note.exists(), "the run ended before the blow")
        if note.exists():
            case.done, struck = json.loads(note.read_text())[1], time.monotonic()
            perform(case, fault.strike)
            (case.folder / "go").touch()
    status, noticed = case.finish(fault.says)
    said = case.said(1)
    case.seconds = round(noticed - struck, 1)
    case.sentence = "" if status == -signal.SIGKILL else _sentence(said, fault.says)
    check(status in _STATUSES[fault.out], f"status {status}: {_sentence(said, '')}")
    check(bool(re.search(fault.says, said)), f"nothing like {fault.says!r} was said")
    check("Traceback" not in said, "a traceback was printed")
    is_late = fault.out in ("refused", "noticed") and case.seconds > fault.within * case.slack
    check(not is_late, f"it took {case.seconds} s")
    if fault.then:
        case.done = None if case.done is None else max(case.done, *_steps(case.out))
        perform(case, fault.mend)
        case.start(fault.then)
        status, _ = case.finish()
        check(status == 0, f"then status {status}: {_sentence(case.said(case.num), '')}")
    if fault.out == "identical" or RESUME in fault.then:
        case.lost, case.identical = _lost(case), same(_left_alone(case), case.out)
        check(case.identical, "the weights or metrics are others")
    perform(case, fault.after)


def _left_alone(case: Case) -> Path:
    """The run to compare with, made when it is asked for first."""
    if not case.fault.alone:
        return case.shared / "healthy"
    name = f"alone-{hashlib.sha256(case.fault.alone.encode()).hexdigest()[:9]}"
    if not (case.shared / name).exists():
        other = Case(Fault(name, "", "fine", options=case.fault.alone), case.shared, case.folder / name, 1, case.kills)
        case.wrong += do(other).wrong
        other.out.rename(case.shared / name)
    return case.shared / name


def _sentence(said: str, says: str) -> str:
    """The line that says it; else the last that is Convoy's own, else the last."""
    lines = [line for line in said.splitlines() if line.strip()]
    fit = [line for line in lines if says and re.search(says, line)]
    return (fit or [line for line in lines if line.startswith(("convoy: ", "rank "))] or lines or [""])[-1][:400]


def _steps(out: Path) -> list[int]:
    """The updates in the metrics, from 0."""
    metrics = out / "metrics.jsonl"
    return [0, *map(int, re.findall(r'"step": (\d+)', metrics.read_text()) if metrics.exists() else ())]


def _lost(case: Case) -> int | None:
    """Updates that were done and then done again."""
    numbers = re.findall(r"going on after ([\d,]+) of", case.said())
    if case.done is None or (case.fault.alone and not case.fault.then):
        return None  # it was struck at an update of which it left no word
    if not numbers:
        return case.done if case.num > 1 else 0
    return max(0, case.done - int(numbers[-1].replace(",", "")))


def same(healthy: Path, out: Path) -> bool:
    """Whether weights, and metrics but those of time, are the same bits."""
    keys = ("split", "step", "loss", "top1", "lr", "images")
    try:
        weights = [(each / "weights.safetensors").read_bytes() for each in (healthy, out)]
        lines = [list(map(json.loads, (each / "metrics.jsonl").read_text().splitlines())) for each in (healthy, out)]
    except (OSError, ValueError):
        return False
    curves = [[tuple(line.get(key) for key in keys) for line in each] for each in lines]
    return weights[0] == weights[1] and curves[0] == curves[1]


def write_data(folder: Path) -> None:
    """A folder of small pictures of noise in two classes."""
    random = np.random.default_rng(0)
    for split, num in (("train", 24), ("val", 6)):
        for name in ("a", "b"):
            (folder / split / name).mkdir(parents=True)
            for number in range(num):
                pixels = random.integers(0, 255, (28, 28, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / split / name / f"{number}.png")


def prepare(shared: Path) -> None:
    """The data, a run left alone (`healthy`), and one that was killed after 10 of 12 updates (`half`)."""
    shared.mkdir()
    write_data(shared / "data")
    for name, strike in (("healthy", ""), ("half", "kill -KILL $pid")):
        fault = Fault(name, "", "noticed" if strike else "fine", strike=strike, at=("forward", 10, 0))
        case = Case(fault, shared, shared / f"of-{name}")
        case.out = shared / name
        if wrong := do(case).wrong:
            raise SystemExit(f"{name}: {wrong}\n{case.said()}")
        shutil.rmtree(case.folder)


# Blows: functions of a case and of the words that a row gives them.


def used_less(case: Case, megabytes: str) -> None:
    """Look: the command may not have had more memory."""
    case.wrong += [f"it used {case.megabytes} MB"] if case.megabytes > int(megabytes) else []


def hang_up(case: Case, _: str) -> None:
    """Who reads standard output ends."""
    case.hang_up()


def forged(case: Case, _: str) -> None:
    """A run whose checkpoints have other values, with checksums that fit."""
    shutil.copytree(case.shared / "half", case.out)
    for folder in (case.out / "checkpoints").glob("step-*"):
        record = json.loads((folder / "checkpoint.json").read_text())
        record["values"]["optimizer"] = {"odd": 1}
        write_record(folder, record["step"], record["identity"], record["values"], record["sha256"])


def foreign(case: Case, of: str) -> None:
    """A run directory of a stranger, whose network is what sympy makes of a sentence that calls os.system."""
    shutil.copytree(case.shared / of, case.out)
    config = yaml.safe_load((case.out / "config.yaml").read_text())
    options = {"a": f"__import__('os').system('touch {case.folder}/called')"}
    config["model"] |= {"name": "sympy:sympify", "options": options}
    (case.out / "config.yaml").write_text(yaml.safe_dump(config))


class Call:
    """Calls `os.system` when it is unpickled."""

    def __init__(self, case: Case) -> None:
        self.mark = case.folder / "called"

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (f"touch {self.mark}",)


def weights_that_call(case: Case, _: str) -> None:
    """A pickle."""
    torch.save({"a": Call(case)}, case.folder / "weights.pth")


def cifar(case: Case, what: str) -> None:
    """A folder with CIFAR's Python files, all of which hold the same."""
    contents = {"endless": b"\x80\x04}(" + b"K\x01" + b"2\x86" * 60 + b"K\x01u."}
    contents |= {"digits": b"}I" + b"9" * 5000 + b"\nK\x01s.", "calls": pickle.dumps(Call(case))}
    case.data = case.folder / "cifar-10-batches-py"
    case.data.mkdir()
    for name in ("batches.meta", "test_batch", *(f"data_batch_{number}" for number in range(1, 6))):
        (case.data / name).write_bytes(contents[what])


def recipe(case: Case, what: str) -> None:
    """A recipe of bad will."""
    lists = [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9 if n else ['1'])}]" for n in range(11)]
    texts = {"aliases": "\n".join(lists), "depth": "a: " + "[" * 5000 + "]" * 5000}
    texts["tag"] = "a: !!python/object/apply:os.system [true]"
    (case.folder / "recipe.yaml").write_text(texts[what])


def png(case: Case, words: str) -> None:
    """A gray picture of so many columns, rows and bits, of nothing but black, in few bytes; only some of its rows are
    there, if so many are named."""
    width, height, depth, *rows = map(int, words.split())

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, depth, 0, 0, 0, 0)
    packer = zlib.compressobj(9)
    pixels = b"".join(packer.compress(bytes(1 + width * depth // 8)) for _ in range((rows or [height])[0]))
    chunks = chunk(b"IHDR", header) + chunk(b"IDAT", pixels + packer.flush()) + chunk(b"IEND", b"")
    (case.folder / "picture.png").write_bytes(b"\x89PNG\r\n\x1a\n" + chunks)


def tar(case: Case, _: str) -> None:
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


def second(case: Case, what: str) -> None:
    """Another command at the same time, which must be refused."""
    says = "another process is training" + ("|already holds a run" if what == "again" else "")
    _beside(case, LINE if what == "again" else RESUME, 2, says)


def packed(case: Case, then: str) -> None:
    """The data as a pack, and a line of a shell."""
    _beside(case, f"data pack $data {case.folder}/pack", 0)
    perform(case, then)


def packed_alike(case: Case, _: str) -> None:
    """Look: the pack is, byte for byte, one that was made at once."""
    _beside(case, f"data pack $data {case.folder}/other", 0)
    perform(case, "diff -r pack other")


def two_networks(case: Case, _: str) -> None:
    """Each host in a network namespace, with a link to a switch."""
    made = namespaces.made_hosts(namespaces.prefix(), {"node0": "", "node1": ""})
    case.hosts = list(case.stack.enter_context(made).values())


def cut(case: Case, _: str) -> None:
    """The second host's link is cut."""
    perform(case, f"ip -n {case.hosts[1].namespace.replace('host1', 'switch')} link set port1 down")


def lock(case: Case, _: str) -> None:
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


def attack(case: Case, _: str) -> None:
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


def kills(case: Case, _: str) -> None:
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
