"""The study: it learns from what cannot run, repeats nothing, and goes on after a crash."""

import json
import logging
import math
import sqlite3
import sys
from contextlib import closing

import numpy as np
import optuna
import pytest

from sweep.errors import ConfigError, MachineError
from sweep.failure import Failure
from sweep.model import Dist, LevelStats, Measured, Outcome, Verdict
from sweep.search.space import Rule, SearchSection, Space
from sweep.search.study import Study, resolve_sampler

_PARAMS = {
    "gpu-memory-utilization": {"low": 0.80, "high": 0.95, "step": 0.01},
    "max-num-seqs": {"low": 16, "high": 512, "step": "pow2"},
    "max-num-batched-tokens": {"low": 1024, "high": 16384, "step": "pow2"},
    "block-size": [16, 32, 64],
    "enable-prefix-caching": [True, False],
    "performance-mode": ["balanced", "interactivity", "throughput"],
}


def _section(**settings):
    return SearchSection.model_validate({"params": _PARAMS, "sampler": "tpe", **settings})


class _Sweep:
    """A study with a simulated server. `server` takes flags and answers with a Measured."""

    def __init__(self, tmp_path, server, section, fixed=None):
        self.section = section
        self.space = Space(section.params, tuple(map(Rule.parse, section.rules)), fixed or {})
        self.path = tmp_path / "study.db"
        self.server = server
        self.outcomes = []
        self.study = self.open()

    def open(self):
        return Study.open(self.path, "sweep", self.space, self.section.objective, self.section)

    def judged(self, outcome):
        return self.section.objective.judge(outcome.measured, None, 1)

    def record(self, flags, measured, token=None):
        outcome = Outcome(len(self.outcomes), "search", flags, measured, "2026-01-02T03:04:05+00:00")
        self.outcomes.append(outcome)
        self.study.tell(outcome, self.judged(outcome), token=token, point=flags)

    def step(self):
        proposal = self.study.ask()
        if proposal is not None:
            self.record(proposal.flags, self.server(proposal.flags), proposal.token)
        return proposal

    def resume(self):
        self.study.close()
        self.study = self.open()
        self.study.replay([(o, self.judged(o), o.flags) for o in self.outcomes])

    def recorded(self):
        self.study.close()
        with closing(sqlite3.connect(self.path)):
            study = optuna.load_study(study_name="sweep", storage=f"sqlite:///{self.path}")
            return study.get_trials()


@pytest.fixture
def sweep(tmp_path):
    made = []

    def make(server, **settings):
        folder = tmp_path / str(len(made))
        folder.mkdir()
        made.append(_Sweep(folder, server, _section(**settings)))
        return made[-1]

    yield make
    for each in made:
        each.study.close()


def _measured(tps, ttft=0.1):
    dist = Dist(ttft, ttft, ttft, ttft, ttft, 1000)
    level = LevelStats(
        "c=64", 1000, 0, {}, 30.0, 5.0, 8, True, dist, None, dist, dist, dist, tps, tps, tps, None, None, 1, 1, None
    )
    return Measured("complete", (level,))


_OOM = Measured("infeasible", failure=Failure("oom_kv_cache_none", "prune", "CUDA out of memory", "lower it"))


def _height(flags):
    """How much memory the flags ask for, from 0 to 3."""
    return (
        (flags["gpu-memory-utilization"] - 0.80) / 0.15
        + math.log2(flags["max-num-seqs"] / 16) / 5
        + math.log2(flags["max-num-batched-tokens"] / 1024) / 4
    )


def _walled(flags):
    """Faster the more memory is asked for, until it does not fit: about half of the space cannot run."""
    height = _height(flags)
    return _OOM if height > 1.5 else _measured(50 + 30 * height + (5 if flags["block-size"] == 32 else 0))


def _count_oom(sweep, trials, **settings):
    made = sweep(_walled, **settings)
    for _ in range(trials):
        made.step()
    return sum(outcome.state == "infeasible" for outcome in made.outcomes)


