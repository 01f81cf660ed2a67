"""All that is to be known of a GPU, in so many minutes: the trainer, recorded updates, ranks, exactness, predictions.

    python benchmarks/gpu_day.py --minutes 12 --out day.json            everything, most important first
    python benchmarks/gpu_day.py --minutes 3 --sections loop,trainer
    python benchmarks/gpu_day.py --minutes 3 --device cpu               tries the program, with small work

Every section is a process of its own, and ends with its share of the time; what it has measured by then counts. A line
is printed as soon as it is known, and the table at the end. ResNet-50 at 224 px in bf16 and channels_last, SGD with
momentum; both sides of a ratio are measured in one process, after each other.
"""

import argparse
import contextlib
import io
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gpu_ranks
import numpy as np
import torch
import torch.nn.functional as F
from measuring import harness, machine
from measuring.dispatch import fake_ranks
from PIL import Image
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import convoy
from convoy import models
from convoy.engine.network import network_of
from convoy.engine.recorded import Recorded, graph_on, leave_default_stream

Say = Callable[..., None]
WARM_UP = 12
"""Updates before any is timed: recorded ones have proved themselves by then."""


class Bench:
    """What a section works with."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.device = torch.device(options.device)
        self.on_gpu = self.device.type == "cuda"
        self.size, self.updates = (224, 30) if self.on_gpu else (32, 2)
        self.batches = (256, 32, 8) if self.on_gpu else (4,)
        self.model = "resnet50" if self.on_gpu else "resnet18"
        self.work = Path(options.work)
        torch.backends.cudnn.benchmark = True

    def network(self, name: str | None = None) -> nn.Module:
        torch.manual_seed(0)
        if name is None and not self.on_gpu:
            model = models.create("resnet18", num_classes=1000)
        else:
            model = gpu_ranks.MODELS[name or "resnet50"]()
        model.train().to(device=self.device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return model

    def batch(self, number: int) -> tuple[Tensor, Tensor]:
        images = torch.rand(number, 3, self.size, self.size, device=self.device)
        labels = torch.randint(1000, (number,), device=self.device)
        return images.to(memory_format=torch.channels_last), labels

    def autocast(self) -> Any:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.on_gpu)

    def wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def rates(self, batch: int, update: Callable[[], object]) -> dict[str, float]:
        """Images a second, milliseconds of an update, and of the host alone with nothing queued before."""
        for _ in range(WARM_UP if self.on_gpu else 1):
            update()
        host = []
        for _ in range(5 if self.on_gpu else 1):
            self.wait()
            began = time.perf_counter()
            update()
            host.append(time.perf_counter() - began)
        self.wait()
        began = time.perf_counter()
        for _ in range(self.updates):
            update()
        self.wait()
        took = (time.perf_counter() - began) / self.updates
        return {"images_per_s": batch / took, "ms": 1e3 * took, "host_ms": 1e3 * statistics.median(host)}

    def loop(self, net: nn.Module, called: Any, batch: int, record: bool = False) -> Callable[[], None]:
        """Updates as a loop of one's own does them."""
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-5, fused=self.on_gpu)
        images, labels = self.batch(batch)

        def passes(images: Tensor, labels: Tensor) -> Tensor:
            with self.autocast():
                loss = F.cross_entropy(called(images), labels)
            loss.backward()
            return loss

        step = convoy.recorded(net, passes) if record else passes

        def update() -> None:
            optimizer.zero_grad(set_to_none=True)
            step(images, labels)
            optimizer.step()

        return update


def loop(bench: Bench, say: Say) -> None:
    """A loop of one's own: plain PyTorch, and Convoy on one device, as it runs and recorded."""
    for batch in bench.batches:
        plain = bench.network()
        say("plain, eager", batch=batch, **bench.rates(batch, bench.loop(plain, plain, batch)))
        for record in (True, False):
            net = convoy.parallelize(bench.network(), "serial", example=bench.batch(batch)[0])
            name = f"Convoy, {'recorded' if record else 'eager'}"
            say(name, batch=batch, **bench.rates(batch, bench.loop(net, net, batch, record)))
    for batch in bench.batches[:2] if bench.on_gpu else ():
        for library, record in (("plain", False), ("Convoy", False), ("Convoy", True)):
            torch.compiler.reset()
            net = bench.network()
            if library == "Convoy":
                net = convoy.parallelize(net, "serial", example=bench.batch(batch)[0])
            name = f"{library}, compiled{', recorded' if record else ''}"
            say(name, batch=batch, **bench.rates(batch, bench.loop(net, torch.compile(net), batch, record)))


