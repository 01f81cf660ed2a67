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
import os
import pickle
import platform
import re
import shutil
import signal
import sys
import tempfile
from datetime import date
from pathlib import Path

import torch
from measuring import blows as b
from measuring.faults import LINE, RESUME, Case, Fault, do, lacking, prepare

TWO, AGAIN, MORE = "--devices 2", "--devices 2 --max-restarts 1", "--epochs 90ba"
WORKER, RESUME_TWO = f"--set data.workers=1 {MORE}", RESUME + TWO
STOPPED, DISK, OTHER_DATA = "stopped and saved after", "No space left on device", "data are not the same everywhere"
DEAD, FILES_64, ROOM = "a process that loads pictures died", "prlimit --nofile=64", "mount -o remount,size=20m disk"
HALF, DATA = 'cp -r "$shared/half" run', 'cp -r "$shared/data" .'
DAMAGED, HOSTS = f"{HALF}; cd run/checkpoints/$newest", f"mkdir host-0; cd host-0; {DATA}; cd ..; cp -r host-0 host-1"
BY_LINK = "mkdir victim dest; echo 'all my work' > victim/precious.npz; ln -s ../victim dest/"
PREDICT = "predict $shared/healthy $folder/picture.png"
TORCHRUN = f"{sys.executable} -m torch.distributed.run --no-python --nnodes=2 --rdzv-backend=convoy"