def test_told_what_cannot_run_tpe_leaves_the_wall(sweep):
    counts = [_count_oom(sweep, 40, seed=seed) for seed in range(4)]
    assert np.mean(counts) < 19  # blind draws: 21; told as failed, so that the sampler hears nothing of it: 32


def test_the_gaussian_process_learns_from_replayed_trials_that_cannot_run(sweep):
    made = sweep(_walled, sampler="gp", objective={"maximize": "output_tps", "slo": {"ttft_p99": "1s"}})
    generator = np.random.default_rng(1)
    for index in range(14):
        flags = made.space.flags(generator.integers([param.size for param in made.space.params.values()]).tolist())
        measured = _walled(flags) if index % 7 else Measured("failed")
        made.outcomes.append(Outcome(index, "search", flags, measured, "2026-01-02T03:04:05+00:00"))
    made.resume()
    seen = [outcome.flags for outcome in made.outcomes]
    before = max(made.judged(outcome).value or 0 for outcome in made.outcomes)
    for _ in range(4):
        assert made.step().flags not in seen
        seen.append(made.outcomes[-1].flags)
    later = made.outcomes[14:]
    assert sum(outcome.state == "infeasible" for outcome in later) <= 2
    assert max(made.judged(outcome).value or 0 for outcome in later) > before


@pytest.mark.parametrize("sampler", ["tpe", "gp"])
def test_nothing_that_runs_yet_is_no_obstacle(sweep, sampler):
    made = sweep(lambda _: _OOM, sampler=sampler)
    for _ in range(12):
        made.step()
    assert len({json.dumps(outcome.flags) for outcome in made.outcomes}) == 12


def test_missed_slos_lead_the_search_to_where_they_are_met(sweep):
    def server(flags):
        slow = math.log2(flags["max-num-seqs"] / 16) + math.log2(flags["max-num-batched-tokens"] / 1024)
        return _measured(50 + 10 * slow, ttft=0.1 * 2**slow)  # up to 51 s, against a limit of 0.5 s

    met = []
    for seed in range(3):
        made = sweep(server, seed=seed, objective={"maximize": "output_tps", "slo": {"ttft_p99": "500ms"}})
        for _ in range(30):
            made.step()
        met += [made.judged(outcome).slo_met for outcome in made.outcomes[15:]]
    assert np.mean(met) > 0.4  # blind draws: 0.2


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_a_small_space_is_gone_through_once_and_then_exhausted(sweep, sampler):
    params = {"a": [1, 2, 3, 4], "b": ["x", "y", "z"], "c": [True, False], "d": [7]}
    made = sweep(
        lambda flags: _measured(float(flags["a"])), params=params, sampler=sampler, rules=["a < 4 or b != 'z'"]
    )
    while proposal := made.step():
        assert proposal.violation is None
    assert len(made.outcomes) == 22
    assert len({json.dumps(outcome.flags) for outcome in made.outcomes}) == 22


def test_open_proposals_are_not_proposed_again(sweep):
    made = sweep(_walled, params={"a": [1, 2], "b": ["x", "y", "z"]})
    proposals = [made.study.ask() for _ in range(6)]
    assert len({json.dumps(proposal.flags) for proposal in proposals}) == 6
    assert made.study.ask() is None


def test_an_interrupted_trial_may_be_proposed_again(sweep):
    made = sweep(lambda _: Measured("interrupted"), params={"a": [1]})
    assert made.step().flags == {"a": 1}
    assert made.step().flags == {"a": 1}
    made.server = lambda _: Measured("failed")
    made.step()
    assert made.study.ask() is None


def test_rules_are_kept_in_a_space_too_large_to_be_looked_through(sweep):
    made = sweep(_walled, rules=["max-num-seqs * 8 <= max-num-batched-tokens", "block-size == 16"])
    assert made.space.size > 4096
    for _ in range(15):
        proposal = made.step()
        assert proposal.violation is None
        assert made.space.violated(proposal.flags) is None


