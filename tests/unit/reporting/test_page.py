"""The page: it needs no network, it has every figure, and an earlier one outlives a failure."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from ds_finepage.errors import ConfigError
from ds_finepage.reporting import drawing, page
from ds_finepage.reporting.findings import Findings, MemoryRow, memory_row, refused_row
from ds_finepage.reporting.page import FIGURES_FOLDER, PAGE_FILE, make_sections, write_report
from ds_finepage.reporting.results import Results
from tests.unit.reporting.folders import HARDWARE, RESULTS, observed, planned

PASSES = {"finepage_b1": [observed()]}


def simulated(policy: str) -> MemoryRow:
    found = planned(policy)
    return memory_row(found.memgraph, found.timeline)


FINDINGS = Findings(
    sentences=("Batch 1: finepage & nobody else.",),
    fastest=frozenset({"finepage_b1"}),
    hardware=HARDWARE,
    passes={
        "finepage_b1": {
            "decode": [
                simulated("finepage"),
                simulated("horizon"),
                refused_row("lru", ConfigError("the arena is too small")),
            ]
        }
    },
    curves={1: {"finepage": [(300, 4), (400, 3)]}},
    remarks=("A remark.",),
)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("results")
    assert write_report(folder, RESULTS, PASSES, FINDINGS) == folder / PAGE_FILE
    return folder


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw, but write no real files of pictures."""
    monkeypatch.setattr(drawing, "png", lambda figure: b"picture")


@pytest.fixture(scope="module")
def text(written: Path) -> str:
    return (written / PAGE_FILE).read_text()


def test_nothing_comes_from_elsewhere(text: str) -> None:
    assert not re.search(r"https?:|<script|<link|@import|url\(", text)
    sources = re.findall(r'src="(.{22})', text)
    assert sources and set(sources) == {"data:image/png;base64,"}


def test_the_pictures_are_files_too(written: Path, text: str) -> None:
    names = {path.stem for path in (written / FIGURES_FOLDER).glob("*.png")}
    assert names == set(re.findall(r'<figure id="(.*?)">', text))
    of_pass = {"memory", "lanes", "layers", "policies"}
    assert names == {"arms_b1", "budgets_b1", *(f"finepage_b1_decode_{n}" for n in of_pass)}


def test_each_picture_says_how_to_read_it(text: str) -> None:
    captions = re.findall(r"<figcaption>(.*?)</figcaption>", text)
    assert len(captions) == text.count("<img ") and all(len(c) > 60 for c in captions)
    assert any("They never cross the dashed line, the budget" in c for c in captions)
    assert any("The prediction is" in c and "below that" in c for c in captions)
    assert any(f"simulated on {HARDWARE}" in c for c in captions)
    assert len(re.findall(r"<p>\d+ ops, planned by finepage\.</p>", text)) == 1


def test_words_and_figures_of_the_comparison(text: str) -> None:
    assert "Batch 1: finepage &amp; nobody else." in text and "A remark." in text
    assert "--model &lt;llama-7b&gt;" in text  # the command, and no tag
    assert "modelled for v100-16gb" in text and "torch" in text
    assert "<td>plain</td><td>the weights do not fit</td>" in text
    rows = re.findall(r'<tr class="(\w+)"><td>(\w+)</td>', text)
    assert set(rows) == {("best", "finepage"), ("failed", "plain")}
    assert "Batch 1: Settings of finepage" in text and "do not compare engines" in text


def test_a_run_without_passes_has_its_figures(tmp_path: Path) -> None:
    path = write_report(tmp_path, replace(RESULTS, runs=RESULTS.runs[:1]), {})
    text = path.read_text()
    assert "<td>plain</td>" in text and "there is no picture" in text and "<img" not in text


def test_a_folder_without_runs_says_so(tmp_path: Path) -> None:
    assert (
        "No run is finished yet."
        in write_report(
            tmp_path, Results(settings=None, device="cpu", versions={}, date="", command=""), {}
        ).read_text()
    )


@pytest.mark.usefixtures("quick")
def test_our_arm_comes_first_and_the_others_fold_away() -> None:
    other = replace(RESULTS.runs[2], arm="static")
    results = replace(RESULTS, runs=(other, RESULTS.runs[2]))
    passes = {"static_b1": [observed()], **PASSES}
    sections = make_sections(results, passes, Findings())[1:]
    assert [(s.title.partition(",")[0], s.is_open) for s in sections] == [
        ("finepage", True),
        ("static", False),
    ]


@pytest.mark.usefixtures("quick")
def test_a_pass_over_budget_is_not_praised(tmp_path: Path) -> None:
    run = replace(RESULTS.runs[2], budget_bytes=100)
    text = write_report(tmp_path, replace(RESULTS, runs=(run,)), PASSES).read_text()
    assert "They cross the dashed line" in text and "They never cross" not in text


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("fails_at", [0, 2])
def test_after_a_full_disk_a_whole_page_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_at: int
) -> None:
    path = write_report(tmp_path, RESULTS, PASSES)
    before = path.read_text()
    written = []

    def full(target: Path, content: str | bytes) -> None:
        if len(written) == fails_at:
            raise ConfigError(f"cannot write {target}: No space left on device")
        written.append(target)
        target.write_bytes(content.encode() if isinstance(content, str) else content)

    monkeypatch.setattr(page, "write_file", full)
    with pytest.raises(ConfigError, match="No space left"):
        write_report(tmp_path, replace(RESULTS, date="2027-01-01"), PASSES)
    after = path.read_text()
    assert after.rstrip().endswith("</html>")
    assert (after == before) == (fails_at == 0)


@pytest.mark.usefixtures("quick")
def test_a_file_in_the_place_of_the_pictures_is_an_error(tmp_path: Path) -> None:
    (tmp_path / FIGURES_FOLDER).write_text("")
    with pytest.raises(ConfigError, match="cannot make the folder"):
        write_report(tmp_path, RESULTS, {})
