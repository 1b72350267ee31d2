"""The values of flags, the section that names them, and the space that they span."""

import math

import pytest
from hypothesis import given, strategies as st
from pydantic import ValidationError

from sweep.search.space import Rule, SearchSection, Space, read_param


@pytest.mark.parametrize(
    ("form", "values", "ordered"),
    [
        ([64, 16, 32], [16, 32, 64], True),
        ([True, False], [True, False], True),
        ([True, 1], [True, 1], True),
        ([0, 0.5, True], [0, 0.5, True], False),
        (["auto", "fp8"], ["auto", "fp8"], True),
        (["a", "b", "c"], ["a", "b", "c"], False),
        (["auto", 1, 2.0], ["auto", 1, 2.0], False),
        (["1e-3", "1e3"], [0.001, 1000], True),
        (["16", 16], ["16", 16], True),
        ([{"level": 3}, {"level": 2}, [1, 2]], [{"level": 3}, {"level": 2}, [1, 2]], False),
        ({"choices": [1, 2]}, [1, 2], True),
        ({"low": 16, "high": 128, "step": "pow2"}, [16, 32, 64, 128], True),
        ({"low": 16.0, "high": 64, "step": "pow2", "log": True}, [16, 32, 64], True),
        ({"low": 0.80, "high": 0.84, "step": 0.01}, [0.80, 0.81, 0.82, 0.83, 0.84], True),
        ({"low": 0, "high": 1, "step": 0.5}, [0, 0.5, 1], True),
        ({"low": 1, "high": 10, "step": 3}, [1, 4, 7, 10], True),
        ({"low": "1e2", "high": 103}, [100, 101, 102, 103], True),
        ({"low": 4, "high": 4}, [4], True),
        ({"low": 0.5, "high": 0.5}, [0.5], True),
        ({"low": 1, "high": 3, "log": True}, [1, 2, 3], True),
    ],
)
def test_values(form, values, ordered):
    param = read_param(form)
    assert list(param.values()) == values
    assert [type(value) for value in param.values() if isinstance(value, bool)] == [
        type(value) for value in values if isinstance(value, bool)
    ]
    assert param.ordered is ordered
    assert param.size == len(values)


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ([], "empty"),
        ([16, 16], "16 stands in the list twice"),
        ([16, 16.0], "twice"),
        ([{"a": 1, "b": 2}, {"b": 2, "a": 1}], "twice"),
        ([None, 1], "null is no value"),
        (["false", True], "write false without quotes"),
        ([float("nan")], "below 1e18"),
        ([float("inf"), 1], "below 1e18"),
        ([10**400], "below 1e18"),
        (["90%"], "write 0.9"),
        ([{1, 2}], "nothing that a flag can be set to"),
        ("abc", "neither a list nor a mapping"),
        (16, "serve.args"),
        (None, "neither"),
        ({}, "low is missing"),
        ({"low": 1}, "high is missing"),
        ({"lo": 1, "high": 2}, r"unknown key 'lo' \(did you mean 'low'\?\)"),
        ({"low": 1, "high": 2, "steps": 1}, "did you mean 'step'"),
        ({"choices": [1], "low": 1}, "remove low"),
        ({"choices": 3}, "unknown key 'choices'|low is missing"),
        ({"low": 5, "high": 1}, "low 5 is above high 1"),
        ({"low": 10, "high": 64, "step": "pow2"}, "low 10 is no power of two.*write 8 or 16"),
        ({"low": 16, "high": 100, "step": "pow2"}, "high 100 is no power of two.*write 64 or 128"),
        ({"low": 0, "high": 64, "step": "pow2"}, "low 0 is no power"),
        ({"low": 1.5, "high": 64, "step": "pow2"}, r"low 1\.5 is no power"),
        ({"low": 1, "high": 4, "step": 0}, "step 0 must be above 0"),
        ({"low": 1, "high": 4, "step": -1}, "step -1 must be above 0"),
        ({"low": 1, "high": 4, "step": "pow3"}, "step: 'pow3' is not a number, or pow2"),
        ({"low": 1, "high": 4, "step": True}, "step: true is not a number"),
        ({"low": True, "high": 4}, "low: true is not a number"),
        ({"low": "90%", "high": "95%"}, "low: '90%' is not a number; write 0.9"),
        ({"low": 0, "high": 4, "log": True}, "low 0 must be above 0"),
        ({"low": 1, "high": 4, "log": True, "step": 2}, "remove one of the two"),
        ({"low": 1, "high": 4, "log": "yes"}, "log is true or false"),
        ({"low": 0, "high": 1, "step": "1e-9"}, "take a larger step"),
        ({"low": 1, "high": math.inf}, "high: .*below 1e18"),
        ({"low": [1], "high": 4}, "low: .* is not a number"),
    ],
)
def test_what_is_refused(form, message):
    with pytest.raises(ValueError, match=message):
        read_param(form)


def test_a_step_that_misses_the_upper_end_is_said():
    param = read_param({"low": 16, "high": 256, "step": 32})
    assert param.values()[-1] == 240
    assert param.note == "step 32 does not end at high 256: the largest value tried is 240"
    assert read_param([16]).note == "has the one value 16, so nothing is searched"
    assert read_param({"low": 0.8, "high": 0.95, "step": 0.05}).note is None


def test_true_and_one_are_different_values():
    param = read_param([True, 0])
    assert param.contains(True)
    assert not param.contains(1)
    assert param.contains(0.0)
    assert not param.contains(False)


