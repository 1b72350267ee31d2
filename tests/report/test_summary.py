from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sweep.model import ClientStats, ServerStats
from sweep.report.figures import LOW_N_WORDS, compare, objective_interval
from sweep.report.limits import limits
from sweep.report.summary import CAUTION, closing, failure_groups, headline, state_counts, summary_text, write_summary
from tests.report.studies import complete, failed, level, missed, skipped, study, typical


def test_the_best_stands_beside_the_baseline() -> None:
    text = summary_text(typical())
    assert "The best is trial 1: output throughput 480 tok/s (20.0 % better than the baseline's 400 tok/s)." in text
    assert "| max-num-seqs " in text
    assert "+20.0 %" in text
    assert CAUTION in text
    assert "out of memory: no room for the KV cache" in text
    assert "3 trials: 2 complete, 1 infeasible" in text


def test_a_change_knows_which_way_is_better() -> None:
    view = study(complete(0, {}), complete(1, {"max-num-seqs": 8}, level(output_tps=500.0, ttft_s=0.2)))
    rows = {row.label: row for row in compare(view, 1)}
    assert (rows["output"].change, rows["output"].improved) == ("+25.0 %", True)
    assert (rows["TTFT p99"].change, rows["TTFT p99"].improved) == ("+100.0 %", False)
    assert (rows["TPOT p99"].change, rows["TPOT p99"].improved) == ("0 %", None)
    assert rows["launch"].improved is None
    assert "goodput" not in rows


def test_intervals_and_too_few_requests_are_shown() -> None:
    left = level(intervals={"output_tps": (390.0, 410.0)}, client=ClientStats(20.0, 0.0, "kernel", overhead_s=0.0004))
    right = level(output_tps=500.0, prefix_offered_frac=0.5)
    view = study(complete(0, {}, left), complete(1, {"max-num-seqs": 8}, right))
    rows = {row.label: row for row in compare(view, 1)}
    assert (rows["output throughput, 95 % interval"].baseline, rows["output throughput, 95 % interval"].shown) == (
        "390 to 410",
        "-",
    )
    assert rows["TTFT p99"].shown == "200 ms, low n"
    assert rows["TTFT p50"].shown == "90.0 ms"
    assert rows["TTFT, client - server"].baseline == "0.400 ms"
    assert rows["prompt tokens seen before"].shown == "50 %"
    assert LOW_N_WORDS in summary_text(view)
    assert LOW_N_WORDS in closing(view)


def test_the_interval_is_that_of_the_objective() -> None:
    timed = level(ttft_s=0.1)
    assert timed.ttft_s is not None
    timed = replace(
        timed,
        ttft_s=replace(timed.ttft_s, ci={"p99": (0.18, 0.22)}),
        intervals={"output_tps": (390.0, 410.0), "goodput_rps": (1.0, 2.0)},
        kinds={},
    )
    outcome = complete(0, {}, timed)
    for objective, expected in (
        ("output throughput", (390.0, 410.0)),
        ("output throughput per GPU", (195.0, 205.0)),
        ("goodput", (1.0, 2.0)),
        ("TTFT p99", (180.0, 220.0)),
        ("TTFT p50", None),
        ("balance over the baseline (ttft 1)", None),
    ):
        found = objective_interval(study(outcome, objective=objective, gpus=2), outcome, timed)
        assert found == (None if expected is None else pytest.approx(expected)), objective


def test_less_is_better_when_the_objective_is_minimized() -> None:
    assert "better" in study(complete(0, {}), complete(1, {}, level(output_tps=300)), direction="minimize").result(1)
    assert "worse" in study(complete(0, {}), complete(1, {}, level(output_tps=300))).result(1)


def test_no_gain_and_a_gain_within_the_noise_are_said_plainly() -> None:
    assert headline(study(complete(0, {}), complete(1, {}, level(output_tps=300)))).startswith("No gain found")
    small = study(complete(0, {}), complete(1, {}, level(output_tps=404)))
    assert "can differ by as much" in headline(small)
    assert "can differ by as much" not in headline(typical())


def test_the_nearest_miss_is_named_with_its_distance() -> None:
    assert headline(missed()) == (
        "No trial met the SLOs. Trial 1 comes closest; TTFT p99 is 600 ms, the limit is 500 ms (+20.0 %)."
    )
    assert "best_config.yaml" in closing(missed())