# fmt: off
FAULTS = (
    # Killed
    *(
        Fault(f"kill, 1 device, {at}", f"SIGKILL: {at}", "noticed", "", "kill -KILL $pid", then=RESUME, at=(at, 8, 0),
              fast=at == "checkpoint write")
        for at in ("forward", "backward", "update", "checkpoint write", "weights write")
    ),
    *(
        Fault(f"kill, 2 devices, {at}", f"SIGKILL of rank {rank}: {at}", "identical", f"rank {rank} failed",
              strike=f"kill -KILL $rank{rank}", at=(at, 8, rank), options=AGAIN)
        for at, rank in (("forward", 1), ("backward", 0), ("collective", 1), ("update", 1), ("checkpoint write", 0))
    ),
    Fault("kill, both ranks", "SIGKILL of both ranks", "identical", "rank . failed", "kill -KILL $rank0 $rank1", AGAIN),
    Fault("kill, no restarts", "SIGKILL of rank 1", "noticed", "rank 1 failed: .*SIGKILL", "kill -KILL $rank1", TWO,
          RESUME + "--devices 1", at=("forward", 8, 1)),
    Fault("kill, launcher", "SIGKILL of who started the ranks", "noticed", "", "kill -KILL $pid", TWO, RESUME_TWO),
    Fault("kill, out of memory", "SIGKILL of all, as by a memory limit", "noticed", "", "kill -KILL $pid $rank0 $rank1",
          TWO, RESUME_TWO),
    Fault("kill, again and again", "SIGKILL of a random rank of each set of ranks, 3 times or as --kills says",
          "identical", "rank . failed", b.kills, f"--max-restarts 1000 {TWO} {b.LONG}", at=("forward", 1, 0),
          alone=b.LONG),
    # Signals
    *(
        Fault(f"{name}, {num} device{'s' * (num > 1)}", how, "noticed", STOPPED, f"kill -{name[3:]} $pid",
              f"--devices {num}" * (num > 1), RESUME + TWO * (num > 1), fast=(name, num) == ("SIGHUP", 1))
        for name, how in (("SIGTERM", "SIGTERM"), ("SIGHUP", "SIGHUP: the terminal is closed"), ("SIGINT", "Ctrl-C"))
        for num in (1, 2)
    ),
    *(
        Fault(f"SIGHUP, nohup{', 2 devices' if options else ''}", "SIGHUP under nohup", "identical", "",
              "kill -HUP $pid", options, around="nohup", needs="nohup")
        for options in ("", TWO)
    ),
    Fault("SIGQUIT, 2 devices", "SIGQUIT to who started the ranks", "noticed", "SIGQUIT", "kill -QUIT $pid", TWO,
          RESUME),
    Fault("SIGTERM, one rank", "SIGTERM to rank 1 alone", "noticed", "rank 1 failed: .*SIGTERM", "kill -TERM $rank1",
          TWO, RESUME, at=("forward", 8, 1)),
    Fault("SIGTERM, folder swept", "SIGTERM, after the launcher's folder was removed", "noticed", STOPPED,
          "rm -r convoy-launch-*; kill -TERM $pid", TWO, RESUME),
    Fault("launcher's folder swept", "its folder in the temporary directory is removed", "identical", "",
          "rm -r convoy-launch-*", TWO),
    Fault("launcher's folder left", "one of a launcher that was killed an hour ago", "identical", options=TWO,
          before="mkdir -m 700 convoy-launch-old; touch -d '1 hour ago' convoy-launch-old",
          after="test ! -e convoy-launch-old"),
    # Stopped
    Fault("SIGSTOP, rank", "SIGSTOP of rank 1, --timeout 5s", "identical", "held up by rank 1", "kill -STOP $rank1",
          f"{AGAIN} --timeout 5s", at=("forward", 8, 1)),
    Fault("SIGSTOP, rank, shortly", "SIGSTOP of rank 1 for 2 s, --timeout 8s", "identical", "",
          "kill -STOP $rank1; sleep 2; kill -CONT $rank1", f"{TWO} --timeout 8s"),
    Fault("SIGSTOP, launcher", "SIGSTOP of who started the ranks for 3 s", "identical", "",
          "kill -STOP $pid; sleep 3; kill -CONT $pid", TWO),
    Fault("worker killed", "SIGKILL of a process that loads pictures", "noticed", DEAD, "kill -KILL $worker0", WORKER,
          RESUME, at=("forward", 1, 0), alone=MORE),
    Fault("worker killed, 2 devices", "the same of rank 1", "identical", DEAD, "kill -KILL $worker1",
          f"{AGAIN} {WORKER}", at=("forward", 1, 1), alone=MORE),
    Fault("worker stopped", "SIGSTOP of a process that loads pictures, --timeout 5s", "noticed", "which is stopped",
          "kill -STOP $worker0", f"{WORKER} --timeout 5s", RESUME, at=("forward", 1, 0), alone=MORE),
    Fault("worker stopped, 2 devices", "the same of rank 1, --timeout 15s", "noticed", "which is stopped",
          "kill -STOP $worker1", f"{TWO} {WORKER} --timeout 15s", RESUME, at=("forward", 1, 1), alone=MORE, within=40),
    # Disks, folders, limits and links
    *(
        Fault(f"disk full{name}", how, "noticed", DISK, options=options, then=RESUME, before=b.SMALL_DISK + ",size=70k",
              mend=ROOM, after="umount -l disk", needs="mounts")
        for name, how, options in (
            ("", "a disk of 70 kB; then there is room", ""), (", 2 devices", "the same", TWO),
            (", goes on", "a disk of 70 kB, checkpoint.on_error=continue; then there is room",
             "--set checkpoint.on_error=continue"),
        )
    ),
    Fault("file limit", "no file of more than 20 kB; then there is none", "noticed", "File too large", then=RESUME,
          around="prlimit --fsize=20000", needs="prlimit"),
    Fault("64 open files", "prlimit --nofile=64", "identical", around=FILES_64, needs="prlimit"),
    Fault("64 open files, 2 devices", "the same", "identical", options=TWO, around=FILES_64, needs="prlimit"),
    Fault("12 processes", "a control group with 12 processes and threads", "noticed", "rank . failed", options=TWO,
          before="echo 12 > $pids/pids.max", needs="groups"),
    Fault("memory, 2 devices", "a control group with 400 MB", "noticed", "out of memory", options=TWO,
          before="echo 400M > $memory/memory.limit_in_bytes", needs="groups"),
    Fault("folder removed", "the run directory is removed", "noticed", "was removed", "rm -r run", fast=True,
          after="test ! -e run"),
    Fault("folder removed, 2 devices", "the run directory is removed", "noticed", "was removed", "rm -r run", TWO,
          after="test ! -e run"),
    Fault("folder moved", "the run directory gets another name; then its own again", "noticed", "it was moved",
          "mv run elsewhere", then=RESUME, mend="mv elsewhere run"),
    Fault("disk unmounted", "the disk of the run directory is unmounted", "noticed", "unmounted", "umount -l disk",
          before=b.SMALL_DISK, after="test ! -e disk/run", needs="mounts"),
    Fault("two at once", "a second run with the same --out", "identical", "",
          b.second(LINE, "another process is training|already holds a run")),
    Fault("resumed while it runs", "--resume of a run that goes on", "identical", "",
          b.second(RESUME, "another process is training")),
    Fault("locked by a reader", "another user, who may read, locks .lock", "identical", line=RESUME, before=b.lock,
          needs="root"),
    Fault("link cut", "the link between two hosts is cut for good, --timeout 6s", "noticed", "has not moved for",
          b.cut, "--timeout 6s", ranks=2, before=b.two_networks, needs="root", within=60,
          around=f"{TORCHRUN} --rdzv-endpoint=10.213.0.1 --rdzv-conf read_timeout=10"),
    Fault("clock set back", "time.time() goes back by an hour", "identical", "", "echo -3600 > clock"),
    Fault("profile store of garbage", "the profile store is a file of random bytes", "identical",
          before="mkdir -p cache/profiles; head -c 9999 /dev/urandom > cache/profiles/profiles.sqlite"),
    # Checkpoints and other files of a run
    *(
        Fault(f"checkpoint, {name}", how, "identical", "step-0+[69]", line=RESUME, fast=name == "bit of shard",
              before=f"{DAMAGED}; {change}")
        for name, how, change in (
            ("shard cut", "the newest one's shard ends in the middle", "truncate -s -999 state/*"),
            ("bit of shard", "a bit of the newest one's shard is another", f"{b.FLIP} state/*"),
            ("bit of record", "a bit of its record is another", f"{b.FLIP} checkpoint.json"),
            ("record empty", "its record is empty", ": > checkpoint.json"),
            ("later version", "its record is of a later version",
             "sed -i s/checkpoint-1/checkpoint-9/ checkpoint.json"),
            ("foreign file", "a file is put into the newest one", "touch state/more"),
        )
    ),
    Fault("checkpoints, all damaged", "all records are empty", "refused", "damaged", line=RESUME, fast=True,
          before=f"{HALF}; for each in run/checkpoints/*/checkpoint.json; do : > $each; done"),
    Fault("checkpoints, forged", "other values with checksums that fit", "refused", "other values than Convoy writes",
          line=RESUME, before=b.forged),
    Fault("config empty", "config.yaml is empty", "refused", "config.yaml", line=RESUME, fast=True,
          before=f"{HALF}; : > run/config.yaml"),
    Fault("metrics binary", "metrics.jsonl ends in bytes that are no text", "identical", line=RESUME,
          before=f"{HALF}; printf '\\200\\277\\377' >> run/metrics.jsonl"),
    Fault("records empty", "summary.json and environment.json are empty", "identical", line=RESUME,
          before=f"{HALF}; : > run/summary.json; : > run/environment.json"),
    # Code that strangers bring
    Fault("stranger's factory", "predict of a run whose network is sympy:sympify of a sentence that calls os.system",
          "refused", "--trust-code", line="predict $out $shared/data/val/a/0.png", before=b.foreign("healthy"),
          after="test ! -e called", fast=True),
    Fault("stranger's factory, resumed", "--resume of it", "refused", "--trust-code", line=RESUME,
          before=b.foreign("half"), after="test ! -e called"),
    Fault("weights that call", "weights.pth, a pickle that calls os.system", "refused", "weights",
          options="--weights $folder/weights.pth", after="test ! -e called",
          before=lambda c: torch.save({"a": b.Call(c)}, c.folder / "weights.pth")),
    Fault("weights, header of 1 TB", "weights.safetensors whose header says that it has 1 TB", "refused", "weights",
          options="--weights $folder/weights.safetensors",
          before=lambda c: (c.folder / "weights.safetensors").write_bytes((1 << 40).to_bytes(8, "little") + b"{}")),
    Fault("CIFAR that calls", "CIFAR's files are pickles that call os.system", "refused", "data_batch_|batches.meta",
          before=b.cifar(lambda c: pickle.dumps(b.Call(c))), after="test ! -e called"),
    Fault("another user's attack", "user nobody writes into every store that listens", "identical", "", b.attack, TWO,
          needs="root"),
    # Data
    *(
        Fault(f"hosts, {name}", f"two hosts, {how}", "refused", OTHER_DATA, ranks=2, fast=name == "a name",
              before=f"{HOSTS}; cd host-1/data; {change}")
        for name, how, change in (
            ("a picture", "one with another picture under the same name", f"{b.ONE_COLOR} train/a/0.png"),
            ("a name", "one with another name", "mv train/a/7.png train/a/00.png"),
            ("a file fewer", "one with a file fewer", "rm train/a/7.png"),
            ("a test file fewer", "one with a test file fewer", "rm val/b/0.png"),
        )
    ),
    Fault("resumed, a file fewer", "a training picture is removed before --resume", "refused", "not those",
          line=f"{RESUME} --data $data", before=f"{DATA}; {HALF}; rm data/train/a/7.png"),
    Fault("resumed, a name", "a training picture gets another name before --resume", "refused", "not those",
          line=f"{RESUME} --data $data", before=f"{DATA}; {HALF}; mv data/train/a/7.png data/train/a/00.png"),
    Fault("picture removed", "a picture is removed while the run trains", "noticed", "a/1.png",
          "rm data/train/a/1.png", MORE, before=b.uneven, at=("forward", 1, 0)),
    Fault("picture removed, skipped", "the same with data.bad_images=skip", "fine", "", "rm data/train/a/1.png",
          f"{MORE} --set data.bad_images=skip", before=b.uneven, at=("forward", 1, 0),
          after="grep a/1.png run/summary.json"),
    *(
        Fault(f"not finite{name}", how, out, says, options=options, after=after,
              before=f"{DATA}; {b.ONE_COLOR} data/train/a/5.png")
        for name, how, out, says, options, after in (
            ("", "a picture that gives no finite loss", "noticed", "the loss is nan", "", ""),
            (", 2 devices", "the same", "noticed", "the loss is nan", TWO, ""),
            (", skipped", "the same with on_nan=skip", "fine", "", "--set on_nan=skip",
             "grep '\"status\": \"finished\"' run/summary.json"),
        )
    ),
    Fault("CIFAR, endless key", "130 bytes that are a pair of pairs, 60 deep", "refused", "data_batch_|batches.meta",
          before=b.cifar(lambda _: b"\x80\x04}(" + b"K\x01" + b"2\x86" * 60 + b"K\x01u.")),
    Fault("CIFAR, key of 5,000 digits", "a key that is a number of 5,000 digits", "refused", "data_batch_|batches.meta",
          before=b.cifar(lambda _: b"}I" + b"9" * 5000 + b"\nK\x01s.")),
    Fault("tar that leads out", "members named ../../escaped0.png and by absolute paths; a link", "fine",
          "training and .* test images", before=b.tar, after="test ! -e escaped1.png"),
    Fault("pack killed", "SIGKILL as it writes its index; then the same again", "noticed", "", "kill -KILL $pid",
          line="data pack $data $folder/pack", at=("pack write", 0, 0), then="data pack $data $folder/pack",
          after=b.packed_alike),
    Fault("unpack through a link", ".unpacking is a link to a folder of somebody else", "refused",
          "not an empty folder", line="data unpack $folder/pack $folder/dest", before=b.packed(f"{BY_LINK}.unpacking"),
          after="test -s victim/precious.npz", fast=True),
    Fault("pack through a link", ".packing is a link to a folder of somebody else", "refused", "is a link",
          line="data pack $data $folder/dest", before=f"{BY_LINK}.packing", after="test -s victim/precious.npz"),
    # Files of bad will
    *(
        Fault(f"YAML, {name}", how, "refused", "recipe.yaml", options="--recipe $folder/recipe.yaml", within=5,
              before=lambda c, text=text: (c.folder / "recipe.yaml").write_text(text))  # type: ignore[misc]
        for name, how, text in (
            ("aliases", "500 bytes of aliases that stand for 9^10 values", "\n".join(
                f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9 if n else ['1'])}]" for n in range(11))),
            ("a tag", "a tag that calls os.system", "a: !!python/object/apply:os.system [true]"),
            ("depth", "a list in a list, 5,000 deep", "a: " + "[" * 5000 + "]" * 5000),
        )
    ),
    Fault("picture, 16 bit", "PNG of 16 bit with 80 megapixels in some 160 kB", "fine", "picture.png", line=PREDICT,
          before=b.png(8900, 8900, 16), after=b.used_less(1400)),
    Fault("picture, bomb", "PNG that claims 100,000 x 100,000", "refused", "picture.png", line=PREDICT,
          before=b.png(100_000, 100_000, 1, rows=9)),
    Fault("picture, pipe", "a FIFO that nobody writes into", "refused", "picture.png", line=PREDICT,
          before="mkfifo picture.png"),
    Fault("picture, device", "/dev/zero", "refused", "picture.png", line=PREDICT, before="ln -s /dev/zero picture.png"),
    # What it says
    Fault("output closed", "standard output is closed from the start", "identical", output="closed"),
    Fault("output full", "standard output is /dev/full", "identical", output="/dev/full"),
    Fault("output full, 2 devices", "the same", "identical", output="/dev/full", options=TWO),
    Fault("reader gone", "who reads standard output ends", "identical", "", Case.hang_up, output="pipe", fast=True),
    Fault("reader gone, 2 devices", "the same", "identical", "", Case.hang_up, TWO, output="pipe"),
)
# fmt: on


