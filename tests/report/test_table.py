from __future__ import annotations

import io
import json
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given, strategies as st

from sweep.model import ClientStats, KindStats, ServerStats
from sweep.report.table import levels_frame, trials_frame, write_tables
from tests.report.studies import complete, failed, level, missed, study, typical

CONTRACT = [
    *["trial", "state", "source", "failure_kind"],
    *["max-num-seqs", "gpu-memory-utilization", "enable-prefix-caching"],
    *["level", "objective", "slo_met"],
    *["ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "tpot_p99_ms", "itl_p99_ms", "e2e_p99_ms", "ttft_sched_p99_ms"],
    *["output_tps", "total_tps", "request_rps", "goodput_rps", "gpus", "output_tps_per_gpu"],
    *["kv_cache_tokens", "max_concurrency", "kv_usage_peak", "preemptions", "prefix_offered_frac", "prefix_hit_frac"],
    *["queue_ms", "prefill_ms", "decode_ms", "launch_s", "warmup_s", "load_s", "stop_s", "started_at"],
]


def text_of(frame: pd.DataFrame) -> pd.DataFrame:
    """Read the frame back from its CSV, every cell as the text that stands there."""
    return pd.read_csv(io.StringIO(frame.to_csv(index=False)), dtype=str, keep_default_na=False)


def test_columns_come_in_their_fixed_order_and_more_only_follow() -> None:
    for frame in (trials_frame(typical()), levels_frame(typical()), trials_frame(study())):
        assert list(frame.columns)[: len(CONTRACT)] == CONTRACT


def test_every_trial_has_a_row_and_a_missing_figure_is_an_empty_cell() -> None:
    rows = text_of(trials_frame(typical())).to_dict("records")
    assert [(row["trial"], row["state"]) for row in rows] == [("0", "complete"), ("1", "complete"), ("2", "infeasible")]
    assert rows[0]["max-num-seqs"] == ""
    assert rows[2]["failure_kind"] == "oom_kv_cache_none"
    assert rows[2]["level"] == rows[2]["output_tps"] == rows[2]["objective"] == rows[2]["slo_met"] == ""
    assert rows[2]["launch_s"] == "31.0"


def test_integers_stay_integers_and_booleans_are_words() -> None:
    row = text_of(trials_frame(typical())).to_dict("records")[1]
    assert (row["max-num-seqs"], row["enable-prefix-caching"], row["kv_cache_tokens"]) == ("64", "false", "8192")
    assert (row["gpus"], row["slo_met"], row["completed"]) == ("1", "true", "100")


def test_latencies_are_milliseconds_of_the_judged_level() -> None:
    row = trials_frame(typical()).to_dict("records")[1]
    assert row["level"] == "c=64"
    assert (row["ttft_p50_ms"], row["ttft_p99_ms"]) == (90.0, 200.0)
    assert row["objective"] == row["output_tps"] == 480.0


def test_server_figures() -> None:
    stats = ServerStats(
        queue_s=0.25, prefix_queries_tokens=1000, prefix_hits_tokens=400, preemptions=3, kv_usage_peak_frac=0.97
    )
    row = trials_frame(study(complete(0, {}, level(server=stats)))).to_dict("records")[0]
    assert (row["queue_ms"], row["prefix_hit_frac"], row["preemptions"], row["kv_usage_peak"]) == (250.0, 0.4, 3, 0.97)
    assert row["prefill_ms"] is None


def test_throughput_per_gpu_takes_the_trials_own_number_of_gpus() -> None:
    view = study(complete(0, {}), complete(1, {"tensor-parallel-size": 4}), gpus=1, trial_gpus={1: 4})
    assert [row["output_tps_per_gpu"] for row in trials_frame(view).to_dict("records")] == [400.0, 100.0]


def test_levels_have_a_row_each_and_the_objective_stands_at_the_judged_one() -> None:
    rows = text_of(levels_frame(typical())).to_dict("records")
    assert [(row["trial"], row["level"], row["objective"]) for row in rows] == [
        ("0", "c=64", "400.0"),
        ("1", "c=32", ""),
        ("1", "c=64", "480.0"),
    ]


def test_a_missed_slo_is_false() -> None:
    assert text_of(trials_frame(missed()))["slo_met"].tolist() == ["false", "false"]


def test_flags_beside_the_swept_ones_and_structured_values_are_kept_as_text() -> None:
    view = study(complete(0, {"max-num-seqs": [1, 2], "performance-mode": "throughput"}))
    row = trials_frame(view).to_dict("records")[0]
    assert json.loads(row["max-num-seqs"]) == [1, 2]
    assert row["other_flags"] == "performance-mode=throughput"


@pytest.mark.parametrize("start", ["=", "+", "-", "@", "\t", "\r", "\n"])
def test_no_text_cell_begins_a_formula(start: str) -> None:
    hostile = f'{start}HYPERLINK("http://x.test","y")'
    view = study(failed(0, {"max-num-seqs": hostile}, evidence=hostile), swept=("max-num-seqs", hostile))
    frame = trials_frame(view)
    assert frame.to_dict("records")[0]["max-num-seqs"] == f"'{hostile}".replace("\r", "\n")
    texts = [cell for cell in [*frame.to_numpy().flatten(), *frame.columns] if isinstance(cell, str)]
    assert not [cell for cell in texts if cell.startswith(start)]


def test_negative_numbers_are_left_alone() -> None:
    assert trials_frame(study(complete(0, {"max-num-seqs": -1}))).to_dict("records")[0]["max-num-seqs"] == -1


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=40))
def test_text_survives_the_round_trip(text: str) -> None:
    read = text_of(trials_frame(study(failed(0, {"max-num-seqs": text}), failed(1, {}))))
    lines = text.replace("\r\n", "\n").replace("\r", "\n")
    assert read.loc[0, "max-num-seqs"] in {lines, f"'{lines}"}
    assert read["trial"].tolist() == ["0", "1"]


