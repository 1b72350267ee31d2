"""The load client: a level of load, and the few quick questions that come before one."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from dataclasses import replace

import aiohttp

from sweep.load.attempt import Attempt, record
from sweep.load.level import Judge, Tally, Warmup, run_level
from sweep.load.plan import Ask
from sweep.load.prompts import Prompt, words
from sweep.load.sse import error_words
from sweep.load.stamps import StampClock
from sweep.load.wire import Meter, Target, open_session, open_wire, words_of
from sweep.model import RequestRecord

__all__ = [
    "Judge",
    "Tally",
    "Target",
    "Warmup",
    "complete_once",
    "probe",
    "run_level",
    "served_models",
    "tokens_per_word",
]

_QUICK_TIMEOUT_S = 10.0
_ANSWER_TIMEOUT_S = 120.0
_WORDS_ASKED = (10, 90)


async def served_models(target: Target) -> list[str]:
    """Ask /v1/models which names the server answers to. Raises OSError, TimeoutError or ValueError with its words."""
    async with open_session(target, aiohttp.TCPConnector()) as session, asyncio.timeout(_QUICK_TIMEOUT_S):
        try:
            async with session.get(target.url("/v1/models")) as response:
                body = await response.read()
                if response.status != 200:
                    words = words_of(body)
                    words = words.replace(target.api_key, "***") if target.api_key else words
                    raise ValueError(f"HTTP {response.status}: {words}")
                return [str(card["id"]) for card in json.loads(body)["data"]]
        except aiohttp.ClientError as error:
            raise ConnectionError(error_words(str(error))) from error
        except (KeyError, TypeError) as error:
            raise ValueError("the answer is no list of models") from error


async def complete_once(
    target: Target, prompt: list[int] | str, max_tokens: int, timeout_s: float = _ANSWER_TIMEOUT_S
) -> RequestRecord:
    """Run one real completion: only its answer proves that a server is ready."""
    tokens = len(prompt.split()) if isinstance(prompt, str) else len(prompt)
    attempt = Attempt(
        request_id=f"warmup-{uuid.uuid4().hex[:12]}",
        counted=False,
        ask=Ask(
            conversation=0,
            turn=0,
            kind=None,
            new_tokens=tokens,
            output_tokens=max_tokens,
            natural=False,
            group=None,
            prefix_tokens=0,
            history_tokens=0,
            think_s=0.0,
            row=None,
            adapter=None,
            fields={},
            salt="",
        ),
        prompt=Prompt(prompt, tokens, exact=not isinstance(prompt, str)),
        t_start_ns=time.perf_counter_ns(),
    )
    async with open_wire(target, StampClock(), Meter(), salt=attempt.request_id) as wire:
        try:
            async with asyncio.timeout(timeout_s):
                await wire.send(attempt)
        except TimeoutError:
            attempt.status, attempt.error = "timeout_ttft", f"no answer within {timeout_s:g} s"
    attempt.t_end_ns = time.perf_counter_ns()
    return record(attempt, vllm=target.vllm, secret=target.api_key)[0]


async def tokens_per_word(target: Target) -> float | None:
    """Ask how many tokens of this model a made-up word is, by two prompts; None where the server does not tell.

    What a chat template adds is in both of them, and so in neither.
    """
    counts = []
    for number in _WORDS_ASKED:
        record = await complete_once(target, words(number, seed=number), 1)
        if record.status not in {"ok", "length_mismatch"}:
            return None
        counts.append(record.prompt_tokens)
    slope = (counts[1] - counts[0]) / (_WORDS_ASKED[1] - _WORDS_ASKED[0])
    return slope if slope > 0 else None


async def probe(target: Target, ids: list[int], text: str, max_tokens: int) -> tuple[Target, RequestRecord]:
    """Find out by real completions whether the server knows vLLM's fields; a server that does not is asked plainly."""
    asked = replace(target, vllm=True)
    first = await complete_once(asked, text if target.endpoint == "chat" else ids, max_tokens)
    if first.status not in {"http_400", "http_422"}:
        return asked, first
    plain = replace(target, vllm=False)
    return plain, await complete_once(plain, text, max_tokens)
