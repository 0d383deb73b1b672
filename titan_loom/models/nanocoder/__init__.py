"""NanoCoder and MiniCoder: small dense models, partially looped, with an n-gram memory.

`FLAVORS` are the published sizes, in both variants of the refresh with the same totals to the unit, and a tiny one for
trying things out.
"""

from dataclasses import replace

from titan_loom.models.nanocoder.args import NanoCoderArgs

_NANOCODER = NanoCoderArgs(
    dim=256,
    num_heads=8,
    num_kv_heads=4,
    head_dim=32,
    ffn_dim=700,
    prelude=2,
    loop=3,
    coda=3,
    num_loops=2,
    ngram_rows=29_744,
    ngram_dim=32,
)

_MINICODER = NanoCoderArgs(
    dim=384,
    num_heads=12,
    num_kv_heads=4,
    head_dim=32,
    ffn_dim=780,
    prelude=4,
    loop=5,
    coda=4,
    num_loops=2,
    ngram_rows=51_699,
    ngram_dim=48,
)

_DEBUG = NanoCoderArgs(
    dim=128,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    ffn_dim=352,
    prelude=1,
    loop=2,
    coda=1,
    num_loops=2,
    ngram_rows=8_191,
    ngram_dim=16,
)

FLAVORS = {
    "nanocoder": _NANOCODER,
    "nanocoder-gated": replace(_NANOCODER, refresh="gated", ffn_dim=440),
    "minicoder": _MINICODER,
    "minicoder-gated": replace(_MINICODER, refresh="gated", ffn_dim=392),
    "debug": _DEBUG,
}