def trainer(bench: Bench, say: Say) -> None:
    """`convoy train` with no flags but the batch, from pictures of every kind."""
    batch = bench.batches[0]
    photos, raw, memory = (bench.work / name for name in ("photos", "raw", "memory"))
    photographs(photos, 2048 if bench.on_gpu else 24)
    harness.run_convoy("data", "pack", str(photos), str(raw), "--short-side", "256" if bench.on_gpu else "40", "--raw")
    harness.write_images(memory, 4 * batch, bench.size)
    crop = "data.augment={crop: pad, flip: true}"
    ways: list[tuple[str, Path, list[str]]] = [
        ("raw pack", raw, []),
        ("raw pack, --compile", raw, ["--compile"]),
        ("pictures in memory", memory, ["--set", crop, "--set", "data.channels=3"]),
        ("raw pack, --cuda-graphs off", raw, ["--cuda-graphs", "off"]),
        ("JPEG", photos, []),
        ("JPEG, --compile", photos, ["--compile"]),
    ]
    for name, data, flags in ways if bench.on_gpu else ways[:2]:
        out = bench.work / name.replace(" ", "-").replace(",", "")
        updates = 150 if bench.on_gpu else 8
        keys: dict[str, Any] = (
            {"data__image_size": bench.size} if bench.on_gpu else {"data__image_size": 32, "data__resize": 36}
        )
        common = ["--batch", str(batch), "--device", str(bench.device), *flags]
        lines, log = harness.train(bench.model, data, out, updates, *common, log_every="10ba", **keys)
        steady = [line for line in lines if line["step"] > updates * 2 // 3]
        waits = [line["data_wait_s"] for line in steady if line.get("data_wait_s") is not None]
        rates = [float(line["images_per_s"]) for line in steady]
        notes = [line for line in log.splitlines() if "CUDA graph" in line or "one pass" in line or "pictures" in line]
        wait = statistics.fmean(waits) if waits else 0.0
        say(name, batch=batch, images_per_s=statistics.median(rates), data_wait_s=wait, notes=notes[:6])


def ranks(bench: Bench, say: Say) -> None:
    """The first of 8 GPUs, whose others are not there: Convoy's updates, as they run and recorded, beside DDP's."""
    for batch in (32, 256) if bench.on_gpu else (4,):
        micro = min(32, batch)
        with fake_ranks(8):
            ddp = DistributedDataParallel(bench.network(), gradient_as_bucket_view=True)
            ddp.register_comm_hook(None, lambda _, bucket: at_once(bench, bucket.buffer()))
            say("DDP, rank 0 of 8", batch=batch, **bench.rates(batch, bench.loop(ddp, ddp, batch)))
        for number, record in itertools.product((8, 64) if batch == 32 else (8,), (True, False)):
            for norm in ("microbatch", "sync", "local"):
                with fake_ranks(number):
                    update = rank_update(bench, norm, number, batch, micro, record)
                    name = f"rank 0 of {number}, {norm}, {'recorded' if record else 'eager'}"
                    say(name, batch=batch, **bench.rates(batch, update))


def rank_update(bench: Bench, norm: Any, number: int, batch: int, micro: int, record: bool) -> Callable[[], None]:
    """An update of rank 0 of so many, as the trainer makes it; the fake group gives each rank's own numbers."""
    leave_default_stream(bench.device)
    images, labels = bench.batch(batch)
    model = bench.network()
    made = gpu_ranks.convoy_passes(
        model, images, bench.autocast(), ranks=number, batch_norm=norm, microbatch=micro, merge=batch // micro
    )
    optimizer = made.network.share(
        torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-5, fused=bench.on_gpu)
    )
    graph = graph_on(bench.device)

    def passes(step: int, inputs: Sequence[Tensor]) -> list[Tensor]:
        return [made.passes(step, *inputs)]

    step: Callable[[int, Sequence[Tensor]], Any] = passes
    if record and graph is not None:
        step = Recorded(passes, model, made.network.context, graph, tell=lambda text: print(text, file=sys.stderr))
    updates = itertools.count()

    def update() -> None:
        optimizer.zero_grad(set_to_none=True)
        step(next(updates), [images, labels])
        with made.network.stepping(optimizer):
            optimizer.step()

    return update


