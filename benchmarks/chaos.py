"""Breaks trainings, their files and their data in many ways, and looks at what has come of each.

    python benchmarks/chaos.py                       all faults, a table in Markdown at the end
    python benchmarks/chaos.py --only 'SIG|disk'     those with a name like this
    python benchmarks/chaos.py --list                what there is, and what has to come out
    python benchmarks/chaos.py --kills 50            one run whose ranks are killed so often

Every fault is a row of `FAULTS`: how it is done and what has to come out. A run is held at a place of its training
while it is struck, and its weights and metrics are compared, bit for bit, with those of the run left alone. The network
and its data are tiny, so that a fault takes seconds; those that need root, mounts or programs that are not here are
skipped, with the reason. Exit status 1 where something did not come out.
"""

import argparse
import ctypes
import json
import os
import pickle
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict
from datetime import date
from pathlib import Path

import torch
from measuring import blows as b
from measuring.faults import LINE, Case, Fault, Result, do, prepare

TERM, KILL, HUP = signal.SIGTERM, signal.SIGKILL, signal.SIGHUP
TWO, AGAIN = "--devices 2", "--devices 2 --max-restarts 1"
WORKER, MORE = "--set data.workers=1 --epochs 90ba", "--epochs 90ba"
HALF, PICTURE = "train {out} --resume", "predict {shared}/healthy {folder}/picture.png"
STOPPED, DIFFERENT, DISK = "stopped and saved after", "data are not the same everywhere", "No space left on device"

MOUNTS = [False]

