"""The search spaces that come along: they load, and they keep the promises that their comments make."""

from __future__ import annotations

from pathlib import Path

import pytest

from sweep.config import SweepConfig, load_config
from sweep.load.plan import Plan

FOLDER = Path(__file__).resolve().parents[1] / "search_spaces"
SPACES = sorted(FOLDER.glob("*.yaml"))
REAL = [path for path in SPACES if path.stem != "quickstart"]


@pytest.fixture(params=REAL, ids=lambda path: path.stem)
def real(request: pytest.FixtureRequest) -> SweepConfig:
    return load_config(request.param)


@pytest.mark.parametrize("path", SPACES, ids=lambda path: path.stem)
def test_it_loads_without_remarks_and_is_named_after_its_file(path: Path) -> None:
    config = load_config(path)
    assert config.run.name == path.stem
    assert config.search.notes() == []


def test_every_real_space_is_in_the_list_for_people() -> None:
    listed = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert len(REAL) == 12
    assert [path.stem for path in REAL if f"`{path.stem}`" not in listed] == []


def test_what_is_in_the_compile_cache_key_comes_in_powers_of_two(real: SweepConfig) -> None:
    for name in ("max-num-seqs", "max-num-batched-tokens"):
        assert all(int(value).bit_count() == 1 for value in real.search.params[name].values())


def test_prefix_caching_is_swept_where_prefixes_are_shared(real: SweepConfig) -> None:
    (kind,) = real.load.kinds
    assert kind.prompt is not None
    assert ("enable-prefix-caching" in real.search.params) == (kind.prompt.shared_prefix > 0)


def test_sequences_range_around_what_the_load_offers(real: SweepConfig) -> None:
    """Otherwise the flag would make no difference under this load."""
    heaviest = max(level.concurrency or 0 for level in real.load.levels())
    assert min(real.search.params["max-num-seqs"].values()) <= heaviest
    assert max(real.search.params["max-num-seqs"].values()) >= heaviest


def test_the_throughput_preset_is_tried_early(real: SweepConfig) -> None:
    assert real.search.enqueue[0] == {"performance-mode": "throughput"}


def test_a_night_is_enough_for_what_is_planned(real: SweepConfig) -> None:
    """A launch takes a minute or more, and every level has a warm-up beside its window."""
    window_s = sum((real.load.window_s or 0) + 10 for _ in real.load.levels())
    assert real.run.hours is not None
    assert real.run.trials * (60 + window_s) <= real.run.hours * 3600


def test_no_limit_on_latency_only_for_batch(real: SweepConfig) -> None:
    assert bool(real.search.objective.slo) == (not real.run.name.endswith("batch"))


def test_a_chat_has_about_a_thousand_tokens_in_and_256_out() -> None:
    for path in REAL:
        if path.stem.endswith("chat"):
            plan = Plan(load_config(path).load, 0)
            asks = [plan.conversation(n, warmup=False) or () for n in range(2000)]
            prompts = [
                ask.new_tokens + sum(before.new_tokens + before.output_tokens for before in turns[: ask.turn])
                for turns in asks
                for ask in turns
            ]
            assert sum(prompts) / len(prompts) == pytest.approx(1000, rel=0.05)
            answers = [ask.output_tokens for turns in asks for ask in turns]
            assert sum(answers) / len(answers) == pytest.approx(256, rel=0.05)
