"""The HTTP side of the fake vLLM: endpoints, the shapes of their answers, metrics, and the faults under load."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from typing import TYPE_CHECKING, Any

from aiohttp import web
from engine_model import Engine, Limits, Sequence
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

if TYPE_CHECKING:
    import argparse
    import socket

# What OpenAI's own API knows of a completion's body; vLLM knows more.
PLAIN_FIELDS = frozenset(
    (
        "model",
        "prompt",
        "messages",
        "max_tokens",
        "max_completion_tokens",
        "stream",
        "stream_options",
        "temperature",
        "seed",
        "n",
        "stop",
    )
)
DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."
HISTOGRAMS = {
    "request_queue_time_seconds": (0.3, 1, 5, 20, 60),
    "request_prefill_time_seconds": (0.3, 1, 5, 20, 60),
    "request_decode_time_seconds": (0.3, 1, 5, 20, 60),
    "e2e_request_latency_seconds": (0.3, 1, 5, 20, 60),
    "time_to_first_token_seconds": (0.01, 0.1, 1, 10),
}
COUNTERS = ("prompt_tokens", "generation_tokens", "num_preemptions", "prefix_cache_queries", "prefix_cache_hits")
GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")


class Metrics:
    """vLLM's names. `on_event` is what the engine calls."""

    def __init__(self, model: str, limits: Limits, blocks: int) -> None:
        self.registry = CollectorRegistry()
        labels = {"model_name": model, "engine": "0"}

        def child(kind: Any, name: str, **options: Any) -> Any:
            return kind(f"vllm:{name}", name, list(labels), registry=self.registry, **options).labels(**labels)

        self.counters = {name: child(Counter, name) for name in COUNTERS}
        self.gauges = {name: child(Gauge, name) for name in GAUGES}
        self.times = {name: child(Histogram, name, buckets=edges) for name, edges in HISTOGRAMS.items()}
        config = {
            "block_size": limits.block_size,
            "gpu_memory_utilization": limits.gpu_memory_utilization,
            "enable_prefix_caching": limits.prefix_caching,
            "kv_cache_memory_bytes": limits.kv_cache_memory_bytes,
            "num_gpu_blocks": blocks,
            "cache_dtype": "auto",
            "engine": 0,
        }
        info = Gauge(
            "vllm:cache_config_info", "Information of the LLMEngine CacheConfig", list(config), registry=self.registry
        )
        info.labels(**{k: str(v) for k, v in config.items()}).set(1)

    def on_event(self, event: str, sequence: Sequence, *numbers: int) -> None:
        now = time.perf_counter()
        if event == "token":
            self.counters["generation_tokens"].inc()
        elif event == "prefix":
            self.counters["prefix_cache_queries"].inc(numbers[0])
            self.counters["prefix_cache_hits"].inc(numbers[1])
        elif event == "preempted":
            self.counters["num_preemptions"].inc()
        elif event == "first_token":
            self.counters["prompt_tokens"].inc(len(sequence.prompt))
        elif event == "first_token_out":
            # As in vLLM, where the process that answers requests sees a token later than the engine makes it.
            self.times["time_to_first_token_seconds"].observe(now - sequence.arrived)
        elif event == "finished":
            assert sequence.scheduled is not None
            assert sequence.first_token is not None
            self.times["request_queue_time_seconds"].observe(sequence.scheduled - sequence.arrived)
            self.times["request_prefill_time_seconds"].observe(sequence.first_token - sequence.scheduled)
            self.times["request_decode_time_seconds"].observe(now - sequence.first_token)
            self.times["e2e_request_latency_seconds"].observe(now - sequence.arrived)

    def render(self, engine: Engine) -> bytes:
        self.gauges["num_requests_running"].set(len(engine.running))
        self.gauges["num_requests_waiting"].set(len(engine.waiting))
        self.gauges["kv_cache_usage_perc"].set(engine.used_tokens / engine.capacity)
        return generate_latest(self.registry)


