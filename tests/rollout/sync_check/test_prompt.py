"""`qarl_trl.rollout.sync_check.prompt`: the tokens that engine and learner score."""

from qarl_trl.rollout.sync_check.prompt import LENGTH, sync_check_tokens


def test_the_prompt_is_fixed_and_ordinary(tiny_tokenizer):
    tokens = sync_check_tokens(tiny_tokenizer, vocab_size=64)

    assert tokens == sync_check_tokens(tiny_tokenizer, vocab_size=64)
    assert len(tokens) == LENGTH
    assert len(sync_check_tokens(tiny_tokenizer, 64, length=9)) == 9

    # 0 and 1 are `<pad>` and `<eos>`.
    assert 1 < min(tokens) <= max(tokens) < len(tiny_tokenizer)
    assert max(sync_check_tokens(tiny_tokenizer, vocab_size=8)) < 8