def markdown(cases: list[tuple[Case, str]]) -> str:
    """The table of what was done, or why it was skipped."""
    lines = ["| fault | how | has to come out | lost updates | noticed | said | came out |", "| --- " * 7 + "|"]
    for case, skipped in cases:
        fault, seconds = case.fault, "" if case.seconds is None else f"{case.seconds:.1f} s"
        came = f"skipped: {skipped}" if skipped else "; ".join(case.wrong) or "yes"
        came += ", bit-identical" if case.identical else ""
        lost = "" if case.lost is None else case.lost
        cells = (fault.name, fault.how, fault.promise, lost, seconds, case.sentence, came)
        lines.append("| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells) + " |")
    return "\n".join(lines)


def main() -> int:
    """Do the faults that are asked for."""
    parser = argparse.ArgumentParser(description="Break trainings in many ways, and look at what has come of each.")
    parser.add_argument("--only", metavar="PATTERN", default="", help="faults whose names have this in them")
    parser.add_argument("--fast", action="store_true", help="the few that the tests do")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--kills", type=int, default=3, help="how often ranks are killed in `kill, again and again`")
    parser.add_argument("--slack", type=float, default=1.0, help="factor for all limits of time, on a busy machine")
    arguments = parser.parse_args()
    chosen = [one for one in FAULTS if re.search(arguments.only, one.name) and (one.fast or not arguments.fast)]
    if arguments.list:
        print("\n".join(f"{one.name:32}{one.promise:42}{one.how}" for one in chosen))
        return 0
    done = []
    with tempfile.TemporaryDirectory(prefix="convoy-chaos-") as name:
        shared = Path(name).resolve() / "shared"
        prepare(shared)
        for number, fault in enumerate(chosen):
            case = Case(fault, shared, shared.parent / f"case-{number}", arguments.slack, arguments.kills)
            if not (reason := lacking(fault.needs)):
                do(case)
            shutil.rmtree(case.folder, ignore_errors=True)
            done.append((case, reason))
            print(f"{fault.name}: {'; '.join(case.wrong) or reason or 'as promised'}", flush=True)
    wrong, skipped = sum(bool(case.wrong) for case, _ in done), sum(bool(reason) for _, reason in done)
    where = f"{date.today()}, torch {torch.__version__}, {os.cpu_count()} cores, Python {platform.python_version()}"
    print(f"\n{markdown(done)}\n\n{len(done)} faults: {wrong} came out wrong, {skipped} skipped ({where})")
    return 1 if wrong else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # what was started ends then, too
    sys.exit(main())
