import pytest

from sweep.measure.prefix import block_tokens, expected_hits, is_cached, offered_frac
from sweep.measure.summary import level_stats
from sweep.model import LevelStats, RequestRecord
from tests.measure.records import load_run, request, scraped

SECOND = 1000


def steady(**more) -> list[RequestRecord]:
    """Ten requests a second over ten seconds: TTFT 100 ms, 11 tokens each."""
    return [request(start=t, chunks=[(t + 100, 1), (t + 150, 10)], **more) for t in range(0, 10_000, 100)]


def stats_of(records, *scrapes, **more) -> LevelStats:
    values = {"window": (0, 10_000), "start": -10, "drained": True, "end": 10_200}
    return level_stats(load_run(records, **{**values, **more}), {}, scrapes)


def edges(records, server_ttft_s: float, *, count: int | None = None, more_tokens: int = 0):
    """Scrapes before and after, of a server that served just these requests."""
    n = len(records) if count is None else count
    tokens = sum(r.output_tokens for r in records) + more_tokens
    return scraped(-5, generated=7, ttft=(1.0, 3)), scraped(
        10_300, generated=7 + tokens, ttft=(1.0 + n * server_ttft_s, 3 + n)
    )


def test_a_quiet_client_is_valid_and_its_overhead_is_told() -> None:
    stats = stats_of(steady(), *edges(steady(), 0.0985))
    assert stats.valid
    assert stats.reasons == ()
    assert stats.client is not None
    assert stats.client.overhead_s == pytest.approx(0.0015)
    assert (stats.client.tokens, stats.client.server_tokens) == (1100, 1100)


@pytest.mark.parametrize(("server_s", "valid"), [(0.0962, True), (0.094, False), (0.05, False)])
def test_a_client_that_sees_first_tokens_late_is_not_valid(server_s: float, valid: bool) -> None:
    busy = {"loop_lag_p99_s": 0.02, "busiest_frac": 0.93, "stamp_source": "protocol"}
    stats = stats_of(steady(), *edges(steady(), server_s), **busy)
    assert (stats.valid, stats.again) == (valid, not valid)
    if not valid:
        assert "the client saw first tokens" in stats.reasons[0]
        assert "its event loop was up to 20.0 ms late, it used 93% of a core" in stats.reasons[0]


def test_where_the_kernel_says_when_first_tokens_came_their_delay_is_not_the_clients() -> None:
    stats = stats_of(steady(), *edges(steady(), 0.05), loop_lag_p99_s=0.02)
    assert (stats.valid, stats.again) == (True, False)
    assert "first tokens came 50.0 ms after the server made them" in stats.reasons[0]
    assert "HTTP front end or on the network" in stats.reasons[0]


def test_lag_and_cpu_alone_are_no_fault() -> None:
    assert stats_of(steady(), *edges(steady(), 0.099), loop_lag_p99_s=0.5, busiest_frac=1.0).reasons == ()


def test_a_server_that_counts_other_requests_too_is_not_compared() -> None:
    stats = stats_of(steady(), *edges(steady(), 0.01, count=160))
    assert stats.client is not None
    assert stats.client.overhead_s is None


