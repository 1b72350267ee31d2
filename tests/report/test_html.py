from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from sweep.report.html import report_html, write_report
from sweep.report.plots import _history_info, _parameter_info, _tradeoff_info, history, parameters, tradeoffs
from tests.report.studies import complete, failed, level, missed, study, typical


class Page(HTMLParser):
    """Collects what a browser would act on: elements, scripts, and addresses."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.scripts: list[tuple[str, str]] = []
        self.policy = ""
        self._script: str | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in {"src", "href"} or name.startswith("on")]
        if found.get("http-equiv") == "Content-Security-Policy":
            self.policy = found["content"] or ""
        if tag == "script":
            self._script = found.get("type") or "script"

    def handle_data(self, data: str) -> None:
        if self._script:
            self.scripts.append((self._script, data))

    def handle_endtag(self, tag: str) -> None:
        if tag == "script":
            self._script = None


def many() -> object:
    trials = [complete(n, {"max-num-seqs": 2**n, "enable-prefix-caching": bool(n % 2)}) for n in range(1, 6)]
    return study(complete(0, {}, label="baseline"), *trials, failed(9, {"max-num-seqs": 4096}))


@pytest.mark.parametrize(
    "view",
    [typical(), missed(), many(), study(complete=False), study(failed(0, {}), failed(1, {})), study(complete(3, {}))],
    ids=["typical", "missed", "many", "empty", "failures", "no-baseline"],
)
def test_it_renders_and_needs_nothing_from_elsewhere(view) -> None:
    page = Page(report_html(view, config="model: x"))
    assert page.addresses == []
    assert not {"link", "img", "iframe", "object"} & set(page.tags)
    assert "default-src 'none'" in page.policy
    ours = [text for kind, text in page.scripts if kind == "script"]
    for text in ours:
        assert base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() in page.policy
    assert len(ours) == (2 if any(kind == "application/json" for kind, _ in page.scripts) else 0)
    for kind, text in page.scripts:
        if kind == "application/json":
            assert json.loads(text)["data"]


def test_plotly_is_embedded_once_and_only_with_figures() -> None:
    assert report_html(many()).count("plotly.js v") == 1
    assert len(report_html(study())) < 50_000


def test_hostile_text_stays_text() -> None:
    hostile = "</script><script>alert(1)</script><img src=x onerror=alert(1)>&{{7*7}}"
    flags = {"max-num-seqs": hostile}
    view = study(
        complete(0, flags, level(reasons=(hostile,)), label=hostile),
        failed(1, flags, evidence=hostile),
        complete(2, {"max-num-seqs": "other", hostile: 1}),
        name=hostile,
        model=hostile,
        device=hostile,
        revision=hostile,
        objective=hostile,
        notes=(hostile,),
        environment={hostile: hostile},
        swept=("max-num-seqs", hostile),
    )
    text = report_html(view, config=hostile)
    page = Page(text)
    assert "img" not in page.tags
    assert len([kind for kind, _ in page.scripts if kind == "script"]) == 2
    assert "onerror=alert(1)>" not in re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)
    for figure in [history(view), *tradeoffs(view), *parameters(view)]:
        assert "<img" not in str(figure)
        assert "<script" not in str(figure)


def test_control_characters_are_gone() -> None:
    text = report_html(study(failed(0, {}, evidence="\x1b[31mred \u202eevil"), name="a\x1b]0;x\x07b"))
    assert "\x1b" not in text
    assert "\u202e" not in text


def test_history_shows_every_trial_and_the_best_so_far() -> None:
    info = _history_info(typical())
    assert [(point.x, point.y, point.role) for point in info.points] == [
        (0, 400.0, "baseline"),
        (1, 480.0, "best"),
        (2, None, "no result"),
    ]
    assert info.best_so_far == ((0, 400.0), (1, 480.0))
    assert "infeasible: out of memory: no room for the KV cache" in info.points[2].hover


def test_best_so_far_goes_down_when_less_is_better() -> None:
    view = study(complete(0, {}), complete(1, {}, level(output_tps=300)), direction="minimize")
    assert _history_info(view).best_so_far == ((0, 400.0), (1, 300.0))


def test_a_missed_slo_is_no_best_so_far() -> None:
    info = _history_info(missed())
    assert info.best_so_far == ()
    assert [point.role for point in info.points] == ["baseline", "nearest miss"]


def test_tradeoff_has_a_point_for_every_level_and_lines_for_the_best() -> None:
    info = _tradeoff_info(typical(), "TTFT p99, ms", "ttft_p99", lambda stats: stats.ttft_s)
    assert [(point.x, point.y) for point in info.points] == [(200.0, 400.0), (200.0, 300.0), (200.0, 480.0)]
    assert info.lines == {"best": ((200.0, 300.0), (200.0, 480.0))}
    assert info.limit_ms == 500.0


def test_parameter_axes_fit_their_values() -> None:
    info = _parameter_info(many(), "max-num-seqs")
    assert (info.scale, info.ticks) == ("log", (2, 4, 8, 16, 32, 4096))
    switch = _parameter_info(many(), "enable-prefix-caching")
    assert (switch.scale, switch.ticks) == ("category", ("false", "true"))
    assert parameters(study(complete(0, {"max-num-seqs": 8}))) == []


def test_it_is_written_whole(tmp_path: Path) -> None:
    write_report(study(failed(0, {}, evidence="torn \udc80")), tmp_path / "report.html")
    assert "torn" in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert len(list(tmp_path.iterdir())) == 1