def error_body(message: str, kind: str, code: int, param: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


class RequestError(Exception):
    """Answered with an error's body."""

    def __init__(self, code: int, message: str, kind: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.body = code, error_body(message, kind, code, param)


class Server:
    def __init__(
        self,
        args: argparse.Namespace,
        limits: Limits,
        blocks: int,
        faults: dict[str, float],
        api: Any,
        core: Any,
        engine_pid: int,
    ) -> None:
        self.args, self.limits, self.faults = args, limits, faults
        self.api, self.core, self.engine_pid = api, core, engine_pid
        self.names = ["another-model"] if "wrong_model_name" in faults else args.served_model_name or [args.model]
        self.names += [module.partition("=")[0] for module in args.lora_modules or []]
        self.api_key = args.api_key or os.environ.get("VLLM_API_KEY")
        self.metrics = Metrics(self.names[0], limits, blocks)
        speed = float(os.environ.get("FAKE_VLLM_SPEED", "1"))
        self.tokens_per_word = int(os.environ.get("FAKE_VLLM_TOKENS_PER_WORD", "1"))
        self.engine = Engine(limits, blocks, speed, faults.get("warmup_drift", 0.0), self.metrics.on_event)
        self.requests = 0
        self.completed = 0
        self.dead = False
        self.stop = asyncio.Event()

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self.middleware], client_max_size=2**28)
        app.router.add_get("/health", self.health)
        app.router.add_get("/version", self.version)
        app.router.add_get("/v1/models", self.models)
        app.router.add_post("/v1/completions", self.completions)
        app.router.add_post("/v1/chat/completions", self.chat)
        if "plain_openai" not in self.faults:
            app.router.add_get("/metrics", self.show_metrics)
        return app

    async def serve(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.on_signal)
        runner = web.AppRunner(self.app(), access_log=None, keepalive_timeout=5.0, shutdown_timeout=0.5)
        await runner.setup()
        host, port = sock.getsockname()
        self.api.info("entry.py:140", f"Starting vLLM server on http://{host}:{port}")
        await web.SockSite(runner, sock).start()
        print(f"INFO:     Started server process [{os.getpid()}]", flush=True)
        print("INFO:     Waiting for application startup.", flush=True)
        print("INFO:     Application startup complete.", flush=True)
        parts = (self.engine.run, self.watch_engine, self.log_statistics, self.ask_as_another)
        jobs = [asyncio.create_task(part()) for part in parts]
        await self.stop.wait()
        for job in jobs:
            job.cancel()
        self.api.info("launcher.py:304", "[shutdown] API server: shutting down FastAPI HTTP server")
        await runner.cleanup()
        print("INFO:     Application shutdown complete.", flush=True)

    def on_signal(self) -> None:
        self.api.info("launcher.py:254", "[shutdown] API server: shutdown triggered")
        if "ignore_sigterm" not in self.faults:
            self.stop.set()

    async def watch_engine(self) -> None:
        """The engine process gone: say so to every request, then leave with exit code 0."""
        while True:
            await asyncio.sleep(0.05)
            if os.waitpid(self.engine_pid, os.WNOHANG)[0]:
                break
        self.dead = True
        self.core.record("ERROR", "core.py:1512", "EngineCore encountered a fatal error.")
        self.api.record("ERROR", "async_llm.py:811", f"vllm.v1.engine.exceptions.EngineDeadError: {DEAD}")
        self.engine.fail(DEAD)
        await asyncio.sleep(0.2)
        self.stop.set()

    async def log_statistics(self) -> None:
        while True:
            await asyncio.sleep(0.05 if "flood_log" in self.faults else 10)
            repeat = 200 if "flood_log" in self.faults else 1
            for _ in range(repeat):
                self.api.info(
                    "loggers.py:310",
                    f"Engine 000: Running: {len(self.engine.running)} reqs, Waiting: {len(self.engine.waiting)} reqs, "
                    f"GPU KV cache usage: {100 * self.engine.used_tokens / self.engine.capacity:.1f}%",
                )

    async def ask_as_another(self) -> None:
        while "other_user" in self.faults:
            await asyncio.sleep(0.3)
            begun = self.engine.first_work
            if begun is not None and time.perf_counter() < begun + self.faults["other_user"]:
                self.engine.add(Sequence([1] * 20, "another", 10, time.perf_counter()))

    @web.middleware
    async def middleware(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if request.path.startswith("/v1") and self.api_key and not self.authorized(request):
            return web.json_response({"error": "Unauthorized"}, status=401)
        try:
            response: web.StreamResponse = await handler(request)
        except RequestError as error:
            response = web.json_response(error.body, status=error.code)
        if not self.args.disable_uvicorn_access_log:
            line = f"127.0.0.1:{request.transport and request.transport.get_extra_info('peername')[1]}"
            self.api.raw(f'INFO:     {line} - "{request.method} {request.path} HTTP/1.1" {response.status}')
        return response

    def authorized(self, request: web.Request) -> bool:
        return request.headers.get("Authorization") == f"Bearer {self.api_key}"

    async def health(self, _request: web.Request) -> web.Response:
        return web.Response(status=503 if self.dead else 200)

    async def version(self, _request: web.Request) -> web.Response:
        return web.json_response({"version": "0.32.0"})

    async def models(self, _request: web.Request) -> web.Response:
        cards = [
            {
                "id": n,
                "object": "model",
                "owned_by": "vllm",
                "root": self.args.model,
                "max_model_len": self.limits.max_model_len,
            }
            for n in self.names
        ]
        return web.json_response({"object": "list", "data": cards})

    async def show_metrics(self, _request: web.Request) -> web.Response:
        return web.Response(body=self.metrics.render(self.engine), content_type="text/plain")

    async def completions(self, request: web.Request) -> web.StreamResponse:
        arrived = time.perf_counter()
        body = await self.admit(request)
        prompt = body.get("prompt") or ""
        tokens = self.tokens_of(prompt) if isinstance(prompt, str) else prompt
        return await self.answer(request, body, tokens, arrived, chat=False)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        arrived = time.perf_counter()
        body = await self.admit(request)
        tokens = ["<chat>"] * 4 + self.tokens_of(" ".join(m["content"] for m in body["messages"]))
        return await self.answer(request, body, tokens, arrived, chat=True)

    def tokens_of(self, text: str) -> list[str]:
        """Cut a text: a word is one token, or as many as FAKE_VLLM_TOKENS_PER_WORD says."""
        return [f"{word}/{i}" for word in text.split() for i in range(self.tokens_per_word)]

    async def admit(self, request: web.Request) -> dict[str, Any]:
        """Count the request, play the faults that answer it at once, and check its body."""
        body: dict[str, Any] = await request.json()
        self.requests += 1
        self.trip_after()
        if self.every("http_500_every"):
            raise RequestError(500, "Internal server error", "InternalServerError")
        if self.every("http_503_every"):
            raise RequestError(503, "The server is overloaded or not ready yet.", "ServiceUnavailableError")
        unknown = set(body) - PLAIN_FIELDS
        if unknown and "plain_openai" in self.faults:
            raise RequestError(
                400, f"Unrecognized request arguments: {', '.join(sorted(unknown))}", "invalid_request_error"
            )
        if body.get("model") not in self.names:
            valid = ", ".join(self.names)
            message = f"The model `{body.get('model')}` does not exist. Valid aliases: {valid}."
            raise RequestError(404, message, "NotFoundError", "model")
        return body

    def trip_after(self) -> None:
        if self.requests > self.faults.get("hang_stream_after", float("inf")):
            self.engine.hung = True
        if self.requests > self.faults.get("engine_dead_after", float("inf")) and not self.dead:
            os.kill(self.engine_pid, signal.SIGKILL)

    def every(self, fault: str) -> bool:
        return fault in self.faults and self.requests % self.faults[fault] == 0

    async def answer(
        self, request: web.Request, body: dict[str, Any], tokens: list[Any], arrived: float, *, chat: bool
    ) -> web.StreamResponse:
        if self.dead:
            raise RequestError(500, DEAD, "InternalServerError")
        limit = self.limits.max_model_len
        wanted = body.get("max_completion_tokens") or body.get("max_tokens") or 16
        if len(tokens) + wanted > limit:
            raise RequestError(
                400,
                f"The decoder prompt (length {len(tokens)}) and max_tokens ({wanted}) together are longer than the "
                f"maximum model length of {limit}.",
                "BadRequestError",
            )
        if not body.get("ignore_eos"):  # this model ends by itself after four fifths of any answer
            wanted = max(1, body.get("min_tokens") or 0, wanted * 4 // 5)
        # What an adapter has computed is of no use to another one.
        salt = f"{body['model']} {body.get('cache_salt') or ''}"
        sequence = Sequence(tokens, salt, wanted, arrived)
        faults = {name for name in ("inband_error_every", "cut_every") if self.every(name)}
        self.engine.add(sequence)
        try:
            write = self.stream if body.get("stream") else self.whole
            return await write(request, body, sequence, faults, chat=chat)
        finally:
            self.engine.drop(sequence)
            self.completed += 1
            if self.completed >= self.faults.get("exit0_after", float("inf")):
                self.stop.set()

    async def whole(
        self, _request: web.Request, body: dict[str, Any], sequence: Sequence, _faults: set[str], *, chat: bool
    ) -> web.Response:
        ids = []
        while True:
            item = await sequence.out.get()
            if isinstance(item, str):
                raise RequestError(500, item, "InternalServerError")
            if not ids:
                self.metrics.on_event("first_token_out", sequence)
            ids.append(item[0])
            if item[1]:
                break
        text = "".join(piece(t) for t in ids)
        choice = {"index": 0, "finish_reason": self.reason(body)}
        choice |= {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        name = "chat.completion" if chat else "text_completion"
        return web.json_response(self.envelope(name, [choice]) | {"usage": usage(sequence)})

    async def stream(
        self, request: web.Request, body: dict[str, Any], sequence: Sequence, faults: set[str], *, chat: bool
    ) -> web.StreamResponse:
        name = "chat.completion.chunk" if chat else "text_completion"
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        with_ids = bool(body.get("return_token_ids"))
        last, first = False, True
        while not last:
            item = await sequence.out.get()
            if isinstance(item, str):
                await send(response, error_body(item, "InternalServerError", 500))
                break
            token, last = item
            if first:
                self.metrics.on_event("first_token_out", sequence)
            if first and chat:
                role = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
                await send(response, self.envelope(name, [role]))
            first = False
            choice: dict[str, Any] = {"index": 0, "finish_reason": self.reason(body) if last else None}
            choice |= {"delta": {self.channel(sequence): piece(token)}} if chat else {"text": piece(token)}
            if with_ids:
                choice["token_ids"] = [token]
            await send(response, self.envelope(name, [choice]))
            if "cut_every" in faults and sequence.made > 1:
                await response.write_eof()
                return response
            if "inband_error_every" in faults:
                await send(response, error_body("The request could not be finished.", "InternalServerError", 500))
                break
        if last and (body.get("stream_options") or {}).get("include_usage"):
            await send(response, self.envelope(name, []) | {"usage": usage(sequence)})
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    def channel(self, sequence: Sequence) -> str:
        """With a reasoning parser the first half of a chat's answer is reasoning."""
        sequence.told += 1
        reasons = self.args.reasoning_parser and sequence.told <= sequence.max_tokens // 2
        return "reasoning" if reasons else "content"

    def reason(self, body: dict[str, Any]) -> str:
        return "length" if body.get("ignore_eos") else "stop"

    def envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"cmpl-{self.requests}",
            "object": kind,
            "created": int(time.time()),
            "model": self.names[0],
            "choices": choices,
        }


def piece(token: int) -> str:
    """Every fifth token is a part of a character: it is carried with an empty text."""
    return "" if token % 5 == 0 else f" w{token}"


def usage(sequence: Sequence) -> dict[str, int]:
    prompt, made = len(sequence.prompt), sequence.made
    return {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}


async def send(response: web.StreamResponse, document: dict[str, Any]) -> None:
    await response.write(b"data: " + json.dumps(document, ensure_ascii=False).encode() + b"\n\n")
