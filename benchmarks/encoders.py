"""Text encoders of the published sizes with random weights, and tokenizers that know the words of one prompt.

Configs: google/t5-v1_1-xxl (its encoder, 4.8 B), openai/clip-vit-large-patch14 (text),
Qwen/Qwen3-4B (without its head).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3Model,
    T5Config,
    T5EncoderModel,
)

from benchmarks.workloads import Workload, on_gpu

T5_XXL: Final[dict[str, Any]] = {
    "vocab_size": 32128,
    "d_model": 4096,
    "d_kv": 64,
    "d_ff": 10240,
    "num_layers": 24,
    "num_heads": 64,
    "relative_attention_num_buckets": 32,
    "relative_attention_max_distance": 128,
    "layer_norm_epsilon": 1e-6,
    "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False,
}
CLIP_L: Final[dict[str, Any]] = {
    "vocab_size": 49408,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "projection_dim": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 77,
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
QWEN3_4B: Final[dict[str, Any]] = {
    "vocab_size": 151936,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
    "attention_bias": False,
    "tie_word_embeddings": True,
}
_SPECIAL: Final = ("<pad>", "<bos>", "<eos>", "<unk>")
_WORDS: Final = (
    "a",
    "red",
    "fox",
    "in",
    "deep",
    "snow",
    "under",
    "old",
    "trees",
    "at",
    "dawn",
    "with",
    "long",
    "light",
)
_CHAT: Final = "{% for m in messages %}user {{ m['content'] }} {% endfor %}assistant"


def prompt(words: int, number: int) -> str:
    """So many words, others in front for another number: a prompt that was encoded before may be kept."""
    return " ".join(_WORDS[(number + i) % len(_WORDS)] for i in range(words))


def tokenizer(length: int) -> Any:
    """One token a word."""
    vocabulary = {word: place for place, word in enumerate((*_SPECIAL, "user", "assistant", *_WORDS))}
    tokens = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokens.pre_tokenizer = WhitespaceSplit()
    named = {f"{name}_token": f"<{name}>" for name in ("pad", "bos", "eos", "unk")}
    kind: Any = PreTrainedTokenizerFast
    return kind(tokenizer_object=tokens, model_max_length=length, chat_template=_CHAT, **named)


def with_text(workload: Workload) -> tuple[Workload, Callable[[int], str]]:
    """The workload with its text encoders, and number -> a prompt of usual length."""
    if workload.name == "flux.1-dev":
        components = {
            "text_encoder": on_gpu(lambda: CLIPTextModel(CLIPTextConfig(**CLIP_L))),
            "tokenizer": tokenizer(77),
            "text_encoder_2": on_gpu(lambda: T5EncoderModel(T5Config(**T5_XXL))),
            "tokenizer_2": tokenizer(512),
        }
        return workload.with_components(**components), partial(prompt, 60)  # CLIP takes 77, T5 is filled up to 512
    components = {"text_encoder": on_gpu(lambda: Qwen3Model(Qwen3Config(**QWEN3_4B))), "tokenizer": tokenizer(512)}
    return workload.with_components(**components), partial(prompt, 198)