def bits(bench: Bench, say: Say) -> None:
    """Twenty recorded updates beside twenty that run: other pictures, labels, masks and learning rates in each."""
    for name in ("resnet50", "efficientnet_b0", "alexnet", "convnext_t"):
        results: list[list[Tensor]] = []
        told: list[str] = []
        for record in (False, False, True):
            torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = False, True
            leave_default_stream(bench.device)
            net = bench.network(name)
            batch = 16 if bench.on_gpu else 2
            net = convoy.parallelize(net, "serial", example=bench.batch(batch)[0], seed=3)
            optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
            step = convoy.recorded(net, passes_of(bench, net)) if record else passes_of(bench, net)
            for update in range(20 if bench.on_gpu else 7):
                torch.manual_seed(update)
                images, labels = bench.batch(batch)
                optimizer.param_groups[0]["lr"] = 0.01 / (1 + update)
                optimizer.zero_grad(set_to_none=True)
                step(images, labels)
                optimizer.step()
            if record and bench.on_gpu:
                told = [str(vars(step)["_recorded"].refusal)]
            results.append([x.detach().double().cpu() for x in net.state_dict().values()])
        first, second, replayed = results
        say(
            f"bits, {name}",
            two_runs=apart(first, second),
            replayed=apart(first, replayed),
            same_bits=all(map(torch.equal, first, replayed)),
            refused=told,
        )


