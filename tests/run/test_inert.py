"""Values of a flag that do the same: two sources have to agree, and what neither knows is not called without effect."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from sweep.model import Flags, Measured, Outcome, ServerFacts
from sweep.run.inert import alike, notes
from sweep.run.preflight import Preflight
from sweep.run.value_check import ValueCheck

from .studies import Machine, complete, config, search, sweep_of


def ran(trial: int, flags: Flags, **figures: str) -> Outcome:
    measured = replace(complete(100.0), server=ServerFacts(cache_config=figures))
    return Outcome(trial, "search", flags, measured, "2026-01-02T03:04:05+00:00")


def test_the_engine_and_the_running_server_have_to_agree() -> None:
    configured = {"block-size": [(16, 32), (64,)]}
    first = ran(0, {"block-size": 16}, block_size="128")
    assert alike(configured, [first]) == {}  # 32 has not run
    assert alike(configured, [first, ran(1, {"block-size": 32}, block_size="32")]) == {}
    assert alike(configured, [first, ran(1, {"block-size": 32}, block_size="128")]) == {"block-size": [(16, 32)]}
    # The server gives 64 the same figure, but the engine's configuration is another.
    other = [first, ran(1, {"block-size": 64}, block_size="128")]
    assert alike(configured, other) == {}


def test_what_the_server_does_not_tell_of_is_for_the_engine_to_say() -> None:
    configured = {"max-num-seqs": [(512, 1024), (16,)], "async-scheduling": []}
    seen = [ran(0, {"max-num-seqs": 512}, block_size="16")]
    assert alike(configured, seen) == {}  # 1024 has not run
    seen.append(ran(1, {"max-num-seqs": 1024}, block_size="16"))
    assert alike(configured, seen) == {"max-num-seqs": [(512, 1024)]}
    assert alike(configured, []) == {}


def test_a_value_that_was_seen_to_vary_stands_alone() -> None:
    configured = {"block-size": [(16, 32, 64)]}
    seen = [
        ran(0, {"block-size": 16}, block_size="16"),
        ran(1, {"block-size": 16}, block_size="32"),
        ran(2, {"block-size": 32}, block_size="32"),
        ran(3, {"block-size": 64}, block_size="32"),
    ]
    groups = alike(configured, seen)
    assert groups == {"block-size": [(32, 64)]}
    (text,) = notes(groups).values()
    assert text.startswith("block-size: 32 and 64 do the same here")


def test_values_that_do_the_same_are_launched_once_and_people_are_told(tmp_path: Path) -> None:
    def behave(flags: Flags, _number: int) -> Measured:
        return replace(complete(float(flags.get("max-num-seqs", 16))), server=ServerFacts(cache_config={"a": "1"}))  # type: ignore[arg-type]

    told = config(search__params={"max-num-seqs": [8, 16, 32], "block-size": [16, 32, 64]}, run__trials=20)
    machine = Machine(behave)
    sweep = sweep_of(told, tmp_path, machine)
    same = {"model_config.x": None}
    checks = (ValueCheck(16, changes=same), ValueCheck(32, changes=same), ValueCheck(64, changes={"cache.b": "64"}))
    sweep.knowledge.checked = Preflight("0.32.0", alone={"block-size": checks})
    search(sweep)
    launched = [job.launch.flags for job in machine.jobs[1:]]
    tried = [(flags["max-num-seqs"], flags["block-size"]) for flags in launched]
    assert {(seqs, 16 if size == 32 else size) for seqs, size in tried} == {
        (seqs, size) for seqs in (8, 16, 32) for size in (16, 64)
    }
    # Before both values have run, nobody knows that they do the same; from then on one of them is left.
    assert len(launched) < 9
    both = max(next(i for i, (_, size) in enumerate(tried) if size == wanted) for wanted in (16, 32))
    assert 32 not in [size for _, size in tried[both + 1 :]]
    assert sum("do the same here" in note for note in sweep.notes) == 1
