"""Train a byte-level tokenizer, for tests that cannot download one."""

from collections.abc import Iterable

END = "<|endoftext|>"
"""Token of the end of a text."""


def train_byte_level(texts: Iterable[str], vocabulary: int) -> str:
    """Train a byte-level BPE on texts, and return its ``tokenizer.json``.

    Args:
        texts: Training texts.
        vocabulary: Largest number of tokens, including the 256 bytes and `END`.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer.to_str()
