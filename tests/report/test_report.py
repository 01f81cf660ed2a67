import base64
import gzip
import hashlib
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from convoy import units
from convoy.errors import ConvoyError
from convoy.report import pages
from convoy.report.pages import running
from convoy.report.report import write_report
from report.made_runs import CONFIG, DIGITS, ENVIRONMENT, complete_run, evaluation, metrics, summary, write_run

EVIL = "<script>alert('ship')</script>"
VOID = {"meta", "link", "img", "br", "input", "hr"}


class Page(HTMLParser):
    """The elements, texts and addresses of a page; notices tags that do not match."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.stack: list[str] = []
        self.feed(html)
        assert self.stack == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.stack[-1:] not in (["style"], ["script"]):
            self.text += data.replace(units.SPACE, " ")

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]

    @property
    def words(self) -> str:
        return " ".join(self.text.split())


def page(run: Path) -> Page:
    return Page(write_report(run).read_text(encoding="utf-8"))


def test_a_complete_run_has_every_part(tmp_path: Path) -> None:
    run = complete_run(tmp_path, results=summary(notes=["The head was replaced."]))
    assert write_report(run) == run / "report.html"
    found = page(run)
    for part in (
        "lenet on mnist-mini",
        "Finished",
        "2 min 14 s",
        "61,706",
        "lenet recognizes 93.4 % of 1,000 test images after 4 epochs in 2 min 14 s on 1 device.",
        "Every class in numbers (10)",
        "Precision",
        "833 kFLOP",
        "median; 1.2 % of the time waiting for data",
        "One epoch is 31 updates.",
        "Most confused pairs",
        "0.2 · 128 / 256",
        "linear scaling rule: Goyal et al., 2017",
        "32, 32, 32, 32",
        "The head was replaced.",
        "convoy train lenet --data mnist-mini --out runs/first",
        "label_smoothing: 0.0",
        "2026-03-01 10:00 UTC",
        "2.13.0",
    ):
        assert part in found.words, part
    assert len(found.all("svg")) == 6
    assert len(found.all("img")) == 6
    assert all(image["alt"] for image in found.all("img"))
    assert len([cell for cell in found.all("td") if (cell.get("class") or "").startswith("right")]) == 10


def test_the_page_asks_nothing_of_a_network(tmp_path: Path) -> None:
    found = page(complete_run(tmp_path))
    addresses = [
        value or ""
        for _, attributes in found.elements
        for name, value in attributes.items()
        if name in {"src", "href", "srcset", "action", "poster", "data", "xlink:href"}
    ]
    assert addresses
    assert all(address.startswith(("data:", "#")) for address in addresses)
    html = (tmp_path / "first" / "report.html").read_text()
    assert not re.search(r"url\((?!#)|@import", html)
    (policy,) = [meta["content"] for meta in found.all("meta") if "http-equiv" in meta]
    assert policy is not None and policy.startswith("default-src 'none'")
    (script,) = re.findall(r"<script>(.*?)</script>", html, re.S)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"'sha256-{digest}'" in policy


def test_names_of_strangers_are_text_and_nothing_else(tmp_path: Path) -> None:
    final = evaluation([EVIL, '" onmouseover="alert(1)', "</style><img src=http://x.org/a.png>"])
    final["mistakes"][0]["name"] = EVIL
    found = page(
        complete_run(
            tmp_path,
            config=CONFIG + f'note: "{EVIL}"\n"{EVIL}": 1\n',
            final=final,
            results=summary(
                model=EVIL,
                data=EVIL,
                bad_images=[{"name": f"train/{EVIL}.png", "reason": EVIL, "split": EVIL}],
                derived=[{"name": EVIL, "value": EVIL, "formula": EVIL, "source": EVIL}],
                notes=[EVIL],
            ),
            environment={**ENVIRONMENT, "command": EVIL, "machine": EVIL, EVIL: {EVIL: [EVIL]}},
        )
    )
    assert len(found.all("script")) == 1
    assert found.text.count(EVIL) >= 15
    assert not [name for _, attributes in found.elements for name in attributes if name.startswith("on")]
    assert len(found.all("img")) == 6


def test_a_name_that_is_no_unicode_is_written_all_the_same(tmp_path: Path) -> None:
    bad = [{"name": os.fsdecode(b"ship\xff.png"), "reason": "truncated", "split": "train"}]
    assert r"ship\udcff.png" in page(complete_run(tmp_path, results=summary(bad_images=bad))).text


def test_the_same_run_gives_the_same_bytes(tmp_path: Path) -> None:
    run = complete_run(tmp_path)
    assert write_report(run).read_bytes() == write_report(run).read_bytes()


def test_a_run_of_nothing_but_a_configuration_has_a_page(tmp_path: Path) -> None:
    found = page(write_run(tmp_path))
    assert "No metrics have been recorded yet" in found.words
    assert "There is no final evaluation yet." in found.words
    assert "The command was not recorded." in found.words
    assert found.all("svg") == []


def test_a_run_that_was_stopped_before_its_first_test_says_so(tmp_path: Path) -> None:
    results = summary(status="stopped", steps=28, top1=None, top5=None, loss=None, best_top1=None, best_step=None)
    found = page(write_run(tmp_path, lines=metrics(updates=28)[:-1], results=results))
    assert "Stopped early" in found.words
    assert "stopped after 28 of 124 updates (23 %)" in found.words
    assert "not tested yet" in found.words
    assert len(found.all("svg")) == 6


@pytest.mark.parametrize("lines", [metrics()[:1], [line for line in metrics() if line["split"] == "test"]])
def test_one_split_or_one_line_is_enough(tmp_path: Path, lines: list[dict[str, Any]]) -> None:
    assert page(write_run(tmp_path, lines=lines)).all("svg")


@pytest.mark.slow
def test_a_loss_that_is_not_finite_is_said_in_words(tmp_path: Path) -> None:
    found = page(complete_run(tmp_path, lines=metrics(nan_from=70)))
    assert "The training loss was not a finite number (NaN or infinite) in 14 of 31 lines" in found.words
    assert "first at update 72" in found.words
    assert "The test loss was not a finite number" in found.words
    assert "not a finite number" not in page(complete_run(tmp_path)).words


def test_bad_images_are_counted_and_named(tmp_path: Path) -> None:
    bad = [{"name": f"train/{place:03d}.jpg", "reason": "truncated", "split": "train"} for place in range(250)]
    found = page(complete_run(tmp_path, results=summary(bad_images=bad)))
    assert "250 images could not be read and were skipped." in found.words
    assert "train/199.jpg" in found.words
    assert "train/200.jpg" not in found.words
    assert "all of them in summary.json" in found.words


def test_a_thousand_classes_give_pairs_instead_of_a_matrix(tmp_path: Path) -> None:
    names = [f"n{number:08d}" for number in range(1000)]
    run = complete_run(tmp_path, final=evaluation(names, each=50))
    found = page(run)
    assert "A matrix of 1,000 classes does not fit on a page" in found.words
    assert "Hardest classes" in found.words
    assert (run / "report.html").stat().st_size < 300_000


def test_a_slow_loader_soft_targets_and_a_cut_line_are_remarked(tmp_path: Path) -> None:
    config = CONFIG.replace("label_smoothing: 0.0", "label_smoothing: 0.1")
    run = complete_run(tmp_path, config=config, results=summary(data_wait_share=0.31))
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"split": "tr')
    words = page(run).words
    assert "waited for data in 31 % of its time" in words
    assert "Label smoothing of 0.1" in words
    assert "cut off in the middle of writing" in words


def test_a_missing_picture_leaves_a_place(tmp_path: Path) -> None:
    run = complete_run(tmp_path)
    (run / "mistakes" / "00.png").unlink()
    found = page(run)
    assert "picture missing" in found.words
    assert len(found.all("img")) == 5


def test_the_raw_metrics_can_be_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = complete_run(tmp_path)
    raw = (run / "metrics.jsonl").read_bytes()

    def download() -> tuple[str | None, bytes]:
        (link,) = page(run).all("a")
        return link["download"], base64.b64decode((link["href"] or "").partition(",")[2])

    assert download() == ("metrics.jsonl", raw)
    monkeypatch.setattr(pages, "COMPRESS_FROM", 100)
    name, packed = download()
    assert (name, gzip.decompress(packed)) == ("metrics.jsonl.gz", raw)


def test_a_report_that_cannot_be_made_leaves_the_old_one_and_no_rest(tmp_path: Path) -> None:
    run = complete_run(tmp_path)
    before = write_report(run).read_bytes()
    (run / "summary.json").write_text("{")
    with pytest.raises(ConvoyError, match=r"summary\.json, line 1"):
        write_report(run)
    assert (run / "report.html").read_bytes() == before


def test_a_full_disk_leaves_the_old_report_and_no_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = complete_run(tmp_path)
    before = write_report(run).read_bytes()
    files = sorted(run.iterdir())

    def fail(self: Path, content: bytes) -> int:
        with self.open("wb") as file:
            file.write(content[:100])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", fail)
    with pytest.raises(ConvoyError, match=r"report\.html cannot be written \(No space left on device\)"):
        write_report(run)
    assert sorted(run.iterdir()) == files
    assert (run / "report.html").read_bytes() == before


@pytest.mark.slow
def test_two_classes_and_one_class_are_fine(tmp_path: Path) -> None:
    for names in (["cat"], ["cat", "dog"], DIGITS + DIGITS):
        assert "Most confused pairs" in page(
            complete_run(tmp_path, final=evaluation(names, mistakes=0))
        ).words or names == ["cat"]


def test_options_stay_in_one_line() -> None:
    assert running("go on: --resume, --max-restarts 2 <b>") == (
        'go on: <span class="nowrap">--resume</span>, <span class="nowrap">--max-restarts</span> 2 &lt;b&gt;'
    )
    assert running("a--b and -- and resnet18-cifar") == "a--b and -- and resnet18-cifar"


def test_notes_come_after_the_result_and_remarks_before(tmp_path: Path) -> None:
    run = complete_run(tmp_path, results=summary(notes=["checkpoint every 619 updates"], status="stopped"))
    html = write_report(run).read_text(encoding="utf-8")
    places = [html.index(part) for part in ("The run was stopped", 'class="about"', 'class="tiles"', 'id="mistakes"')]
    assert places == sorted(places)
    assert places[-1] < html.index("checkpoint every 619 updates") < html.index('id="derived"')


def test_the_classes_of_many_are_folded(tmp_path: Path) -> None:
    names = [f"class {number}" for number in range(13)]
    for few, final in ((True, evaluation(names[:12])), (False, evaluation(names))):
        html = write_report(complete_run(tmp_path, final=final)).read_text(encoding="utf-8")
        before = html[: html.index("Every class in numbers")]
        assert before.rstrip().endswith("<details open>\n    <summary>" if few else "<details>\n    <summary>")


def test_of_several_devices_it_is_said_how_to_find_out_whether_they_were_faster(tmp_path: Path) -> None:
    environment = {**ENVIRONMENT, "run": "runs/my first"}
    results = summary(devices=2, plan="sample=2")
    found = page(complete_run(tmp_path, results=results, environment=environment))
    assert "Whether 2 devices were faster than one was not measured. This measures it:" in found.words
    command = "convoy bench lenet --data mnist-mini --recipe 'runs/my first/config.yaml' --devices 1,2 --plans sample=2"
    assert command in found.words
    results["plan"] = "gpu=2: features.* gpu:sample; * gpu:filter"
    assert (
        "--plans 'runs/my first/plan.yaml'"
        in page(complete_run(tmp_path, results=results, environment=environment)).words
    )
    assert "convoy bench" not in page(complete_run(tmp_path, results=summary())).words