def test_a_proposal_that_breaks_a_rule_says_so_where_nothing_else_is_found(sweep):
    made = sweep(lambda _: Measured("skipped"), rules=["max-num-seqs < 0"])
    seen = set()
    for _ in range(5):
        proposal = made.step()
        assert proposal.violation == "max-num-seqs < 0"
        seen.add(json.dumps(proposal.flags))
    assert len(seen) == 5


def test_what_is_to_be_avoided_is_passed_over_and_the_rest_is_found(sweep):
    made = sweep(_walled, params={"a": [1, 2, 3, 4], "b": ["x", "y", "z"]})
    seen = set()
    while proposal := made.study.ask(lambda flags: flags["a"] > 2):
        made.record(proposal.flags, _measured(1.0), proposal.token)
        seen.add((proposal.flags["a"], proposal.flags["b"]))
    assert seen == {(a, b) for a in (1, 2) for b in "xyz"}
    assert made.study.ask() is not None


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_values_that_do_the_same_are_tried_once(sweep, sampler):
    made = sweep(_walled, params={"a": [1, 2, 3, 4], "b": ["x", "y"]}, sampler=sampler)
    made.server = lambda flags: _measured(float(flags["a"]))
    made.record({"a": 4, "b": "x"}, _measured(4.0))
    made.study.take_as_one({"a": [[3, 4]]})
    while made.step():
        pass
    seen = [(o.flags["a"], o.flags["b"]) for o in made.outcomes[1:]]
    assert sorted(seen) == [(1, "x"), (1, "y"), (2, "x"), (2, "y"), (3, "y")]


def test_rules_see_the_fixed_flags(tmp_path):
    section = _section(params={"max-num-seqs": [16, 32, 64]}, rules=["max-num-seqs <= limit"])
    made = _Sweep(tmp_path, lambda _: _measured(1.0), section, fixed={"limit": 32})
    assert sorted(made.step().flags["max-num-seqs"] for _ in range(2)) == [16, 32]
    assert made.study.ask() is None
    made.study.close()


def test_the_first_trials_cover_the_range_of_every_flag(sweep):
    made = sweep(lambda _: _measured(1.0))
    flags = [made.step().flags for _ in range(8)]
    assert len({f["gpu-memory-utilization"] for f in flags}) == 8
    assert {f["max-num-seqs"] for f in flags} == {16, 32, 64, 128, 256, 512}
    assert {f["performance-mode"] for f in flags} == set(_PARAMS["performance-mode"])


def test_after_a_crash_it_goes_on_as_if_nothing_had_happened(sweep):
    calm, crashed = sweep(_walled), sweep(_walled)
    for index in range(14):
        calm.step()
        crashed.step()
        if index == 4:
            crashed.study.ask()  # a proposal that died with the process
            crashed.resume()
        if index == 9:  # the outcome was written, the record was not
            proposal = crashed.study.ask()
            crashed.outcomes.append(
                Outcome(10, "search", proposal.flags, _walled(proposal.flags), "2026-01-02T03:04:05+00:00")
            )
            crashed.resume()
            calm.step()
    assert [outcome.flags for outcome in crashed.outcomes] == [outcome.flags for outcome in calm.outcomes]
    trials = crashed.recorded()
    assert [trial.user_attrs["trial"] for trial in trials] == list(range(15))
    assert all(trial.state.is_finished() for trial in trials)


def test_a_lost_record_is_built_again(sweep):
    made = sweep(_walled)
    for _ in range(6):
        made.step()
    before = [(trial.params, trial.values, trial.state, trial.user_attrs) for trial in made.recorded()]
    made.path.unlink()
    made.resume()
    assert [(trial.params, trial.values, trial.state, trial.user_attrs) for trial in made.recorded()] == before


