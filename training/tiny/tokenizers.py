"""The three small tokenizers, trained on the captions, in the layout that the stock tokenizer classes build."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CLIP_VOCAB, T5_VOCAB, QWEN_VOCAB = 1536, 2048, 2048
CLIP_SPLIT = r"""<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"""
QWEN_SPLIT = (  # as in Qwen2Tokenizer
    r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"""
    r"""|\s*[\r\n]+|\s+(?!\S)|\s+"""
)
CLIP_SPECIAL = ("<|startoftext|>", "<|endoftext|>")
QWEN_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
CHAT_PREFIX, CHAT_SUFFIX = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
    "{%- endif %}"
)


def _clip(texts: Sequence[str]) -> Tokenizer:
    tok = Tokenizer(models.BPE(continuing_subword_prefix="", end_of_word_suffix="</w>"))
    tok.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()]
    )
    split = pre_tokenizers.Split(Regex(CLIP_SPLIT), behavior="removed", invert=True)
    tok.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tok.decoder = decoders.ByteLevel()
    endings = [f"{letter}</w>" for letter in sorted(pre_tokenizers.ByteLevel.alphabet())]
    missing = endings
    for _ in range(2):  # the first round tells how many endings the captions do not have: those come on top, as in CLIP
        trainer = trainers.BpeTrainer(
            vocab_size=CLIP_VOCAB - len(CLIP_SPECIAL) - len(missing),
            end_of_word_suffix="</w>",
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tok.train_from_iterator(texts, trainer)
        missing = [ending for ending in endings if tok.token_to_id(ending) is None]
    trained = json.loads(tok.to_str())  # the special tokens belong in the BPE's own vocabulary, the end token last
    vocab = trained["model"]["vocab"]
    for token in (*missing, *CLIP_SPECIAL):
        vocab[token] = len(vocab)
    tok = Tokenizer.from_str(json.dumps(trained))
    tok.add_special_tokens(list(CLIP_SPECIAL))
    if tok.get_vocab_size() != CLIP_VOCAB:
        raise RuntimeError(f"the CLIP vocabulary has {tok.get_vocab_size()} tokens instead of {CLIP_VOCAB}")
    begin, end = (tok.token_to_id(t) for t in ("<|startoftext|>", "<|endoftext|>"))
    tok.post_processor = processors.RobertaProcessing(
        ("<|endoftext|>", end), ("<|startoftext|>", begin), trim_offsets=False, add_prefix_space=False
    )
    return tok


def _t5(texts: Sequence[str]) -> Tokenizer:
    tok = Tokenizer(models.Unigram())
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.WhitespaceSplit(),
            pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always", split=True),
        ]
    )
    tok.decoder = decoders.Metaspace(replacement="▁", prepend_scheme="always", split=True)
    trainer = trainers.UnigramTrainer(
        vocab_size=T5_VOCAB,
        special_tokens=["<pad>", "</s>", "<unk>"],
        unk_token="<unk>",
        initial_alphabet=list("abcdefghijklmnopqrstuvwxyz0123456789,.-'!?&"),
        show_progress=False,
    )
    tok.train_from_iterator(texts, trainer)
    tok.post_processor = processors.TemplateProcessing(
        single=["$A", "</s>"], pair=["$A", "</s>", "$B", "</s>"], special_tokens=[("</s>", tok.token_to_id("</s>"))]
    )
    return tok


def _qwen(texts: Sequence[str]) -> Tokenizer:
    tok = Tokenizer(models.BPE(continuing_subword_prefix="", end_of_word_suffix=""))
    tok.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(QWEN_SPLIT), behavior="isolated", invert=False)
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=QWEN_VOCAB - len(QWEN_SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tok.train_from_iterator([f"user\n{text}\nassistant\n" for text in texts], trainer)
    tok.add_special_tokens(list(QWEN_SPECIAL))
    return tok


def train(texts: Sequence[str], out: Path) -> None:
    """Train the three tokenizers and write OUT/{clip,t5,qwen}/tokenizer.json."""
    for name, make in (("clip", _clip), ("t5", _t5), ("qwen", _qwen)):
        (out / name).mkdir(parents=True, exist_ok=True)
        make(texts).save(str(out / name / "tokenizer.json"))


def encode(tok: Tokenizer, texts: Sequence[str], length: int, pad: str, *, chat: bool = False) -> list[list[int]]:
    """Tokenise to exactly LENGTH ids: cut (keeping what the post-processor adds at the end) and padded on the right."""
    pad_id = tok.token_to_id(pad)
    if chat:
        tail = tok.encode(CHAT_SUFFIX).ids
        rows = [e.ids for e in tok.encode_batch([CHAT_PREFIX + text for text in texts])]
        rows = [ids[: length - len(tail)] + tail for ids in rows]
    else:
        tok.enable_truncation(length)
        rows = [e.ids for e in tok.encode_batch(list(texts))]
        tok.no_truncation()
    return [ids + [pad_id] * (length - len(ids)) for ids in rows]