def test_only_failures_and_nothing_at_all_still_read_well() -> None:
    broken = study(failed(0, {}), failed(1, {}, kind="engine_dead"), failed(2, {}))
    assert "No trial gave a result" in summary_text(broken)
    assert "best_config.yaml" not in closing(broken)
    assert [(group.kind, group.trials) for group in failure_groups(broken)] == [
        ("oom_kv_cache_none", (0, 2)),
        ("engine_dead", (1,)),
    ]
    empty = study(complete=False)
    assert "No trial has finished." in summary_text(empty)
    assert "Unfinished" in summary_text(empty)
    assert state_counts(empty) == "no trials"
    assert "vllm serve" not in closing(empty)


def test_what_was_skipped_stands_apart_with_its_reason() -> None:
    reason = "of the 7.9 GiB that gpu-memory-utilization 0.1 gives, nothing is left for the cache"
    spared = skipped(1, {}, reason=reason), skipped(2, {})
    text = summary_text(study(complete(0, {}, label="baseline"), *spared, failed(3, {})))
    assert f"## Skipped without a launch\n\n- out of memory: no room for the KV cache (trial 1, 2): {reason}" in text
    assert "| 3 " in text[text.index("## What failed") : text.index("## Skipped")]
    assert "1, 2" not in text[text.index("## What failed") : text.index("## Skipped")]


def test_the_closing_gives_the_command_and_the_paths() -> None:
    text = closing(typical())
    assert "vllm serve --config results/demo/best_config.yaml" in text
    for path in ("results/demo/best_config.yaml", "results/demo/report.html", "results/demo/trials.csv"):
        assert path in text
    assert max(len(line) for line in text.splitlines() if not line.startswith(("A quick", "demo:"))) < 100


def test_foreign_text_brings_neither_escape_sequences_nor_tags_nor_lines() -> None:
    hostile = "\x1b[31mred\x07\n## forged\r<script>x</script>"
    view = study(failed(0, {}, evidence=hostile), notes=(hostile,), model=hostile, name=hostile)
    for text in (summary_text(view), closing(view)):
        assert "\x1b" not in text
        assert "\n## forged" not in text
    assert "- red ## forged &lt;script>x&lt;/script>" in summary_text(view)


def test_it_is_written_whole(tmp_path: Path) -> None:
    write_summary(typical(), tmp_path / "summary.md")
    assert (tmp_path / "summary.md").read_text(encoding="utf-8") == summary_text(typical())
    assert len(list(tmp_path.iterdir())) == 1


def explained(server: ServerStats, flags=None, **more) -> str:
    return " ".join(limits(level(server=server, **more), flags or {}))


def test_waiting_is_blamed_on_what_was_full() -> None:
    waiting = {"queue_s": 0.9, "ttft_s": 1.0, "prefill_s": 0.1}
    assert "KV cache was full" in explained(ServerStats(**waiting, preemptions=5))
    assert "all 16 places" in explained(ServerStats(**waiting, running_peak=16), {"max-num-seqs": 16})
    spare = explained(ServerStats(**waiting, running_peak=9), {"max-num-seqs": 16})
    assert "behind the prefill of others, with places" in spare
    assert "or for a place" in explained(ServerStats(**waiting))


def test_prefill_bound_without_waiting() -> None:
    assert "own prefill" in explained(ServerStats(queue_s=0.01, ttft_s=0.5, prefill_s=0.45))


def test_kv_cache_pressure() -> None:
    assert "5 preemptions" in explained(ServerStats(preemptions=5, kv_usage_peak_frac=1.0))
    assert "just large enough" in explained(ServerStats(preemptions=0, kv_usage_peak_frac=0.97))
    assert "would not help" in explained(ServerStats(kv_usage_peak_frac=0.2))
    assert explained(ServerStats(kv_usage_peak_frac=0.8)) == ""


def test_prefix_cache() -> None:
    hits = ServerStats(prefix_queries_tokens=100, prefix_hits_tokens=40)
    assert "served 40 % of the prompt tokens; an ideal cache could have served 50 %" in explained(
        hits, prefix_offered_frac=0.5
    )
    assert "served nothing" in explained(ServerStats(), prefix_offered_frac=0.5)
    assert explained(ServerStats(prefix_queries_tokens=100, prefix_hits_tokens=0), prefix_offered_frac=0.0) == ""


def test_nothing_is_claimed_without_numbers() -> None:
    assert limits(level(server=None), {}) == []
    assert limits(level(server=ServerStats()), {}) == []


def test_failed_requests_are_counted_by_class() -> None:
    text = limits(level(failed=4, errors={"timeout_ttft": 3, "http_500": 1}), {})[0]
    assert text == "4 of 104 requests failed: http_500 1, timeout_ttft 3."
