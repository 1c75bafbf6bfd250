"""``tpuspec report``: the page stands alone, holds what the documents hold and nothing that
they could inject; documents that are none are refused by name."""

import html
import html.parser
import json
import pathlib
import re
import shutil
import subprocess
import sys
import zlib
from typing import Any

import pytest
from harness import run_cli
from report_documents_by_hand import made

from tpuspec import theory
from tpuspec.serving import (
    report,
    report_curves,
    report_documents,
    report_figures,
    report_page,
    report_png,
)
from tpuspec.serving.cli import make_parser

VOID = {"meta", "input", "br"}


class Page(html.parser.HTMLParser):
    """Elements, attributes and the text outside of script and style; fails on a bad nesting."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("script", "style"):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.words)


def write(folder: pathlib.Path, documents: dict[str, Any]) -> list[str]:
    paths = []
    for name, document in documents.items():
        paths.append(folder / f"{name}.json")
        paths[-1].write_text(json.dumps(document))
    return [str(path) for path in paths]


def page_of(folder: pathlib.Path, documents: dict[str, Any]) -> tuple[str, dict[str, str]]:
    return report.make(report_documents.read(write(folder, documents)))


def test_a_page_of_all_documents_stands_alone(tmp_path):
    output = tmp_path / "report.html"
    result = run_cli("report", "--output", str(output), *write(tmp_path, made()))
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"{output}: 5 of 5 figures.\n"
    text = output.read_text()
    page = Page(text)
    assert not re.search(r"https?:|@import|url\(|\bfetch\(|XMLHttpRequest|import\(", text)
    assert not {name for name, _ in page.attributes} & {"src", "href", "xlink:href", "srcset"}
    assert not set(page.tags) & {"link", "img", "iframe", "object", "base", "form"}
    assert "prefers-color-scheme: dark" in text
    names = [value for name, value in page.attributes if name == "id"]
    assert len(names) == len(set(names))
    referred = {part for name, value in page.attributes if name == "aria-labelledby"
                for part in value.split()}
    assert referred <= set(names)
    # Every figure drawn has its table, and says what it is to who cannot see it.
    assert page.tags.count("svg") == 5 == page.tags.count("desc")  # figure 4 has two
    assert page.tags.count("table") >= 6


def test_the_page_holds_the_numbers_of_the_documents(tmp_path):
    documents = made()
    text = Page(page_of(tmp_path, documents)[0]).text
    for said in ("0.189", "1.77", "1.37", "51.7", "0.0417", "18", "1.50", "0.6000", "0.6100",
                 "183", "0.99", "passed", "0.847", "1.60", "2.12", "4030 positions read",
                 "median of made-up runs", "8 prompts, 3 repeats", "Where is it?", "alpha.json",
                 "tpuspec measure cost --json", "float32", "does not say"):
        assert said in text, said
    assert "3 target runs for 5 tokens" in text
    expected = theory.speedup(0.8125, 3, 0.0417, 1.25)
    assert f"{expected:.2f}" in text and "Left out" not in text


def test_what_is_not_given_is_left_out_and_said(tmp_path):
    documents = made()
    page, left_out = page_of(tmp_path, {"cost": documents["cost"]})
    assert [title.split(".")[0] for title in left_out] == [
        "Figure 2", "Figure 3", "Figure 4", "Figure 5"]
    assert "it takes a document of tpuspec demo --json" in left_out[
        "Figure 2. Where tokens came from"]
    text = Page(page).text
    assert text.count("Left out: ") == 4 and "<fieldset" not in page
    assert "tpuspec measure alpha, tpuspec measure speedup, tpuspec verify, tpuspec demo." in text
    page, left_out = page_of(tmp_path, {"alpha": documents["alpha"]})
    assert "Figure 4. Tokens per target run against α" not in left_out
    assert 'name="alpha"' in page and 'name="c"' not in page
    del documents["demo"]["samples"][0]["tokens"], documents["verify"]["frequencies"]
    _, left_out = page_of(tmp_path, documents)
    assert len(left_out) == 2 and all("this version" in why for why in left_out.values())


def test_what_users_wrote_is_text(tmp_path):
    evil = "</script><script>alert('1')</script><img src=x onerror=\"a\"> & \ud800"
    documents = made()
    documents["demo"]["samples"][0] = {"source": evil, "text": evil, "tokens": [
        {"id": 1, "text": evil, "origin": evil}]}
    documents["alpha"]["rows"][0]["draft"] = evil
    for name in ("speedup", "cost", "verify"):
        documents[name]["target"] = documents[name]["draft"] = evil
    documents["speedup"]["cost_method"] = documents["cost"]["platform"] = evil
    documents["speedup"]["platform"] = documents["verify"]["dtype"] = evil
    documents["verify"]["frequencies"][0]["ids"][0]["text"] = evil
    page, _ = page_of(tmp_path, documents)
    parsed = Page(page)
    assert parsed.tags.count("script") == 2 and "img" not in parsed.tags
    assert not [name for name, _ in parsed.attributes if name.startswith("on")]
    assert page.count(html.escape(evil)) > 10 and evil not in page
    assert "These documents are of different targets" in parsed.text
    output = tmp_path / "report.html"
    args = make_parser().parse_args(["report", "--output", str(output),
                                     *write(tmp_path, documents)])
    assert report.run(args) == 0 and "alert" in output.read_text()


def test_figures_that_could_not_be_measured_are_dashes(tmp_path):
    documents = made()
    for row in documents["speedup"]["rows"]:
        row |= {"observed_speedup": float("nan"), "observed_speedup_low": None, "c": None,
                "predicted_speedup": None, "tokens_per_target_run": None}
    documents["cost"]["batches"][0] |= {"c": None, "draft": None}
    del documents["demo"], documents["alpha"]
    page, left_out = page_of(tmp_path, documents)
    assert "nan" not in Page(page).text.lower()
    assert list(left_out) == ["Figure 2. Where tokens came from",
                              "Figure 5. Speed-up and operations against γ"]


@pytest.mark.parametrize("change, message", [
    (lambda d: d.pop("alpha"), "rows[0].alpha must be a number, got null"),
    (lambda d: d.update(alpha=1.5), "rows[0].alpha must be at most 1, got 1.5"),
    (lambda d: d.update(alpha=True), "rows[0].alpha must be a number, got true"),
    (lambda d: d.update(draft=["x"] * 99), 'rows[0].draft must be a string, got ["x", "x"'),
    (lambda d: d.update(tokens=1e999), "rows[0].tokens must be an integer, got Infinity"),
    (lambda d: d.update(temperature=1e300), "rows[0].temperature must be within 1e+18"),
    (lambda d: d.update(tokens_per_target_run=3),
     "rows[0].tokens_per_target_run must be a list, got 3"),
    (lambda d: d["tokens_per_target_run"][2].update(gamma=0),
     "rows[0].tokens_per_target_run[2].gamma must be at least 1, got 0")])
def test_a_bad_figure_is_refused_by_name(tmp_path, change, message):
    document = made()["alpha"]
    change(document["rows"][0])
    path, = write(tmp_path, {"a": document})
    if message.endswith("Infinity"):
        pathlib.Path(path).write_text(json.dumps(document).replace("Infinity", "1e999"))
    with pytest.raises(ValueError) as refused:
        report_documents.read([path])
    assert str(refused.value).startswith(f"{path}: {message}")


@pytest.mark.parametrize("content", ["", "[]", "{", "{}", '{"rows": []}', "[" * 10**5, "\xff"])
def test_what_is_no_document_is_refused_by_name(tmp_path, content):
    path = tmp_path / "x.json"
    path.write_bytes(content.encode("latin1"))
    result = run_cli("report", "--output", str(tmp_path / "o.html"), str(path)) \
        if content == "{}" else None
    with pytest.raises(ValueError, match=re.escape(str(path))):
        report_documents.read([str(path)])
    if result is not None:
        assert result.returncode == 1 and not (tmp_path / "o.html").exists()
        assert "is no JSON document of tpuspec measure alpha, " in result.stderr


def test_two_of_a_kind_and_an_output_that_is_a_document_are_refused(tmp_path):
    one, other = write(tmp_path, {"one": made()["demo"], "other": made()["demo"]})
    with pytest.raises(ValueError, match="other.json: is of tpuspec demo, as one.json is"):
        report_documents.read([one, other])
    args = make_parser().parse_args(["report", "--output", one, one])
    with pytest.raises(ValueError, match="output must be another file"):
        report.run(args)


def test_runs_end_with_the_targets_own_token():
    letters = {"a": "accepted_draft", "c": "correction", "b": "bonus", "p": "plain"}
    for said, lengths in (("aabcaaap", [3, 1, 4]), ("aa", [2]), ("pp", [1, 1]), ("", [])):
        found = report_figures.runs([{"origin": letters[letter]} for letter in said])
        assert [len(run) for run in found] == lengths


def test_widening_between_and_beyond_what_was_measured():
    setting = report_curves.Setting(alpha=0.8, gamma=3, c=0.1, c_hat=None, said="",
                                    widening={1: 1.1, 3: 1.3})
    assert [setting.width(g) for g in (0, 1, 2, 3, 5)] == pytest.approx([1, 1.1, 1.2, 1.3, 1.5])
    assert setting.slope == pytest.approx(0.1)


@pytest.mark.skipif(shutil.which("node") is None, reason="the script is run by Node.js")
@pytest.mark.parametrize("measured", [True, False])
def test_the_script_computes_what_theory_does(measured):
    setting = report_curves.Setting(alpha=0.8, gamma=3, c=0.07, c_hat=None, said="",
                                    widening={1: 1.1, 3: 1.4, 7: 1.6} if measured else {})
    data = setting.to_json()
    stub = f"""const document = {{getElementById: id =>
        id === "data" ? {{textContent: {json.dumps(json.dumps(data))}}} : null}};"""
    ask = """const state = begin(), lengths = [0, 1, 2, 3, 5, 9, 16];
        console.log(JSON.stringify([lengths.map(g => expected(state.alpha, g)),
            lengths.map(g => speedup(state, g)), lengths.map(g => operations(state, g)),
            best(state)]));"""
    script = report_page.SCRIPT.replace('"use strict";', "")
    done = subprocess.run(["node", "-e", stub + script + ask], text=True, capture_output=True,
                          check=True)
    expected, speedups, operations, best = json.loads(done.stdout)
    lengths = (0, 1, 2, 3, 5, 9, 16)
    assert expected == pytest.approx([theory.expected_tokens(0.8, g) for g in lengths])
    assert speedups == pytest.approx(
        [theory.speedup(0.8, g, 0.07, setting.width(g)) for g in lengths])
    assert operations == pytest.approx([theory.operations_factor(0.8, g, 0.07) for g in lengths])
    assert best == theory.best_draft_length(0.8, 0.07, longest=16, widening=setting.width)


def pixels(png: bytes) -> tuple[int, int, set[bytes]]:
    """Width, height and the colours of a PNG of 8 bits and four channels."""
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    at, parts = 8, {}
    while at < len(png):
        length, kind = int.from_bytes(png[at:at + 4]), png[at + 4:at + 8]
        parts[kind] = parts.get(kind, b"") + png[at + 8:at + 8 + length]
        at += length + 12
    head = parts[b"IHDR"]
    width, height = int.from_bytes(head[:4]), int.from_bytes(head[4:8])
    assert head[8:10] == b"\x08\x06"
    data, rows = zlib.decompress(parts[b"IDAT"]), [bytes(4 * width)]
    for y in range(height):
        line = data[y * (4 * width + 1):(y + 1) * (4 * width + 1)]
        row, above, how = bytearray(line[1:]), rows[-1], line[0]
        for x in range(len(row) if how else 0):
            left, up = row[x - 4] if x > 3 else 0, above[x]
            corner = above[x - 4] if x > 3 else 0
            near = min((left, up, corner), key=lambda one: abs(left + up - corner - one))
            row[x] = (row[x] + (left, up, (left + up) // 2, near)[how - 1]) % 256
        rows.append(bytes(row))
    return width, height, {row[x:x + 4] for row in rows[1:] for x in range(0, 4 * width, 4)}


def test_png_files_are_the_charts_of_the_page(tmp_path, monkeypatch):
    monkeypatch.setattr(report_png, "SCALE", 1)  # reading them takes long enough
    args = make_parser().parse_args(["report", "--output", str(tmp_path / "report.html"),
                                     "--png", str(tmp_path / "png"), *write(tmp_path, made())])
    assert report.run(args) == 0
    sizes = {"roofline0": (660, 330), "bars0": (420, 230), "tokens": (660, 330),
             "runs": (660, 250), "gain": (660, 330)}
    assert {path.stem for path in (tmp_path / "png").iterdir()} == set(sizes)
    colours = {"bars0": ["1d1c1a", "a84e00"], "tokens": ["1f5fb4", "a84e00", "157351", "7442ac"]}
    for name, of in colours.items():
        width, height, found = pixels((tmp_path / "png" / f"{name}.png").read_bytes())
        assert (width, height) == sizes[name]
        for colour in ["fcfbf8", *of]:  # the paper and each kind of line
            assert bytes.fromhex(colour + "ff") in found, (name, colour)
    for name, size in sizes.items():
        head = (tmp_path / "png" / f"{name}.png").read_bytes()[16:24]
        assert (int.from_bytes(head[:4]), int.from_bytes(head[4:])) == size


def test_png_without_resvg_is_refused_before_any_file(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    args = make_parser().parse_args(["report", "--output", str(tmp_path / "report.html"),
                                     "--png", str(tmp_path), *write(tmp_path, made())])
    with pytest.raises(ValueError, match=r"png needs resvg, .*: pip install 'tpuspec\[png\]'"):
        report.run(args)
    assert not (tmp_path / "report.html").exists()
