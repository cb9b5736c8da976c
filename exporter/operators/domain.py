"""The operator domain `tokenweir`, and the parts of the functions that compute its operators.

| operator              | inputs                                                                 |
|-----------------------|------------------------------------------------------------------------|
| CachedAttention       | packed_qkv, past_key, past_value, seqlens_k, total_seq, position_ids   |
| RotaryCachedAttention | the same, cos_cache, sin_cache                                         |
| BiasedCachedAttention | the same as CachedAttention, distance_bias                             |
| Windowed...           | those of the first two                                                 |
| Int8...               | those above, with an int8 cache: the same, key_scale, value_scale      |
| CrossAttention        | query, cross_key, cross_value, source_lengths, beam_rows, row_queries  |
| CrossAlignment        | query, cross_key, source_lengths, alignment_idx, alignment_sources     |

Operations for which the standard has an operator are emitted as that operator.
"""

from __future__ import annotations

from collections.abc import Mapping

DOMAIN = "tokenweir"
VERSION = 1
OPSET = 24

Functions = Mapping[str, str]  # bodies of operators, by their types, in ONNX's text form