@st.composite
def _ranges(draw):
    whole = draw(st.booleans())
    number = st.integers(1, 5000) if whole else st.decimals("0.01", 50, places=2).map(float)
    low, high = sorted((draw(number), draw(number)))
    form = {"low": low, "high": high}
    match draw(st.sampled_from(["none", "step", "log"])):
        case "step":
            form["step"] = draw(st.integers(1, 99) if whole else st.sampled_from([0.1, 0.25, 0.3, 1]))
        case "log":
            form["log"] = True
    return form


@given(
    _ranges()
    | st.lists(st.integers() | st.booleans() | st.text("abc", min_size=1), min_size=1, max_size=5)
    | st.builds(lambda a, b: {"low": 2**a, "high": 2 ** (a + b), "step": "pow2"}, st.integers(0, 9), st.integers(0, 9))
)
def test_every_value_has_its_place_and_lies_within_the_bounds(form):
    try:
        param = read_param(form)
    except ValueError:
        assert isinstance(form, list)  # twice the same, or beyond 1e18: only lists are drawn that freely
        return
    values = list(param.values())
    assert [param.index(value) for value in values] == list(range(param.size))
    if isinstance(form, dict):
        assert values[0] == form["low"]
        assert values == sorted(set(values))
        assert values[-1] <= form["high"]
        assert not param.contains(form["high"] + 1)
        assert not param.contains("16")


def test_a_long_range_is_not_spelled_out():
    param = read_param({"low": 1, "high": 10**12})
    assert param.size == 10**12
    assert param.index(10**11) == 10**11 - 1
    assert param.index(1.5) is None


def _section(**settings):
    return SearchSection.model_validate({"params": {"max-num-seqs": [16, 32]}, **settings})


def test_the_section_reads_flags_with_dashes_or_underscores():
    section = _section(
        params={"max_num_seqs": [16, 32], "--block-size": [16]},
        baseline={"max_num_batched_tokens": 2048},
        enqueue=[{"performance_mode": "throughput"}],
        rules=["max_num_seqs >= 16"],
    )
    assert list(section.params) == ["max-num-seqs", "block-size"]
    assert section.baseline == {"max-num-batched-tokens": 2048}
    assert section.enqueue == ({"performance-mode": "throughput"},)
    assert section.objective.maximize == "output_tps"
    assert section.notes() == ["search.params.block-size has the one value 16, so nothing is searched"]


def test_a_pasted_command_line_stays_as_it_is():
    assert _section(baseline="vllm serve m --max-num-seqs 64").baseline == "vllm serve m --max-num-seqs 64"


@pytest.mark.parametrize(
    ("settings", "place", "message"),
    [
        ({"params": {}}, ("params",), "is empty"),
        ({"params": [1]}, ("params",), "not a mapping"),
        ({"params": {"max_num_seqs": [1], "max-num-seqs": [2]}}, ("params",), "max-num-seqs is given twice"),
        ({"params": {"max num seqs": [1]}}, ("params",), "not the name of a flag"),
        ({"params": {True: [1]}}, ("params",), "not the name of a flag"),
        ({"params": {"a": {"low": 2, "high": 1}}}, ("params", "a"), "low 2 is above high 1"),
        ({"rules": ["a >"]}, ("rules",), "cannot read the rule 'a >'"),
        ({"enqueue": [{"a": 1, "--a": 2}]}, ("enqueue", 0), "a is given twice"),
        ({"sampler": "bayes"}, ("sampler",), "'auto', 'tpe', 'gp' or 'random'"),
        ({"seed": -1}, ("seed",), "greater than or equal to 0"),
        ({"samplr": "tpe"}, ("samplr",), "Extra inputs"),
    ],
)
def test_the_section_places_its_errors(settings, place, message):
    with pytest.raises(ValidationError) as caught:
        _section(**settings)
    [error] = caught.value.errors()
    assert error["loc"] == place
    assert message in error["msg"]


def test_the_section_survives_json():
    section = _section(
        params={"a": {"low": 1, "high": 8, "step": "pow2"}, "b": [True, "x"]},
        objective={"maximize": "goodput_rps", "slo": {"ttft_p99": "1.5s", "tpot_p50": "20ms"}},
    )
    again = SearchSection.model_validate_json(section.model_dump_json())
    assert again == section
    assert again.objective.slo == {"ttft_p99": 1.5, "tpot_p50": 0.02}
    assert SearchSection.model_json_schema()["properties"]["params"]


def test_the_space_knows_its_points_and_rules():
    space = Space(
        {"a": read_param([1, 2, 4]), "b": read_param(["x", "y", "z"])},
        (Rule.parse("a <= c"), Rule.parse("a != 4 or b != 'z'")),
        fixed={"c": 3},
    )
    assert space.size == 9
    assert space.point({"b": "y", "a": 4}) == (2, 1)
    assert space.flags((2, 1)) == {"a": 4, "b": "y"}
    assert space.contains({"a": 4.0, "b": "y"})
    assert not space.contains({"a": 4})
    assert not space.contains({"a": 4, "b": "y", "c": 3})
    assert not space.contains({"a": 3, "b": "y"})
    assert space.violated({"a": 4, "b": "y"}) == "a <= c"
    assert space.violated({"a": 4, "b": "z", "c": 8}) == "a != 4 or b != 'z'"
    assert space.violated({"a": 1, "b": "y"}) is None
