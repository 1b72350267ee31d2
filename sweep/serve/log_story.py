"""What a server was doing at a line of its log: during what memory ran out, and what did not stop it."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import NamedTuple

from sweep.failure import FailureKind, Phase
from sweep.serve.log_lines import Line

# The functions of a traceback, of which the outermost decides. The KV cache is allocated after everything has been
# measured: where that fails, less is free than vLLM had reason to think.
_FUNCTIONS: tuple[tuple[str, FailureKind], ...] = (
    (r"\b(?:load_model|get_model|_load_model)\b", "oom_weights"),
    (
        r"\bdetermine_(?:available_memory|num_available_blocks)\b|\bprofile_(?:run|num_available_blocks)\b",
        "oom_activation_profile",
    ),
    (r"\b_?(?:allocate_kv_cache\w*|initialize_kv_cache(?:_tensors)?)\b", "oom_free_memory_lt_requested"),
    (
        (
            r"\b(?:initialize_cache|compile_or_warm_up_model|capture(?:_model|_end|_graphs?)?|graph_capture"
            r"|_capture_cudagraphs)\b|torch\.cuda\.graph\("
        ),
        "oom_cudagraph_capture",
    ),
    (
        (r"\b(?:run_engine_loop|run_busy_loop|sample_tokens|execute_model|step_fn|engine_step)\b"),
        "oom_runtime",
    ),
)
# The last step of the start that the log has told of.
_STEPS: tuple[tuple[str, FailureKind], ...] = (
    (
        (
            r"Initializing an? (?:V1 )?LLM engine|Starting to load model|Loading (?:safetensors|pt"
            r"|model weights)\b(?! took)"
        ),
        "oom_weights",
    ),
    (
        (
            r"oading (?:model )?weights took|odel loading took|Dynamo bytecode|torch\.compile takes"
            r"|[Ee]ncoder cache will be"
        ),
        "oom_activation_profile",
    ),
    (r"KV cache size: |KV cache memory: |# \w+ blocks|[Cc]apturing|Graph capturing", "oom_cudagraph_capture"),
)
_READY = re.compile(r"Application startup complete|Uvicorn running on")
# A server whose engine is blocked goes on writing its throughput: of nothing.
_WORKS = re.compile(r'"POST /v1/\S{1,80} HTTP/[\d.]+" 200\b|generation throughput: (?!0\.0 )\d')
_ANEW = re.compile(r"vLLM API server version|Initializing an? (?:V1 )?LLM engine")
_SERVED = re.compile(
    r'"POST /v1/|\bthroughput: |EngineCore encountered a fatal error|Engine background task failed'
    r"|MQLLMEngine is already dead|Background loop has errored|EngineDeadError"
)
_NOT_STARTED = re.compile(
    r"Engine core initialization failed|(?:EngineCore|WorkerProc|Engine process) failed to start"
    r"|Proc initialization failed"
)
_WAITS = re.compile(r"Waiting for \d+ (?:local, \d+ remote )?core engine")
_BLOCKED = re.compile(r"No available (?:shared memory broadcast )?block found in \d+ second")
_STOPS = re.compile(r"^Shutting down$|shutdown triggered|^Application shutdown complete|[Rr]eceived (?:exit )?signal")
_KILLS_ITSELF = re.compile(r"Got fatal signal from worker|EngineCore hit an exception|WorkerProc hit an exception: %s")
_AVAILABLE = re.compile(r"Available KV cache memory: (-?[\d.]+) Gi?B")


# What a line is looked at for, by the words that a line must hold for it.
_TOPICS: dict[str, tuple[str, ...]] = {
    "function": (
        *("load_model", "get_model", "determine_", "profile_", "kv_cache", "initialize_cache"),
        *("compile_or_warm_up_model", "capture", "torch.cuda.graph(", "run_engine", "run_busy_loop", "sample_tokens"),
        *("execute_model", "step_fn", "engine_step"),
    ),
    "traceback": ("Traceback (",),
    "step": (
        *(
            "LLM engine",
            "Starting to load model",
            "oading safetensors",
            "oading pt ",
            "oading model",
            "oading weights took",
        ),
        *("odel loading took", "Dynamo bytecode", "torch.compile takes", "ncoder cache will"),
        *("KV cache size: ", "KV cache memory: ", " blocks: ", "apturing"),
    ),
    "in call": ("WorkerProc hit an exception",),
    "ready": ("Application startup complete", "Uvicorn running on"),
    "served": (
        *('"POST /v1/', "throughput: ", "EngineCore encountered a fatal error", "Engine background task failed"),
        *("MQLLMEngine is already dead", "Background loop has errored", "EngineDeadError"),
    ),
    "works": ('"POST /v1/', "generation throughput: "),
    "ignored": ("Ignoring this choice",),
    "anew": ("vLLM API server version", "LLM engine"),
    "not started": ("Engine core initialization failed", "failed to start", "Proc initialization failed"),
    "waits": ("core engine proc", "No available "),
    "stops": ("Shutting down", "shutdown triggered", "Application shutdown complete", "eceived signal", "eceived exit"),
    "kills itself": ("Got fatal signal from worker", "EngineCore hit an exception", "WorkerProc hit an exception: %s"),
    "available": ("Available KV cache memory: ",),
}


class Step(NamedTuple):
    """What was going on at a line. function: by the traceback that it ends; step: by the log; in_call: of a worker."""

    function: FailureKind | None
    step: FailureKind | None
    ready: bool
    in_call: bool


class Story:
    """Told line by line; knows what is going on, and in the end what has happened."""

    def __init__(self) -> None:
        self.ready = False
        self.served = False
        self.stopping = False
        self.kills_itself = False
        self.available_kv_gib: str | None = None
        self.waits = 0  # lines of an engine that waits, since the last that shows progress
        self.blocked = 0
        self._not_started = False
        self._function: FailureKind | None = None
        self._before: FailureKind | None = None  # the function of the traceback before this one
        self._step: FailureKind | None = None
        self._in_call = False
        self._step_words: Sequence[bytes] = ()

    def now(self) -> Step:
        return Step(self._function or self._before, self._step, self.ready, self._in_call)

    @property
    def phase(self) -> Phase:
        return "load" if self.ready or (self.served and not self._not_started) else "start"

    @property
    def tells_of_a_start(self) -> bool:
        return self._step is not None

    def topics(self, *, during: bool, doubtful: bool) -> dict[bytes, list[str]]:
        """Return what lines are to be looked at for, by their words.

        during: it still matters during what memory may run out. doubtful: what shows that the server works matters.
        """
        works = doubtful or self.blocked > 0
        needless = {
            name
            for name, known in (
                ("served", self.served),
                ("works", not works),
                ("function", not during),
                ("traceback", not during),
            )
            if known
        }
        topics: dict[bytes, list[str]] = {}
        for topic, words in _TOPICS.items():
            for word in words if topic not in needless else ():
                topics.setdefault(word.encode(), []).append(topic)
        return topics

    def is_over(self, line: Line, topics: Collection[str]) -> bool:
        """Return whether this line begins the story of another server, in a log that holds several."""
        return self.ready and "anew" in topics and _ANEW.match(line.text) is not None

    def see(self, line: Line, topics: Collection[str], *, loud: bool) -> bool:
        """Take in a line; loud: it is no mere INFO or WARNING. Returns whether it shows that the server goes on."""
        text = line.text
        if loud:
            self._see_trouble(text, topics)
        if "served" in topics and _SERVED.search(text):
            self.served = True
        if "stops" in topics and _STOPS.search(text):
            self.stopping = True
        if "available" in topics and (match := _AVAILABLE.search(text)):
            self.available_kv_gib = match[1]
        if "waits" in topics:
            self.waits += _WAITS.search(text) is not None
            self.blocked += _BLOCKED.search(text) is not None
        return (not loud or line.level is None) and self._see_progress(text, topics)

    def says_nothing_new(self, topics: Collection[str], words: Sequence[bytes]) -> bool:
        """Return whether a line need not be read, by its words; take in what they alone say."""
        if "traceback" in topics:
            self._before, self._function = self._function or self._before, None
        known = {"traceback", "in call"} if self.ready else {"traceback", "in call", "anew"}
        if "in call" in topics:
            self._in_call = True
        if self._function is not None:
            known.add("function")
        if words == self._step_words and not (self.waits or self.blocked):
            known.add("step")  # the same progress bar, drawn again
        elif "step" in topics:
            self._step_words = words
        return known.issuperset(topics)

    def _see_progress(self, text: str, topics: Collection[str]) -> bool:
        if "ready" in topics and _READY.search(text):
            self.ready, self.stopping = True, False
            self.waits = self.blocked = 0
            self._step = "oom_runtime"
            return True
        if "step" in topics and (
            step := next((kind for pattern, kind in _STEP_PATTERNS if pattern.search(text)), None)
        ):
            self.waits = self.blocked = 0
            self._step = step
            return True
        if "works" in topics and _WORKS.search(text):
            self.waits = self.blocked = 0
            return True
        return False

    def _see_trouble(self, text: str, topics: Collection[str]) -> None:
        if "function" in topics:
            self._function = next((kind for pattern, kind in _FUNCTION_PATTERNS if pattern.search(text)), None)
        if "not started" in topics:
            self._not_started |= _NOT_STARTED.search(text) is not None
        if "kills itself" in topics:
            self.kills_itself |= _KILLS_ITSELF.search(text) is not None

    def of_memory(self, at: Step, phase: Phase | None, allocation_bytes: float | None) -> FailureKind:
        """Return which kind of memory failure it was that showed at this step."""
        if at.function is not None and at.function != "oom_runtime":
            return at.function
        before_cache = at.step in {"oom_weights", "oom_activation_profile"} and not self.served
        loaded = "load" in {phase, self.phase} and not self._not_started
        serving = at.function == "oom_runtime" or loaded
        if at.ready or (serving and not before_cache):
            return "oom_runtime"
        if at.step is not None:
            return at.step
        # A bare exception. A worker that is asked for something has its weights already, and has more often come
        # through its profiling than not; an engine that wanted less than a GiB was most often filling in weights.
        if at.in_call:
            return "oom_cudagraph_capture"
        return "oom_weights" if allocation_bytes is not None and allocation_bytes < 2**30 else "oom_activation_profile"


def _compiled(rows: tuple[tuple[str, FailureKind], ...]) -> tuple[tuple[re.Pattern[str], FailureKind], ...]:
    return tuple((re.compile(pattern), kind) for pattern, kind in rows)


_FUNCTION_PATTERNS = _compiled(_FUNCTIONS)
_STEP_PATTERNS = _compiled(_STEPS)