def test_a_few_unmatched_requests_make_the_comparison_only_less_sharp() -> None:
    slow = [request(start=t, chunks=[(t + 100 + 20 * (t // 100 % 10), 1)]) for t in range(0, 10_000, 100)]
    exact, fuzzy = (stats_of(slow, *edges(slow, 0.175, count=n), stamp_source="wakeup") for n in (100, 96))
    assert not exact.valid
    assert fuzzy.valid


def test_a_server_that_is_slower_than_its_client_is_worth_a_word() -> None:
    stats = stats_of(steady(), *edges(steady(), 0.2))
    assert stats.valid
    assert "slower than the client saw (mean TTFT 100.0 ms against the server's 200.0 ms)" in stats.reasons[0]


@pytest.mark.parametrize(("scheduled", "limit_ms", "gap"), [(True, 5, "100.0 ms"), (False, 20, "400.0 ms")])
def test_requests_that_are_sent_late_make_the_level_invalid(scheduled: bool, limit_ms: float, gap: str) -> None:
    """An open loop has 100 ms between arrivals, a closed one of four slots 400 ms between two requests of a slot."""

    def sent(late_ms: float) -> LevelStats:
        return stats_of(
            [
                request(sched=t if scheduled else None, start=t, send=t + late_ms, chunks=[(t + 400, 1)])
                for t in range(0, 10_000, 100)
            ]
        )

    assert sent(0.98 * limit_ms).valid
    late = sent(1.02 * limit_ms)
    assert (late.valid, late.again) == (False, True)
    assert f"late on average, with {gap} from one to the next" in late.reasons[0]


def test_events_that_are_known_only_to_be_no_later_than_noted() -> None:
    assert stats_of([*steady()[1:], request(late_events=2)]).valid
    late = stats_of([*steady()[3:], *[request(late_events=1)] * 3])
    assert (late.valid, late.again) == (False, True)
    assert "came no later than noted" in late.reasons[0]
    assert "without the kernel's time stamp" in stats_of(steady(), unstamped_frac=0.02).reasons[0]


@pytest.mark.parametrize(("more", "valid"), [(5, True), (6, False), (-6, False), (4000, False)])
def test_the_servers_count_of_tokens_is_held_against_the_clients(more: int, valid: bool) -> None:
    stats = stats_of(steady(), *edges(steady(), 0.099, more_tokens=more))
    assert (stats.valid, stats.again) == (valid, not valid)
    if more == 4000:
        assert "made 5100 tokens, the client received 1100: somebody else uses the server" in stats.reasons[0]


def test_tokens_are_not_compared_where_they_cannot_be() -> None:
    loose = edges(steady(), 0.099, more_tokens=500)
    assert stats_of(steady(), *loose, drained=False).valid
    assert stats_of(steady(token_count="approx"), *loose).valid
    assert stats_of(steady(), loose[0], (loose[0][0] + 1, loose[1][1])).valid  # none after the level
    lost = [*steady(), request(status="timeout_stall", chunks=[(20, 1)], requested_tokens=400)]
    assert stats_of(lost, *edges(lost, 0.099, more_tokens=390)).valid


def test_a_server_that_was_started_anew() -> None:
    first, last = edges(steady(), 0.099)
    stats = stats_of(steady(), first, scraped(5000, generated=900), scraped(6000, generated=3), last)
    assert (stats.valid, stats.again) == (False, False)
    assert "a counter of the server went down" in stats.reasons[0]


def test_worthless_figures_are_not_valid() -> None:
    stats = level_stats(load_run([request(counted=False, status="connect", chunks=[])]), {})
    assert (stats.valid, stats.again) == (False, False)
    assert "no request was counted; before that: connect 1" in stats.reasons[0]
    unsent = level_stats(load_run([request(t_send_ns=None)]), {})
    assert "latencies are not known" in unsent.reasons[0]
    stalled = level_stats(load_run([request()], ended_early="stalled"), {})
    assert "no stream brought a byte any more" in stalled.reasons[0]


def test_the_servers_own_faults_are_not_measured_again() -> None:
    failed = [*steady()[10:], *[request(status="http_500", chunks=[])] * 10]
    stats = stats_of(failed, unstamped_frac=0.5)
    assert len(stats.reasons) == 2
    assert not stats.again


def grouped() -> list[RequestRecord]:
    """Prompts of 100 tokens, 40 of them shared in two groups."""
    return [request(start=t, group=t // 100 % 2, prefix_tokens=40) for t in range(0, 10_000, 100)]


def test_what_an_ideal_prefix_cache_could_have_served() -> None:
    records = [
        request(start=-9, counted=False, group=0, prefix_tokens=60),
        request(start=1, group=0, prefix_tokens=60),
        request(start=2, group=1, prefix_tokens=60),
        request(start=3, group=1, prefix_tokens=60),
        request(start=4, history_tokens=80, turn=1),
    ]
    assert offered_frac(records) == pytest.approx((2 * 60 + 80) / 400)
    assert offered_frac([request()]) == 0
    assert offered_frac([]) is None
    assert expected_hits(records, 16) == (2 * 48 + 80, 500)
    assert expected_hits(records, 64) == (64, 500)


@pytest.mark.parametrize(("hits", "valid"), [(0, True), (98 * 32, True), (98 * 32 + 1900, False), (9900, False)])
def test_hits_that_the_prompts_cannot_explain_come_from_elsewhere(hits: int, valid: bool) -> None:
    stats = stats_of(grouped(), scraped(-5, hits=50), scraped(10_300, hits=50 + hits))
    assert (stats.valid, stats.again) == (valid, not valid)
    if not valid:
        assert "it still knew prompts from before" in stats.reasons[0]


def test_of_prompts_that_are_not_known_to_the_token_hits_prove_nothing() -> None:
    run = load_run(grouped(), window=(0, 10_000), start=-10, end=10_200)
    scrapes = [scraped(-5, hits=50), scraped(10_300, hits=9950)]
    assert level_stats(run, {}, scrapes, exact_prompts=False).valid
    assert not level_stats(run, {}, scrapes).valid


def test_a_prefix_shorter_than_a_block_is_worth_a_word_where_there_is_a_cache() -> None:
    config = 'block_size="64",enable_prefix_caching="{}"'
    found = [
        stats_of(grouped(), scraped(-5, config=config.format(on)), scraped(10_300, config=config.format(on)))
        for on in (True, False)
    ]
    assert [stats.valid for stats in found] == [True, True]
    assert "40 tokens is shorter than a block of the KV cache (64)" in found[0].reasons[0]
    assert found[1].reasons == ()


def test_what_the_server_says_of_its_cache() -> None:
    assert (block_tokens({"block_size": "32"}), block_tokens({}), block_tokens({"block_size": "None"})) == (32, 16, 16)
    assert (is_cached({}), is_cached({"enable_prefix_caching": "False"})) == (True, False)
