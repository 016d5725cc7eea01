"""Tokenizers trained on the README, for pipelines without a download."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import transformers as hf
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

README = Path(__file__).parents[2] / "README.md"


@cache
def wordpiece() -> hf.PreTrainedTokenizerFast:
    """Make what BERT reads."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.train_from_iterator(
        README.read_text(encoding="utf-8").splitlines(),
        trainers.WordPieceTrainer(vocab_size=400, special_tokens=special, show_progress=False),
    )
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=made, model_max_length=64, **dict(zip(names, special, strict=True))
    )


def _byte_pairs(special: list[str]) -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.train_from_iterator(
        README.read_text(encoding="utf-8").splitlines(),
        trainers.BpeTrainer(
            vocab_size=320,
            special_tokens=special,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return made


@cache
def byte_pairs() -> hf.PreTrainedTokenizerFast:
    """Make what RoBERTa reads."""
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    made = _byte_pairs(special)
    made.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    names = ("cls_token", "pad_token", "sep_token", "unk_token", "mask_token")
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=made,
        bos_token="<s>",
        eos_token="</s>",
        model_max_length=64,
        **dict(zip(names, special, strict=True)),
    )


WHISPER_SPECIAL = (
    "<|endoftext|>",
    "<|startoftranscript|>",
    "<|en|>",
    "<|transcribe|>",
    "<|translate|>",
    "<|startofprev|>",
    "<|nospeech|>",
    "<|notimestamps|>",
)


@cache
def whisper() -> hf.WhisperTokenizer:
    """Make what Whisper writes: byte pairs, then the special tokens, then times."""
    written = json.loads(_byte_pairs([]).to_str())["model"]
    vocab = {**written["vocab"], WHISPER_SPECIAL[0]: len(written["vocab"])}
    made = hf.WhisperTokenizer(vocab=vocab, merges=[tuple(m) for m in written["merges"]])
    made.add_tokens(list(WHISPER_SPECIAL[1:]), special_tokens=True)
    made.add_tokens([f"<|{step * 0.02:.2f}|>" for step in range(101)])
    return made