def test_the_record_tells_people_what_happened(sweep):
    states = ["complete", "infeasible", "skipped", "pruned", "invalid", "failed", "interrupted"]
    made = sweep(None, objective={"maximize": "output_tps", "slo": {"ttft_p99": "50ms", "ttft_mean": "200ms"}})
    for state in states:
        proposal = made.study.ask()
        measured = {"complete": _measured(100.0), "infeasible": _OOM}.get(state, Measured(state))
        made.record(proposal.flags, measured, proposal.token)
    trials = made.recorded()
    assert [trial.user_attrs["state"] for trial in trials] == states
    assert [trial.state.name for trial in trials] == ["COMPLETE", "PRUNED", "PRUNED", "PRUNED", "FAIL", "FAIL", "FAIL"]
    assert trials[0].value == 100.0
    assert trials[0].constraints == {"launch": -1.0, "ttft_p99": 0.5, "ttft_mean": -0.5}
    assert trials[1].constraints == {"launch": 1.0, "ttft_p99": 0.0, "ttft_mean": 0.0}
    assert trials[1].user_attrs["failure"] == "oom_kv_cache_none"
    assert json.loads(trials[1].user_attrs["flags"]) == made.outcomes[1].flags
    with closing(sqlite3.connect(made.path)) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_an_outcome_outside_the_space_teaches_nothing(sweep):
    made = sweep(None, params={"a": [1, 2]})
    baseline = Outcome(0, "baseline", {}, _measured(3.0), "2026-01-02T03:04:05+00:00")
    made.study.tell(baseline, made.judged(baseline), point=None)
    made.study.tell(baseline, made.judged(baseline), point={"a": 5})
    assert made.recorded() == []


def test_a_baseline_inside_the_space_is_not_proposed_again(sweep):
    made = sweep(None, params={"a": [1, 2]})
    baseline = Outcome(0, "baseline", {}, _measured(3.0), "2026-01-02T03:04:05+00:00")
    made.study.tell(baseline, made.judged(baseline), point={"a": 2})
    assert made.study.ask().flags == {"a": 1}
    assert made.study.ask() is None


def test_a_complete_trial_that_measured_nothing_is_no_value(sweep):
    made = sweep(None, params={"a": [1, 2]})
    proposal = made.study.ask()
    made.study.tell(
        Outcome(0, "search", proposal.flags, Measured("complete"), "2026-01-02T03:04:05+00:00"),
        Verdict(None, None, None),
        token=proposal.token,
    )
    assert [trial.state.name for trial in made.recorded()] == ["FAIL"]


def test_another_direction_is_another_study(sweep):
    made = sweep(None)
    made.study.close()
    made.section = _section(objective={"minimize": "ttft_p99"})
    with pytest.raises(ConfigError, match=r"begun to maximize.*another run\.name"):
        made.open()


def test_a_broken_record_says_what_to_do(tmp_path):
    path = tmp_path / "study.db"
    path.write_text("this is no database " * 100)
    section = _section()
    with pytest.raises(MachineError, match="Move this file away"):
        Study.open(path, "sweep", Space(section.params), section.objective, section)


def test_optuna_is_quiet_here_and_unchanged_elsewhere(sweep, capfd):
    level = logging.getLogger("optuna").level
    made = sweep(_walled)
    for _ in range(10):
        made.step()
    assert logging.getLogger("optuna").level == level
    assert capfd.readouterr() == ("", "")


def test_the_sampler_is_chosen_by_what_is_installed(monkeypatch):
    assert [resolve_sampler(name) for name in ("auto", "gp", "tpe", "random")] == ["gp", "gp", "tpe", "random"]
    monkeypatch.setitem(sys.modules, "torch", None)  # as if it were not installed
    assert [resolve_sampler(name) for name in ("auto", "tpe", "random")] == ["tpe", "tpe", "random"]
    with pytest.raises(ConfigError, match="gp needs scipy and torch"):
        resolve_sampler("gp")