def test_files_are_written_whole_and_leave_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "trials.csv").write_text("old")
    write_tables(study(failed(0, {"max-num-seqs": "torn \udc80"}, evidence="torn byte")), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["levels.csv", "trials.csv"]
    assert pd.read_csv(tmp_path / "trials.csv").loc[0, "max-num-seqs"] == "torn \\udc80"
    assert list(pd.read_csv(tmp_path / "levels.csv").columns)[: len(CONTRACT)] == CONTRACT


def test_intervals_and_doubts_stand_behind_the_fixed_columns() -> None:
    client = ClientStats(20.0, 0.0004, "kernel", overhead_s=0.0012, late_events_frac=0.001)
    found = level(
        client=client, intervals={"output_tps": (390.0, 410.0)}, rate_rps=8.0, stable=True, ttfot_s=level().ttft_s
    )
    row = trials_frame(study(complete(0, {}, found))).to_dict("records")[0]
    assert (row["output_tps_lo"], row["output_tps_hi"]) == (row["objective_lo"], row["objective_hi"]) == (390.0, 410.0)
    assert (row["overhead_ms"], row["send_lag_ms"], row["late_events_frac"]) == (1.2, 0.4, 0.001)
    assert (row["rate_rps"], row["stable"], row["low_n"], row["ttfot_p50_ms"]) == (8.0, "true", "p95 p99", 90.0)
    bare = trials_frame(study(complete(0, {}))).to_dict("records")[0]
    assert [bare[name] for name in ("overhead_ms", "objective_lo", "stable", "kinds", "rate_rps")] == [None] * 5


def test_the_classes_of_a_mix_are_json() -> None:
    base = level()
    kind = KindStats(90, 10, base.ttft_s, None, base.tpot_s, base.itl_s, base.e2e_s, None, 0.9)
    row = levels_frame(study(complete(0, {}, level(kinds={"chat": kind})))).to_dict("records")[0]
    found = json.loads(row["kinds"])["chat"]
    assert (found["completed"], found["slo_attainment_frac"], found["ttft_p99_ms"]) == (90, 0.9, 200.0)
    assert found["ttft_sched_p99_ms"] is None


def test_what_the_slos_are_judged_by_has_its_own_columns() -> None:
    view = study(complete(0, {}, level()), slo={"ttft_p90": 0.5, "e2e_p95": 2.0})
    frame = trials_frame(view)
    found = view.outcomes[0].measured.levels[0]
    assert found.ttft_s is not None
    assert frame.loc[0, "slo_ttft_p90_ms"] == pytest.approx(1000 * found.ttft_s.p90, rel=1e-3)
    assert "slo_e2e_p95_ms" in frame.columns
