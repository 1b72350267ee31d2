"""Reading limits on latencies."""

import pytest

from sweep.slo import read_slo, split_slo


def test_limits_are_read_into_seconds():
    assert read_slo({"ttft_p99": "1s", "tpot_mean": "50ms", "e2e_p95": " 1.5 s ", "itl_p90": ".5ms"}) == {
        "ttft_p99": 1.0,
        "tpot_mean": 0.05,
        "e2e_p95": 1.5,
        "itl_p90": 0.0005,
    }


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"ttft_p99": 200}, "200 has no unit; write 200ms or 200s"),
        ({"ttft_p99": "0.2"}, "has no unit"),
        ({"ttft_p99": "-1s"}, "no duration"),
        ({"ttft_p99": "0ms"}, "above 0"),
        ({"ttft_p99": "1e999s"}, "above 0"),
        ({"ttft_p99": True}, "no duration"),
        ({"ttft_p99": None}, "no duration"),
        ({"ttft_p101": "1s"}, "unknown latency 'ttft_p101'.*did you mean 'ttft_p"),
        ({"tftt_p99": "1s"}, "did you mean 'ttft_p99'"),
        ({"output_tps": "1s"}, "output_tps is a rate"),
        ({7: "1s"}, "unknown latency 7"),
    ],
)
def test_limits_that_are_refused(raw, message):
    with pytest.raises(ValueError, match=message):
        read_slo(raw)


def test_a_name_is_taken_apart():
    assert split_slo("ttft_p99") == (None, "ttft", "p99")
    assert split_slo("chat.e2e_mean") == ("chat", "e2e", "mean")
