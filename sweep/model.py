"""The types that cross seams: frozen, without I/O, and all of them survive a trip through JSON.

The coordinator (Optuna, files, progress) and the worker (server, load, measurement) know each other only through these.
Units are part of a name: `_s _bytes _tokens _rps _tps _frac`. A measurement that is missing is None, never 0 or NaN.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from sweep.failure import Failure

# What a vLLM flag can be set to. Keys of a `Flags` are vLLM's long names with dashes and without the leading `--`;
# False means that the flag is switched off (`--no-…`), an absent key that vLLM's own default holds.
FlagValue: TypeAlias = bool | int | float | str | list[Any] | dict[str, Any] | None
Flags: TypeAlias = dict[str, FlagValue]

State: TypeAlias = Literal["complete", "infeasible", "skipped", "pruned", "invalid", "failed", "interrupted"]
Source: TypeAlias = Literal["baseline", "search", "repeat", "confirm", "live"]


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """The memory that a launch's utilization is a share of, seen before the launch; of several devices the fullest.

    source: "nvml" of an NVIDIA driver, "numa" of the node of memory that vLLM's CPU backend takes.
    """

    total_bytes: int
    free_bytes: int
    source: Literal["nvml", "numa"]


# How many values a statistic needs before it is more than an accident: the early-stopping minima of MLPerf's LoadGen.
FEWEST: dict[str, int] = {"mean": 2, "p50": 11, "p90": 64, "p95": 130, "p99": 662}


@dataclass(frozen=True, slots=True)
class Dist:
    """A distribution of `n` values, in seconds. Percentiles are Hyndman-Fan type 7, as numpy's default.

    ci: name of a statistic -> the ends of its 95 % confidence interval, where there are enough values for one.
    """

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    n: int
    ci: dict[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def low_n(self) -> tuple[str, ...]:
        """The statistics that rest on too few values."""
        return tuple(name for name, fewest in FEWEST.items() if self.n < fewest)


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request as the load client saw it. All stamps are `perf_counter_ns`; everything else is derived from them.

    chunks: (received at, number of tokens), one for each event that carried at least one token, in order of arrival.
    status: "ok", or the class of what went wrong: unsendable, connect, http_<code>, inband_error, truncated,
    timeout_ttft, timeout_stall, length_mismatch, empty, cancelled (cut off by the end of the run; neither a success nor
    a failure).
    """

    request_id: str
    counted: bool  # False: warm-up, or load that is kept up while the counted requests end
    t_sched_ns: int | None  # when the open loop's schedule wanted it sent; None in a closed loop
    t_start_ns: int  # its slot was free (the answer before had come), or the client took it up at its time
    t_send_ns: int | None  # first byte written, on a connection already made
    t_headers_ns: int | None
    t_end_ns: int
    chunks: tuple[tuple[int, int], ...]
    prompt_tokens: int
    prefix_group: int | None  # which shared prefix it begins with
    requested_tokens: int
    output_tokens: int
    status: str
    finish_reason: str | None = None
    error: str | None = None  # the server's own words, shortened; never prompt or answer text
    token_count: Literal["exact", "usage", "approx"] = "exact"  # noqa: S105 - how tokens were counted
    kind: str | None = None  # its class, where the load is a mix
    turn: int = 0  # of its conversation
    prefix_tokens: int = 0  # the part that all prompts of its prefix group begin with
    history_tokens: int = 0  # the part that earlier requests brought: turns of a conversation, blocks of a trace
    answer_ns: int | None = None  # first token that is not reasoning; None where the server did not tell them apart
    late_events: int = 0  # events with tokens that a late client read with a later one: known only to be no later


@dataclass(frozen=True, slots=True)
class LoadRun:
    """The load of one level: every request of it, and the steady window in which it was measured."""

    level: str
    records: tuple[RequestRecord, ...]
    start_ns: int
    window_start_ns: int  # the warm-up ended here, without a drain
    window_end_ns: int  # the load was still on
    end_ns: int
    steady: bool
    stamp_source: Literal["kernel", "protocol", "wakeup"]
    cpu_s: float  # process time that the client's processes used from start to end, decoding included
    processes: int = 1  # that the load was dealt out to
    busiest_frac: float | None = None  # process time of the busiest one / time; 1 is a whole core
    loop_lag_p99_s: float | None = None  # how late a timer of the event loop was, in the slowest process
    unstamped_frac: float = 0.0  # share of the reads without the kernel's stamp, where the kernel gives any
    rate_rps: float | None = None  # that the open loop's schedule asks for (of a ramp: the mean over the window)
    drained: bool = False  # what was under way at the end came to its end too, so every token was received
    # Why the judge ended the level before its time: what was asked of it is certain.
    verdict: Literal["pass", "fail", "unstable"] | None = None
    # Why the load stopped before all counted requests had their turn: no stream moved, request after request failed, or
    # the client could not send as fast as it should.
    ended_early: Literal["stalled", "failing", "behind"] | None = None