def passes_of(bench: Bench, net: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    def passes(images: Tensor, labels: Tensor) -> Tensor:
        with bench.autocast():
            loss = F.cross_entropy(net(images), labels)
        loss.backward()
        return loss

    return passes


def apart(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    return max(float((x - y).abs().max() / x.abs().max().clamp(min=1e-12)) for x, y in zip(a, b, strict=True))


def failures(bench: Bench, say: Say) -> None:
    """A recording that fails leaves no trace: the generator works, memory comes back, and the next one succeeds."""
    leave_default_stream(bench.device)
    graph = graph_on(bench.device)
    net = convoy.parallelize(bench.network(), "serial", example=bench.batch(8)[0])
    images, labels = bench.batch(8)

    def broken(step: int, inputs: Sequence[Tensor]) -> list[Tensor]:
        loss = passes_of(bench, net)(*inputs)
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            loss.item()
        return [loss]

    if graph is None:
        return
    told: list[str] = []
    before = torch.cuda.memory_allocated()
    tried = Recorded(broken, net, network_of(net).context, graph, tell=told.append)
    for update in range(6):
        net.zero_grad(set_to_none=True)
        tried(update, [images, labels])
    net.zero_grad(set_to_none=True)
    del tried
    torch.rand(4, device=bench.device)
    left = torch.cuda.memory_allocated() - before
    torch.cuda.empty_cache()
    again = bench.rates(8, bench.loop(net, net, 8, record=True))
    say("a failed recording", told=told, bytes_left=left, reserved=torch.cuda.memory_reserved(), **again)


def networks(bench: Bench, say: Say) -> None:
    """Other networks, in a loop of one's own."""
    for name in ("efficientnet_b0", "convnext_t", "alexnet") if bench.on_gpu else ():
        for batch in (128, 16):
            plain = bench.network(name)
            say(f"{name}, plain", batch=batch, **bench.rates(batch, bench.loop(plain, plain, batch)))
            for record in (False, True):
                net = convoy.parallelize(bench.network(name), "serial", example=bench.batch(batch)[0])
                kind = "recorded" if record else "eager"
                say(f"{name}, Convoy, {kind}", batch=batch, **bench.rates(batch, bench.loop(net, net, batch, record)))


def tests(bench: Bench, say: Say) -> None:
    """The suite of what runs on GPUs alone, or differs there."""
    for paths in (["tests/engine/test_cuda.py"], ["tests/ops", "tests/comm/test_collectives.py"]):
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:benchmark", "-x" if not bench.on_gpu else "-q"]
        command += ["-p", "no:cacheprovider", *(paths if bench.on_gpu else ["tests/ops/test_recompute.py"])]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        lines = done.stdout.strip().splitlines()
        failed = [line[:300] for line in lines if line.startswith(("FAILED", "ERROR"))][:20]
        say(f"tests, {' '.join(paths)}", result=lines[-1] if lines else done.stderr[-300:], failed=failed)


def predict(bench: Bench, say: Say) -> None:
    """An update as the planner predicts it beside the measured one."""
    out = bench.work / "predict.json"
    command = [sys.executable, "benchmarks/gpu.py", "--predict", "--ways", "eager", "--rounds", "2", "--out", str(out)]
    command += ["--batches", "8,64,256"]
    if not bench.on_gpu:
        command = [*command[:-1], "4", "--device", "cpu", "--precision", "fp32", "--size", "32", "--updates", "2"]
        command += ["--model", "resnet18"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        say("predictions", error=done.stderr[-500:])
        return
    for case in json.loads(out.read_text(encoding="utf-8"))["cases"]:
        ours = next(side["rates"] for side in case["sides"] if side["library"] == "Convoy")
        measured, batch = case["batch"] / statistics.median(ours), case["batch"]
        off = case["predicted_s"] / measured - 1
        say("predicted by profile", batch=batch, ms=1e3 * measured, predicted_ms=1e3 * case["predicted_s"], off=off)


def doctor(bench: Bench, say: Say) -> None:
    """What holds the trainer back, and how long it takes to say so."""
    photos = bench.work / "doctor-photos"
    photographs(photos, 2048 if bench.on_gpu else 24)
    began = time.perf_counter()
    command = ["doctor", "train", bench.model, "--data", str(photos), "--batch", str(bench.batches[0])]
    answer = harness.run_convoy(*command, "--device", str(bench.device), "--set", f"data.image_size={bench.size}")
    say("doctor, JPEG", seconds=time.perf_counter() - began, answer=answer.strip().splitlines()[-8:])


def resume(bench: Bench, say: Say) -> None:
    """A run that is killed and goes on ends with the bytes of one that was left alone."""
    data = bench.work / "digits"
    harness.write_images(data, 256, 32)
    common = ["train", "resnet18", "--data", str(data), "--epochs", "120ba", "--batch", "64", "--reproducible"]
    common += ["--device", str(bench.device), "--set", "checkpoint.every=20ba"]
    if not bench.on_gpu:
        common[common.index("120ba")] = "24ba"
    one, two = bench.work / "one", bench.work / "two"
    harness.run_convoy(*common, "--out", str(one))
    child = subprocess.Popen([sys.executable, "-m", "convoy", *common, "--out", str(two)], stdout=subprocess.DEVNULL)
    for _ in range(1200):
        time.sleep(0.05)
        if list((two / "checkpoints").glob("*")) or child.poll() is not None:
            break
    child.send_signal(signal.SIGKILL)
    child.wait()
    harness.run_convoy("train", str(two), "--resume", "--device", str(bench.device))
    same = (one / "weights.safetensors").read_bytes() == (two / "weights.safetensors").read_bytes()
    say("killed and gone on with", same_bytes=same)


def kernels(bench: Bench, say: Say) -> None:
    """Convoy's batch norm beside torch's: whether it is right, and its time."""
    command = [sys.executable, "benchmarks/batch_norm_kernels.py", "--few"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    say("batch norm kernels", status=done.returncode, output=(done.stdout + done.stderr)[-6000:].splitlines())


SECTIONS: dict[str, tuple[Callable[[Bench, Say], None], float]] = {
    "loop": (loop, 85),
    "trainer": (trainer, 130),
    "ranks": (ranks, 70),
    "failures": (failures, 40),
    "bits": (bits, 90),
    "tests": (tests, 150),
    "kernels": (kernels, 50),
    "predict": (predict, 90),
    "doctor": (doctor, 90),
    "networks": (networks, 90),
    "resume": (resume, 60),
}
"""Most important first, each with the seconds that it may take."""


def photographs(folder: Path, number: int) -> None:
    """JPEG files, of smooth colors and some noise, in four classes; as large as photographs of the web."""
    if folder.exists():
        return
    random = np.random.default_rng(0)
    files = []
    for _ in range(8):
        small = Image.fromarray(random.integers(256, size=(12, 16, 3), dtype=np.uint8))
        large = np.asarray(small.resize((500, 375), Image.Resampling.BICUBIC), dtype=np.int16)
        noise = random.integers(-12, 13, size=large.shape)
        file = io.BytesIO()
        Image.fromarray((large + noise).clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=90)
        files.append(file.getvalue())
    for i in range(number):
        place = folder / f"class{i % 4}"
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{i}.jpg").write_bytes(files[i % len(files)])


def at_once(bench: Bench, bucket: Tensor) -> torch.futures.Future[Tensor]:
    """What DDP's hook gives where nobody else is there."""
    devices: list[int | str | torch.device] = [0] if bench.on_gpu else []
    future: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
    future.set_result(bucket)
    return future


def in_turn(options: argparse.Namespace, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The rows of all sections, as they come."""
    ends = time.monotonic() + 60 * options.minutes
    for name in names:
        left = ends - time.monotonic()
        if left < 15:
            yield {"section": name, "name": "not begun: the time is over"}
            continue
        with tempfile.TemporaryDirectory() as work:
            command = [sys.executable, __file__, "--section", name, "--device", options.device, "--work", work]
            child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
            limit = min(SECTIONS[name][1], left - 5)
            timer = threading.Timer(limit, os.killpg, (child.pid, signal.SIGKILL))
            timer.start()
            assert child.stdout is not None
            began, seen = time.monotonic(), 0
            for line in child.stdout:
                with contextlib.suppress(json.JSONDecodeError):
                    yield {"section": name, **json.loads(line)}
                    seen += 1
            status = child.wait()
            timer.cancel()
            took = round(time.monotonic() - began, 1)
            if status:
                why = "its time was over" if status == -signal.SIGKILL else f"exit status {status}"
                yield {"section": name, "name": f"ended after {seen} rows and {took} s: {why}"}


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """The table."""
    lines = [harness.header("section", "what", "batch", "images/s", "ms", "host ms", "else")]
    for values in map(dict, rows):
        first = [values.pop(key, "") for key in ("section", "name", "batch")]
        digits = {"images_per_s": ",.0f", "ms": ".2f", "host_ms": ".2f"}
        numbers = [format(values.pop(key), form) if key in values else "" for key, form in digits.items()]
        rest = "; ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in values.items())
        lines.append(harness.row(*first, *numbers, rest[:160].replace("|", "/")))
    return "\n".join(lines)


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--minutes", type=float, default=12, help="for everything (12)")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--sections", type=harness.some(SECTIONS), default=list(SECTIONS), help="some, with commas")
    parser.add_argument("--out", type=Path, help="file for JSON")
    parser.add_argument("--section", help=argparse.SUPPRESS)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("torch sees no CUDA device here: --device cpu tries the program")
    if options.section:
        SECTIONS[options.section][0](
            Bench(options), lambda name, **values: print(json.dumps({"name": name, **values}), flush=True)
        )
        return
    names = options.sections
    if "tests" in names and find_spec("pytest") is None:
        sys.exit("the section tests needs pytest: pip install -e '.[dev]', or leave it out by --sections")
    about = machine.describe() | {"gpu": torch.cuda.get_device_name() if options.device == "cuda" else None}
    print(f"{about['gpu'] or 'no GPU'}; {machine.sentence(about)}", flush=True)
    rows = []
    for row in in_turn(options, names):
        rows.append(row)
        print(json.dumps(row), flush=True)
        harness.save(options.out, {"machine": about, "rows": rows})
    print(markdown(rows), flush=True)


if __name__ == "__main__":
    main()
