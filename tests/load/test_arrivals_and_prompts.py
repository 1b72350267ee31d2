from itertools import islice

import numpy as np
import pytest
from hypothesis import given, strategies as st

from sweep.load.arrivals import poisson_offsets_s
from sweep.load.prompts import PromptSource, id_range
from sweep.load.workload import PromptShape


def test_arrivals_are_a_poisson_process() -> None:
    times = np.array(list(islice(poisson_offsets_s(20, seed=4), 20_000)))
    gaps = np.diff(times)
    assert gaps.min() >= 0
    assert gaps.mean() == pytest.approx(1 / 20, rel=0.03)
    assert gaps.std() / gaps.mean() == pytest.approx(1, rel=0.05)
    counts = np.bincount(times.astype(int))[:-1]
    assert counts.var() / counts.mean() == pytest.approx(1, abs=0.2)  # index of dispersion over a second


def test_arrivals_repeat_with_their_seed_only() -> None:
    first, again, other = (list(islice(poisson_offsets_s(5, seed), 2000)) for seed in (1, 1, 2))
    assert first == again != other


@given(
    tokens=st.integers(2, 300),
    data=st.data(),
    groups=st.integers(1, 4),
    vocab=st.one_of(st.none(), st.integers(8, 200_000)),
)
def test_prompts_have_their_exact_length_and_ordinary_ids(
    tokens: int, data: st.DataObject, groups: int, vocab: int | None
) -> None:
    prefix = data.draw(st.integers(0, tokens - 1))
    source = PromptSource(PromptShape(tokens=tokens, shared_prefix=prefix, groups=groups), 1, 2, vocab)
    low, high = id_range(vocab)
    assert 0 < low < high <= (vocab or 32_000)
    heads: dict[int | None, list[int]] = {}
    for n in range(6):
        prompt = source.make(n)
        assert len(prompt.content) == prompt.tokens == tokens
        assert all(low <= token < high for token in prompt.content)
        assert heads.setdefault(prompt.group, prompt.content[:prefix]) == prompt.content[:prefix]
        assert (prompt.group is None) == (prefix == 0)


def test_prompts_are_fresh_for_every_seed_and_the_same_for_the_same_seed() -> None:
    shape = PromptShape(tokens=40, shared_prefix=20)
    first, again, other = (PromptSource(shape, seed, 0).make(3).content for seed in (1, 1, 2))
    assert first == again
    assert first[:20] != other[:20]
    assert first[20:] != other[20:]
    assert PromptSource(shape, 1, 0).make(4).content[20:] != first[20:]


def test_all_groups_get_their_share() -> None:
    source = PromptSource(PromptShape(tokens=4, shared_prefix=2, groups=3), 1, 2)
    counts = np.bincount([source.make(n).group for n in range(300)])
    assert counts.min() > 60


def test_text_prompts_have_one_word_for_each_token() -> None:
    prompt = PromptSource(PromptShape(tokens=12, shared_prefix=4), 1, 2, text=True).make(0)
    assert isinstance(prompt.content, str)
    assert len(prompt.content.split()) == prompt.tokens == 12