@dataclass(frozen=True, slots=True)
class ServerStats:
    """What the server's own /metrics say of a window: differences of counters, means of histograms, peaks of gauges."""

    queue_s: float | None = None  # mean per request that finished in the window
    prefill_s: float | None = None
    decode_s: float | None = None
    ttft_s: float | None = None
    e2e_s: float | None = None
    preemptions: int | None = None
    prefix_queries_tokens: int | None = None
    prefix_hits_tokens: int | None = None
    kv_usage_peak_frac: float | None = None
    running_peak: float | None = None
    waiting_peak: float | None = None
    prompt_tokens: int | None = None
    generation_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class LevelStats:
    """One load level measured on one launch. Latencies are of the counted requests that succeeded, in seconds."""

    level: str  # "c=64" for a fixed concurrency, "r=8" for requests a second
    completed: int
    failed: int
    errors: dict[str, int]  # error class -> count
    window_s: float  # the steady window that rates are of
    warmup_s: float
    warmup_requests: int
    steady: bool  # False: the warm-up's limit came before the throughput was steady
    ttft_s: Dist | None
    ttft_sched_s: Dist | None  # from the scheduled time; None in a closed loop
    tpot_s: Dist | None
    itl_s: Dist | None
    e2e_s: Dist | None
    output_tps: float | None  # by the time at which tokens arrived
    total_tps: float | None
    request_rps: float | None
    goodput_rps: float | None  # good ones of the requests due in the window, a second; None when no SLO is set
    slo_attainment_frac: float | None
    prompt_tokens: int
    output_tokens: int
    prefix_offered_frac: float | None  # the share of prompt tokens that an ideal prefix cache could have served
    client: ClientStats | None = None
    server: ServerStats | None = None
    valid: bool = True
    reasons: tuple[str, ...] = ()  # why not valid, or what to be careful about
    e2e_sched_s: Dist | None = None  # from the scheduled time; None in a closed loop
    icl_s: Dist | None = None  # inter-chunk latency: the gap between two events, however many tokens they carry
    ttfot_s: Dist | None = None  # time to the first token that is not reasoning; None where there was none to tell
    rate_rps: float | None = None  # what the open loop asked for
    arrivals: Arrivals | None = None  # None in a closed loop
    stable: bool | None = None  # open loop: the queue did not grow; None where that cannot be said
    cut_off: int = 0  # counted requests that the end of the load cut off before they could succeed or fail
    kinds: dict[str, KindStats] = field(default_factory=dict)  # of a mix: the same for each class
    intervals: dict[str, tuple[float, float]] = field(default_factory=dict)  # name of a rate -> its 95 % interval
    verdict: Literal["pass", "fail", "unstable"] | None = None  # of a judge that ended the level early
    # Not valid because of the client or of somebody else's load, so worth measuring again.
    again: bool = False


@dataclass(frozen=True, slots=True)
class KindStats:
    """One class of a mix. Latencies as in LevelStats."""

    completed: int
    failed: int
    ttft_s: Dist | None
    ttft_sched_s: Dist | None
    tpot_s: Dist | None
    itl_s: Dist | None
    e2e_s: Dist | None
    e2e_sched_s: Dist | None
    slo_attainment_frac: float | None = None


@dataclass(frozen=True, slots=True)
class Arrivals:
    """How requests really arrived in the window of an open loop, by the time at which they were sent."""

    asked_rps: float
    achieved_rps: float
    gap_cv: float | None  # standard deviation of the gaps / their mean: 1 for Poisson, 0 for constant
    dispersion: float | None  # variance / mean of the counts in one-second bins: 1 for Poisson, 0 for constant


@dataclass(frozen=True, slots=True)
class ClientStats:
    """The load client's own cost and punctuality."""

    cpu_us_per_event: float | None
    send_lag_p99_s: float | None  # sent after it was due (open loop) or after its slot was free (closed loop)
    stamp_source: Literal["kernel", "protocol", "wakeup"]
    overhead_s: float | None = None  # mean TTFT of the client - that of the server, over the same requests
    late_events_frac: float | None = None  # events whose arrival is known only to be no later than their stamp
    unstamped_frac: float | None = None
    processes: int = 1
    busiest_frac: float | None = None
    loop_lag_p99_s: float | None = None
    tokens: int | None = None  # received from the first request of the level to the last, whatever became of them
    server_tokens: int | None = None  # generated by the server in the same time; None where the level was not drained


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What the start-up log and the running server say of a launch."""

    vllm_version: str | None = None
    kv_cache_tokens: int | None = None
    max_concurrency: float | None = None
    max_model_len: int | None = None
    available_kv_bytes: int | None = None  # may be negative: what the flags leave for the KV cache
    weights_bytes: int | None = None  # that loading the model took
    graphs_bytes: int | None = None  # that CUDA graphs took
    requested_bytes: int | None = None  # that the server may use in all, its utilization times the total
    free_bytes: int | None = None  # on the device at the start, as the server itself saw it
    total_bytes: int | None = None
    cache_config: dict[str, str] = field(default_factory=dict)  # the labels of vllm:cache_config_info
    devices: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PhaseTimes:
    """Where a trial's time went."""

    launch_s: float | None = None
    warmup_s: float | None = None
    load_s: float | None = None
    stop_s: float | None = None


