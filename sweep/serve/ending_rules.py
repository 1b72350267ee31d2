"""The messages of the client's side, and those that only follow from another: for logs that say nothing better."""

from __future__ import annotations

from sweep.serve.rule import CONSEQUENCE, MODULE, SYMPTOM, WRAPPER, rule

_ERROR = rf"{MODULE}[A-Z]\w{{0,80}}?(?:Error|Exception)\b"
_WRAPPED = (
    r"(?:Engine core initialization failed|Engine process failed to start|WorkerProc initialization failed"
    r"|Frontend process failed during|Executor failed\.|Worker failed with error)"
)
# What the processes say that lose another one.
_BROKEN = r"(?:[\w.]{1,120}\.)?(?:BrokenPipeError|ConnectionResetError|EOFError|CancelledError|ContextTerminated)\b"

CLIENT_RULES = (
    rule(
        "client_404_model_name",
        "abort_sweep",
        r"The model `[^`]{1,300}` does not exist|Initial test run failed.{0,200}Not Found|\{.detail.: ?.Not Found.\}"
        r"|The model '[^']{1,300}' does not exist",
        any_level=True,
        doubtful=True,
        rank=SYMPTOM,
    ),
    rule(
        "client_401",
        "abort_sweep",
        r'^HTTP/[\d.]+ 401|\{"error": ?"Unauthorized"\}|\b401 Unauthorized\b|AuthenticationError: Error code: 401'
        r"|Incorrect API key|[Ss]tatus(?: code|_code)?(?:=|: ?| )401\b",
        words=(
            "HTTP/1.1 401",
            "HTTP/1.0 401",
            "HTTP/2 401",
            '"Unauthorized"}',
            "401 Unauthorized",
            "AuthenticationError",
            "Incorrect API key",
            *("tatus=401", "tatus:401", "tatus: 401", "tatus 401", "ode=401", "ode:401", "ode: 401", "ode 401"),
        ),
        any_level=True,
        doubtful=True,
        rank=SYMPTOM,
    ),
    rule(
        "client_timeout",
        "retry",
        r"Initial test run failed.{0,200}(?:Time-?out|Bad Gateway|Service Unavailable)|ServerDisconnectedError"
        r"|^(?:[\w.]{1,120}\.)?(?:API)?Time[oO]ut(?:Error|Exception)\b:?(?: Request timed out\.?)? *$"
        r"|ServerTimeoutError"
        r"|SocketTimeoutError|ClientPayloadError|ClientOSError|ClientConnector\w*Error|APIConnectionError"
        r"|APITimeoutError"
        r"|httpx\.(?:Read|Connect|Write|Pool)(?:Timeout|Error)|RemoteProtocolError|Connection timeout to host"
        r"|ConnectionRefusedError"
        r"|requests\.exceptions\.\w*(?:Timeout|ConnectionError)",
        words=(
            "Initial test run failed",
            "ServerDisconnectedError",
            "Timeout",
            "TimeOut",
            "ClientPayloadError",
            "ClientOSError",
            "ClientConnector",
            "APIConnectionError",
            "httpx.",
            "RemoteProtocolError",
            "Connection timeout to host",
            "requests.exceptions.",
        ),
        rank=CONSEQUENCE,
        doubtful=True,
    ),
)

ENDING_RULES = (
    rule(
        "engine_dead",
        "fail_trial",
        r"EngineDeadError|MQLLMEngine is already dead|Engine process \(pid \d+\) died|Background loop has errored"
        r"|[Ee]ngine core proc \S+ died unexpectedly|engine core exited unexpectedly|EngineCore died"
        r"|Background loop is stopped|Engine loop (?:has died|is not running)"
        r"|Worker proc \S+ died unexpectedly|RayWorkerProc rank=\d+ died",
        rank=CONSEQUENCE,
        any_level=True,
    ),
    rule("engine_dead", "fail_trial", r"EngineCore encountered a fatal error", rank=WRAPPER, any_level=True),
    rule(
        "engine_dead",
        "fail_trial",
        r'"GET /health HTTP/[\d.]+" 50[03]\b',
        words=('" 500 ', '" 503 '),
        rank=WRAPPER,
        any_level=True,
        doubtful=True,
    ),
    rule(
        "other",
        "abort_sweep",
        r"Error: .{0,300}pip install|Error: Please install ",
        "A library that this flag or model needs is missing in the server's environment: install what the line names.",
        rank=CONSEQUENCE,
    ),
    rule(
        "version_mismatch",
        "abort_sweep",
        r"^(?:ModuleNotFoundError|ImportError|(?:[\w.]{1,120}\.)?PackageNotFoundError): ",
        "A library that vLLM needs is missing or too old in the server's environment: install what the line names.",
        words=("ModuleNotFoundError: ", "ImportError: ", "PackageNotFoundError: "),
        rank=CONSEQUENCE,
    ),
    rule(
        "other",
        "fail_trial",
        rf"^(?!{_BROKEN}){_ERROR}(?:: (?!{_WRAPPED})|\(['\"](?!{_WRAPPED})|$)",
        words=("Error: ", "Error(", "Exception: ", "Exception(", "AssertionError", "NotImplemented"),
        rank=CONSEQUENCE,
        doubtful=True,
    ),
    rule("other", "fail_trial", r"died, exit code: -15", rank=CONSEQUENCE, doubtful=True),
    rule(
        "other",
        "fail_trial",
        rf"{_WRAPPED}|^{_BROKEN}|The actor died unexpectedly|EngineCore failed to start|EngineCore hit an exception"
        r"|Got fatal signal from worker|WorkerProc (?:failed|hit an exception)",
        "The log does not say the cause in words that are known here: look above the quoted line in the log.",
        words=(
            *("BrokenPipeError", "ConnectionResetError", "EOFError", "CancelledError", "ContextTerminated"),
            "Engine core initialization failed",
            "Engine process failed to start",
            "WorkerProc ",
            "Frontend process failed during",
            "Executor failed.",
            "Worker failed with error",
            "The actor died unexpectedly",
            "EngineCore failed to start",
            "EngineCore hit an exception",
            "Got fatal signal from worker",
        ),
        rank=WRAPPER,
    ),
)
