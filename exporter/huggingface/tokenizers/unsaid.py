"""The special tokens of a class of tokenizers, where an original does not name them."""

from __future__ import annotations

from collections.abc import Mapping

_END = "<|endoftext|>"
_BERT = {
    "unk_token": "[UNK]",
    "sep_token": "[SEP]",
    "pad_token": "[PAD]",
    "cls_token": "[CLS]",
    "mask_token": "[MASK]",
}
_GPT2 = {"bos_token": _END, "eos_token": _END, "unk_token": _END}
_LLAMA = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
_ROBERTA = {**_LLAMA, "sep_token": "</s>", "pad_token": "<pad>", "cls_token": "<s>"}
_T5 = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}

UNSAID: Mapping[str, Mapping[str, str]] = {
    "BartTokenizer": _ROBERTA,
    "BertTokenizer": _BERT,
    "CamembertTokenizer": _ROBERTA,
    "CodeGenTokenizer": _GPT2,
    "CodeLlamaTokenizer": _LLAMA,
    "DistilBertTokenizer": _BERT,
    "GPT2Tokenizer": _GPT2,
    "GPTNeoXTokenizer": {**_GPT2, "pad_token": "<|padding|>"},
    "GemmaTokenizer": {
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "unk_token": "<unk>",
        "pad_token": "<pad>",
        "mask_token": "<mask>",
    },
    "LlamaTokenizer": _LLAMA,
    "PegasusTokenizer": _T5,
    "Qwen2Tokenizer": {"eos_token": _END, "unk_token": _END, "pad_token": _END},
    "RobertaTokenizer": _ROBERTA,
    "T5Tokenizer": _T5,
    "XLMRobertaTokenizer": _ROBERTA,
}