@dataclass(frozen=True, slots=True)
class Launch:
    """Everything that needs a new server: what is started, with which flags, in which folder.

    flags: all flags of serve.yaml, the fixed and the swept ones together. trial_dir: absolute.
    """

    model: str
    revision: str | None
    command: tuple[str, ...]
    env: dict[str, str]
    flags: Flags
    swept: tuple[str, ...]  # names whose value the search chose; a fixed flag at fault stops the sweep
    trial_dir: str
    start_timeout_s: float
    stall_timeout_s: float
    stop_timeout_s: float


@dataclass(frozen=True, slots=True)
class Job:
    """One trial, as the worker gets it on its stdin: one launch, and what is measured on it.

    load, measure and slo are the JSON forms of the sections of those names; the packages that own them parse them.
    seed: of the trial's prompt contents (fresh in every trial); workload_seed: of lengths and arrivals (shared by all).
    """

    study: str
    trial: int
    launch: Launch
    load: dict[str, Any]
    measure: dict[str, Any]
    slo: dict[str, float]  # "ttft_p99" -> limit in seconds; "chat.ttft_p99" for the class "chat" of a mix
    seed: int
    workload_seed: int
    workload_sha256: str | None = None  # of the planned requests; a worker that would send others refuses
    platform: str | None = None  # what vLLM calls the kind of device; None where it could not be asked


@dataclass(frozen=True, slots=True)
class Measured:
    """What the worker found out about a job, good or bad; it knows nothing of objectives."""

    state: State
    levels: tuple[LevelStats, ...] = ()
    failure: Failure | None = None
    server: ServerFacts = field(default_factory=ServerFacts)
    times: PhaseTimes = field(default_factory=PhaseTimes)
    memory: DeviceMemory | None = None  # just before the launch


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished trial, as `outcome.json` keeps it for ever. The study database and all reports are derived from these.

    flags: the swept flags as this trial set them, and whatever else the baseline or an enqueued entry set.
    """

    trial: int
    source: Source
    flags: Flags
    measured: Measured
    started_at: str  # wall clock, ISO 8601 with offset; for people only
    label: str | None = None  # "baseline", "enqueued 1", "baseline, replaced": how the trial came to be
    attempt: int = 1

    @property
    def state(self) -> State:
        return self.measured.state


@dataclass(frozen=True, slots=True)
class Verdict:
    """An outcome seen through the objective: which level its figures are of, what it is worth, which SLO it missed.

    value: in the objective's own unit, None where nothing could be measured. miss: SLO name -> measured / limit, of the
    misses only; the nearest miss is the trial whose largest ratio is smallest.
    """

    level: LevelStats | None
    value: float | None
    slo_met: bool | None
    miss: dict[str, float] = field(default_factory=dict)
    note: str | None = None  # an SLO that too few requests can judge, and the like

    @property
    def eligible(self) -> bool:
        """Whether this trial can be the best one."""
        return self.value is not None and self.slo_met is not False


EventKind: TypeAlias = Literal["plan", "trial_started", "phase", "trial_finished", "note", "study_finished"]


@dataclass(frozen=True, slots=True)
class Event:
    """Something that people who watch a study want to know. A kind uses the fields it needs, the others stay empty.

    plan, note, study_finished: text. trial_started: trial, total, flags, text (a label).
    phase: trial, text ("loading c=64"). trial_finished: trial, total, outcome, verdict, unit, gain_frac, best.
    Every kind may carry eta_s.
    """

    kind: EventKind
    trial: int | None = None
    total: int | None = None  # trials planned, skipped ones included as they come; None when only time limits the study
    text: str = ""
    flags: Flags = field(default_factory=dict)
    outcome: Outcome | None = None
    verdict: Verdict | None = None
    unit: str = ""  # of verdict.value
    gain_frac: float | None = None  # over the baseline; positive is better, whatever the direction
    best: bool = False  # the best trial so far
    eta_s: float | None = None
