"""Prompts are text for a model with a tokenizer, and a tokenizer of another model is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from ds_finepage.compare.checkpoint import make_tokenizer
from ds_finepage.compare.prompts import make_prompts
from ds_finepage.errors import ConfigError


@pytest.fixture(scope="module")
def tokenized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_tokenizer(folder, 300)
    return folder


def test_text_is_cut_into_rows_that_follow_each_other(tokenized: Path) -> None:
    one = make_prompts(tokenized, vocab_size=300, batch=1, prompt_tokens=12)
    rows = make_prompts(tokenized, vocab_size=300, batch=3, prompt_tokens=4)
    assert one == ((*rows[0], *rows[1], *rows[2]),)
    assert len(set(one[0])) > 4


def test_a_tokenizer_with_more_tokens_than_the_embedding_is_refused(tokenized: Path) -> None:
    with pytest.raises(ConfigError, match="has 300 tokens, and the model's embedding 299 rows"):
        make_prompts(tokenized, vocab_size=299, batch=1, prompt_tokens=4)


def test_a_tokenizer_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="the tokenizer in .* cannot be read"):
        make_prompts(tmp_path, vocab_size=299, batch=1, prompt_tokens=4)


def test_without_a_tokenizer_tokens_are_random_and_the_same_each_time(tmp_path: Path) -> None:
    first, second = (
        make_prompts(tmp_path, vocab_size=50, batch=2, prompt_tokens=30) for _ in range(2)
    )
    assert first == second and first[0] != first[1]
    assert {token < 50 for row in first for token in row} == {True}