# fmt: off
FAULTS = (
    # Killed
    *(
        Fault(f"kill, 1 device, {at}", f"SIGKILL: {at}", "noticed", strike=lambda c: c.send(KILL), at=(at, 8, 0),
              resume="", fast=at == "checkpoint write")
        for at in ("forward", "backward", "update", "checkpoint write", "weights write")
    ),
    *(
        Fault(f"kill, 2 devices, {at}", f"SIGKILL of rank {rank}: {at}", "identical", f"rank {rank} failed",
              strike=lambda c, rank=rank: c.send(KILL, rank),  # type: ignore[misc]
              at=(at, 8, rank), options=AGAIN, fast=at == "collective")
        for at, rank in (("forward", 1), ("backward", 0), ("collective", 1), ("update", 1), ("checkpoint write", 0))
    ),
    Fault("kill, both ranks", "SIGKILL of both ranks", "identical", "rank . failed",
          strike=lambda c: b.kill_all(c.rank(0), c.rank(1)), options=AGAIN),
    Fault("kill, no restarts", "SIGKILL of rank 1", "noticed", "rank 1 failed: .*SIGKILL",
          strike=lambda c: c.send(KILL, 1), at=("forward", 8, 1), options=TWO, resume="--devices 1"),
    Fault("kill, launcher", "SIGKILL of who started the ranks", "noticed", strike=lambda c: c.send(KILL), options=TWO,
          resume=TWO),
    Fault("kill, out of memory", "SIGKILL of all, as by a memory limit", "noticed",
          strike=lambda c: b.kill_all(c.pids[0], c.rank(0), c.rank(1)), options=TWO, resume=TWO),
    Fault("kill, again and again", "SIGKILL of a random rank of each set of ranks, 3 times or as --kills says",
          "identical", "rank . failed", strike=b.kills, at=("forward", 1, 0), alone=b.LONG,
          options=f"--max-restarts 1000 {TWO} {b.LONG}"),
    # Signals
    Fault("SIGTERM, 1 device", "SIGTERM", "noticed", STOPPED, strike=lambda c: c.send(TERM), resume=""),
    Fault("SIGTERM, 2 devices", "SIGTERM", "noticed", STOPPED, strike=lambda c: c.send(TERM), options=TWO, resume=TWO),
    Fault("SIGHUP, 1 device", "SIGHUP: the terminal is closed", "noticed", STOPPED, strike=lambda c: c.send(HUP),
          resume="", fast=True),
    Fault("SIGHUP, 2 devices", "SIGHUP: the terminal is closed", "noticed", STOPPED, strike=lambda c: c.send(HUP),
          options=TWO, resume=TWO),
    Fault("SIGHUP, nohup", "SIGHUP under nohup", "identical", strike=lambda c: c.send(HUP), around="nohup",
          needs="nohup"),
    Fault("SIGHUP, nohup, 2 devices", "SIGHUP under nohup", "identical", strike=lambda c: c.send(HUP), around="nohup",
          needs="nohup", options=TWO),
    Fault("SIGINT, 1 device", "Ctrl-C", "noticed", STOPPED, strike=lambda c: c.send(signal.SIGINT), resume=""),
    Fault("SIGINT, 2 devices", "Ctrl-C", "noticed", STOPPED, strike=lambda c: c.send(signal.SIGINT), options=TWO,
          resume=TWO),
    Fault("SIGQUIT, 2 devices", "SIGQUIT to who started the ranks", "noticed", "SIGQUIT",
          strike=lambda c: c.send(signal.SIGQUIT), options=TWO, resume=""),
    Fault("SIGTERM, one rank", "SIGTERM to rank 1 alone", "noticed", "rank 1 failed: .*SIGTERM",
          strike=lambda c: c.send(TERM, 1), at=("forward", 8, 1), options=TWO, resume=""),
    Fault("SIGTERM, folder swept", "SIGTERM, after the launcher's folder was removed", "noticed", STOPPED,
          strike=b.steps(b.swept, lambda c: c.send(TERM)), options=TWO, resume=""),
    Fault("launcher's folder swept", "its folder in the temporary directory is removed", "identical", strike=b.swept,
          options=TWO),
    Fault("launcher's folder left", "one of a launcher that was killed an hour ago", "identical", before=b.left_folder,
          options=TWO, after=lambda c: b.must_not_exist(c.folder / "convoy-launch-old", c)),
    # Stopped
    Fault("SIGSTOP, rank", "SIGSTOP of rank 1, --timeout 5s", "identical", "held up by rank 1",
          strike=lambda c: c.send(signal.SIGSTOP, 1), at=("forward", 8, 1), options=f"{AGAIN} --timeout 5s"),
    Fault("SIGSTOP, rank, shortly", "SIGSTOP of rank 1 for 2 s, --timeout 8s", "identical",
          strike=lambda c: b.pause(c, 2, 1), options=f"{TWO} --timeout 8s"),
    Fault("SIGSTOP, launcher", "SIGSTOP of who started the ranks for 3 s", "identical",
          strike=lambda c: b.pause(c, 3, None), options=TWO),
    Fault("worker killed", "SIGKILL of a process that loads pictures", "noticed", "a process that loads pictures died",
          strike=lambda c: os.kill(c.worker(), KILL), at=("forward", 1, 0), options=WORKER, resume="", alone=MORE),
    Fault("worker killed, 2 devices", "the same of rank 1", "identical", "a process that loads pictures died",
          strike=lambda c: os.kill(c.worker(1), KILL), at=("forward", 1, 1), options=f"{AGAIN} {WORKER}",
          alone=MORE),
    Fault("worker stopped", "SIGSTOP of a process that loads pictures, --timeout 5s", "noticed", "which is stopped",
          strike=lambda c: os.kill(c.worker(), signal.SIGSTOP), at=("forward", 1, 0), options=f"{WORKER} --timeout 5s",
          resume="", alone=MORE),
    Fault("worker stopped, 2 devices", "the same of rank 1, --timeout 15s", "noticed", "which is stopped", 40,
          strike=lambda c: os.kill(c.worker(1), signal.SIGSTOP), at=("forward", 1, 1),
          options=f"{TWO} {WORKER} --timeout 15s", resume="", alone=MORE),
    # Disks and folders
    Fault("disk full", "a disk of 70 kB; then there is room", "noticed", DISK, before=lambda c: b.small_disk(c, "70k"),
          needs="mounts", resume="", after=b.unmounted, prepare_resume=b.room),
    Fault("disk full, 2 devices", "the same", "noticed", DISK, before=lambda c: b.small_disk(c, "70k"), options=TWO,
          needs="mounts", resume="", after=b.unmounted, prepare_resume=b.room),
    Fault("disk full, goes on", "a disk of 70 kB, checkpoint.on_error=continue; then there is room", "noticed", DISK,
          before=lambda c: b.small_disk(c, "70k"), options="--set checkpoint.on_error=continue", needs="mounts",
          resume="", after=b.unmounted, prepare_resume=b.room),
    Fault("file limit", "no file of more than 20 kB; then there is none", "noticed", "File too large",
          around="prlimit --fsize=20000", needs="prlimit", resume=""),
    Fault("64 open files", "prlimit --nofile=64", "identical", around="prlimit --nofile=64", needs="prlimit"),
    Fault("64 open files, 2 devices", "the same", "identical", around="prlimit --nofile=64", needs="prlimit",
          options=TWO),
    Fault("folder removed", "the run directory is removed", "noticed", "was removed", fast=True,
          strike=lambda c: shutil.rmtree(c.out), after=lambda c: b.must_not_exist(c.out, c)),
    Fault("folder removed, 2 devices", "the run directory is removed", "noticed", "was removed", options=TWO,
          strike=lambda c: shutil.rmtree(c.out), after=lambda c: b.must_not_exist(c.out, c)),
    Fault("folder moved", "the run directory gets another name; then its own again", "noticed", "it was moved",
          strike=lambda c: c.out.rename(c.folder / "elsewhere"), resume="",
          prepare_resume=lambda c: (c.folder / "elsewhere").rename(c.out)),
    Fault("disk unmounted", "the disk of the run directory is unmounted", "noticed", "unmounted",
          before=lambda c: b.small_disk(c, "20m"), strike=b.unmounted, needs="mounts",
          after=lambda c: b.must_not_exist(c.out, c)),
    Fault("two at once", "a second run with the same --out", "identical",
          strike=lambda c: b.second(c, LINE, "another process is training|already holds a run")),
    Fault("resumed while it runs", "--resume of a run that goes on", "identical",
          strike=lambda c: b.second(c, HALF, "another process is training")),
    Fault("locked by a reader", "another user, who may read, locks .lock", "identical", before=b.lock, line=HALF,
          needs="root"),
    # Checkpoints and other files of a run
    *(
        Fault(f"checkpoint, {name}", how, "identical", "step-0+[69]", line=HALF, fast=name == "bit of shard",
              before=b.damaged(file, change))
        for name, how, file, change in (
            ("shard cut", "the newest one's shard ends in the middle", "state/*", lambda old: old[: len(old) // 2]),
            ("bit of shard", "a bit of the newest one's shard is another", "state/*", b.flipped),
            ("bit of record", "a bit of its record is another", "checkpoint.json", b.flipped),
            ("record empty", "its record is empty", "checkpoint.json", lambda old: b""),
            ("later version", "its record is of a later version", "checkpoint.json", b.later),
        )
    ),
    Fault("checkpoint, foreign file", "a file is put into the newest one", "identical", "foreign file", line=HALF,
          before=b.steps(b.half, lambda c: (c.out / "checkpoints/step-00000009/state/more").touch())),
    Fault("checkpoints, all damaged", "all records are empty", "refused", "damaged", line=HALF, fast=True,
          before=lambda c: b.half(c, "checkpoints/*/checkpoint.json")),
    Fault("checkpoints, forged", "other values with checksums that fit", "refused", "other values than Convoy writes",
          before=b.forged, line=HALF),
    Fault("config empty", "config.yaml is empty", "refused", "config.yaml", line=HALF,
          before=lambda c: b.half(c, "config.yaml"), fast=True),
    Fault("metrics binary", "metrics.jsonl ends in bytes that are no text", "identical", line=HALF,
          before=lambda c: b.half(c, "metrics.jsonl", change=lambda old: old + bytes(range(128, 256)))),
    Fault("records empty", "summary.json and environment.json are empty", "identical", line=HALF,
          before=lambda c: b.half(c, "summary.json", "environment.json")),
    # Code that strangers bring
    Fault("stranger's factory", "predict of a run whose network is sympy:sympify of a sentence that calls os.system",
          "refused", "--trust-code", line="predict {out} {shared}/data/val/a/0.png", fast=True,
          before=lambda c: b.foreign(c, "healthy", {"a": f"__import__('os').system('touch {c.folder}/called')"}),
          after=lambda c: b.must_not_exist(c.folder / "called", c)),
    Fault("stranger's factory, resumed", "--resume of it", "refused", "--trust-code", line=HALF,
          before=lambda c: b.foreign(c, "half", {"a": f"__import__('os').system('touch {c.folder}/called')"}),
          after=lambda c: b.must_not_exist(c.folder / "called", c)),
    Fault("weights that call", "weights.pth, a pickle that calls os.system", "refused", "weights",
          options="--weights {folder}/weights.pth",
          before=lambda c: torch.save({"a": b.Call(c.folder / "called")}, c.folder / "weights.pth"),
          after=lambda c: b.must_not_exist(c.folder / "called", c)),
    Fault("weights, header of 1 TB", "weights.safetensors whose header says that it has 1 TB", "refused", "weights",
          options="--weights {folder}/weights.safetensors",
          before=lambda c: (c.folder / "weights.safetensors").write_bytes((1 << 40).to_bytes(8, "little") + b"{}")),
    Fault("CIFAR that calls", "CIFAR's files are pickles that call os.system", "refused", "data_batch_|batches.meta",
          before=lambda c: b.cifar(c, pickle.dumps(b.Call(c.folder / "called"))),
          after=lambda c: b.must_not_exist(c.folder / "called", c)),
    Fault("another user's attack", "user nobody writes into every store that listens", "identical", strike=b.attack,
          options=TWO, needs="root"),
    # Data
    *(
        Fault(f"hosts, {name}", f"two hosts, {how}", "refused", DIFFERENT, ranks=2, fast=name == "a name",
              before=b.hosts(file, change))
        for name, how, file, change in (
            ("a picture", "one with another picture under the same name", "train/a/0.png", b.repaint),
            ("a name", "one with another name", "train/a/7.png", lambda path: path.rename(path.with_name("00.png"))),
            ("a file fewer", "one with a file fewer", "train/a/7.png", Path.unlink),
            ("a test file fewer", "one with a test file fewer", "val/b/0.png", Path.unlink),
        )
    ),
    Fault("resumed, a file fewer", "a training picture is removed before --resume", "refused", "not those",
          line=HALF + " --data {data}",
          before=b.steps(b.copy, b.half, lambda c: (c.data / "train/a/7.png").unlink())),
    Fault("resumed, a name", "a training picture gets another name before --resume", "refused", "not those",
          line=HALF + " --data {data}",
          before=b.steps(b.copy, b.half, lambda c: (c.data / "train/a/7.png").rename(c.data / "train/a/00.png"))),
    Fault("picture removed", "a picture is removed while the run trains", "noticed", "a/1.png", before=b.uneven,
          strike=lambda c: (c.data / "train/a/1.png").unlink(), at=("forward", 1, 0), options=MORE),
    Fault("picture removed, skipped", "the same with data.bad_images=skip", "fine", before=b.uneven,
          strike=lambda c: (c.data / "train/a/1.png").unlink(), at=("forward", 1, 0),
          options=f"{MORE} --set data.bad_images=skip", after=lambda c: b.expect_named(c, "a/1.png")),
    Fault("not finite", "a picture that gives no finite loss", "noticed", "the loss is nan", before=b.one_color),
    Fault("not finite, 2 devices", "the same", "noticed", "the loss is nan", before=b.one_color, options=TWO),
    Fault("not finite, skipped", "the same with on_nan=skip", "fine", before=b.one_color, options="--set on_nan=skip",
          after=lambda c: b.expect_summary(c, status="finished")),
    Fault("CIFAR, endless key", "130 bytes that are a pair of pairs, 60 deep", "refused", "data_batch_|batches.meta",
          before=lambda c: b.cifar(c, b.doubled(60))),
    Fault("CIFAR, key of 5,000 digits", "a key that is a number of 5,000 digits", "refused", "data_batch_|batches.meta",
          before=lambda c: b.cifar(c, b"}I" + b"9" * 5000 + b"\nK\x01s.")),
    Fault("tar that leads out", "members named ../../escaped0.png and by absolute paths; a link", "fine",
          "training and .* test images", before=b.tar, after=lambda c: b.must_not_exist(c.folder / "escaped1.png", c)),
    Fault("unpack through a link", ".unpacking is a link to a folder of somebody else", "refused",
          "not an empty folder", before=lambda c: b.victim(c, ".unpacking"),
          line="data unpack {folder}/pack {folder}/dest",
          after=lambda c: b.is_as_it_was(c.folder / "victim/precious.npz", c)),
    Fault("pack through a link", ".packing is a link to a folder of somebody else", "refused", "is a link",
          before=lambda c: b.victim(c, ".packing"), line="data pack {data} {folder}/dest",
          after=lambda c: b.is_as_it_was(c.folder / "victim/precious.npz", c)),
    # Files of bad will
    *(
        Fault(f"YAML, {name}", how, "refused", "recipe.yaml", line=LINE + " --recipe {folder}/recipe.yaml",
              before=b.recipe(text), within=5)
        for name, how, text in (
            ("aliases", "500 bytes of aliases that stand for 9^10 values", b.aliases(11)),
            ("a tag", "a tag that calls os.system", "a: !!python/object/apply:os.system [true]"),
            ("depth", "a list in a list, 5,000 deep", "a: " + "[" * 5000 + "]" * 5000),
        )
    ),
    Fault("picture, 16 bit", "PNG of 16 bit with 80 megapixels in some 160 kB", "fine",
          "picture.png", line=PICTURE, before=lambda c: b.png(c.folder / "picture.png", 8900, 8900, 16),
          after=lambda c: b.used_less(c, 1400)),
    Fault("picture, bomb", "PNG that claims 100,000 x 100,000", "refused", "picture.png", line=PICTURE,
          before=lambda c: b.png(c.folder / "picture.png", 100_000, 100_000, 1, rows=9)),
    Fault("picture, pipe", "a FIFO that nobody writes into", "refused", "picture.png", line=PICTURE,
          before=lambda c: os.mkfifo(c.folder / "picture.png")),
    Fault("picture, device", "/dev/zero", "refused", "picture.png", line=PICTURE,
          before=lambda c: (c.folder / "picture.png").symlink_to("/dev/zero")),
    # What it says
    Fault("output closed", "standard output is closed from the start", "identical", output="closed"),
    Fault("output full", "standard output is /dev/full", "identical", output="/dev/full"),
    Fault("output full, 2 devices", "the same", "identical", output="/dev/full", options=TWO),
    Fault("reader gone", "who reads standard output ends", "identical", output="pipe", fast=True,
          strike=lambda c: c.hang_up()),
    Fault("reader gone, 2 devices", "the same", "identical", output="pipe", strike=lambda c: c.hang_up(), options=TWO),
)
# fmt: on


def lacking(needs: str) -> str:
    """Why a fault cannot be done here, or nothing."""
    if needs == "root":
        return "" if os.geteuid() == 0 else "only root can be another user too"
    if needs == "mounts":
        return "" if MOUNTS[0] else "needs the right to mount a small file system"
    return "" if not needs or shutil.which(needs) else f"{needs} is not installed"


def own_mounts() -> bool:
    """Whether this program may mount; what it mounts then is seen by nobody else, and goes with it."""
    is_apart = sys.platform == "linux" and ctypes.CDLL(None).unshare(0x00020000) == 0  # CLONE_NEWNS
    return is_apart and not subprocess.run(("mount", "--make-rprivate", "/"), capture_output=True).returncode


def markdown(results: list[Result]) -> str:
    """The table."""
    lines = ["| fault | how | has to come out | lost updates | noticed | said | came out |", "| --- " * 7 + "|"]
    for one in results:
        came = f"skipped: {one.skipped}" if one.skipped else "; ".join(one.wrong) or "yes"
        came += {True: ", bit-identical", False: "", None: ""}[one.identical]
        seconds = "" if one.seconds is None else f"{one.seconds:.1f} s"
        cells = (one.name, one.how, one.promise, "" if one.lost is None else one.lost, seconds, one.sentence, came)
        lines.append("| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells) + " |")
    return "\n".join(lines)


def main() -> int:
    """Do the faults that are asked for."""
    parser = argparse.ArgumentParser(description="Break trainings in many ways, and look at what has come of each.")
    parser.add_argument("--only", metavar="PATTERN", default="", help="faults whose names have this in them")
    parser.add_argument("--fast", action="store_true", help="the few that the tests do")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    parser.add_argument("--kills", type=int, default=3, help="how often ranks are killed in `kill, again and again`")
    parser.add_argument("--slack", type=float, default=1.0, help="factor for all limits of time, on a busy machine")
    arguments = parser.parse_args()
    chosen = [one for one in FAULTS if re.search(arguments.only, one.name) and (one.fast or not arguments.fast)]
    if arguments.list:
        print("\n".join(f"{one.name:32}{one.promise:42}{one.how}" for one in chosen))
        return 0
    MOUNTS[0] = own_mounts()
    results = []
    with tempfile.TemporaryDirectory(prefix="convoy-chaos-") as name:
        shared = Path(name).resolve() / "shared"
        prepare(shared)
        for number, fault in enumerate(chosen):
            if reason := lacking(fault.needs):
                result = Result(fault.name, fault.how, fault.promise, skipped=reason)
            else:
                result = do(Case(fault, shared, shared.parent / f"case-{number}", arguments.slack, arguments.kills))
                shutil.rmtree(shared.parent / f"case-{number}", ignore_errors=True)
            results.append(result)
            print(f"{fault.name}: {'; '.join(result.wrong) or result.skipped or 'as promised'}", flush=True)
    about = {
        "date": f"{date.today()}",
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
    }
    if arguments.out:
        arguments.out.write_text(json.dumps(about | {"faults": [asdict(one) for one in results]}, indent=1) + "\n")
    wrong, skipped = sum(bool(one.wrong) for one in results), sum(bool(one.skipped) for one in results)
    print(f"\n{markdown(results)}\n\n{len(results)} faults: {wrong} came out wrong, {skipped} skipped ({about})")
    return 1 if wrong else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # what was started ends then, too
    sys.exit(main())
