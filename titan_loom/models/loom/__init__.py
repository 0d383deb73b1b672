"""LOOM and Barbados: looped mixtures of experts (arXiv 2610.01153).

`FLAVORS` are the published sizes and a tiny one for trying things out. Barbados adds a gate to the keys and values, so
that decoding can keep one cache for all loops; `barbados-base` is the same size without.
"""

from dataclasses import replace

from titan_loom.models.loom.args import LoomArgs

_LOOM_329M = LoomArgs(
    dim=512,
    num_layers=10,
    num_heads=8,
    num_kv_heads=4,
    head_dim=64,
    num_experts=30,
    num_shared_experts=2,
    top_k=6,
    expert_dim=512,
    num_loops=9,
)

_BARBADOS_BASE = LoomArgs(
    dim=384,
    num_layers=6,
    num_heads=6,
    num_kv_heads=3,
    head_dim=64,
    num_experts=24,
    num_shared_experts=2,
    top_k=4,
    expert_dim=384,
    num_loops=3,
)

_DEBUG = LoomArgs(
    vocab_size=8192,
    dim=64,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=32,
    num_experts=6,
    num_shared_experts=1,
    top_k=2,
    expert_dim=64,
    num_loops=3,
    max_seq_len=255,
)

FLAVORS = {
    "loom_329m": _LOOM_329M,
    "loom_1p7b": replace(_LOOM_329M, dim=1280, num_layers=15, num_heads=20, num_kv_heads=10, expert_dim=768),
    "barbados": replace(_BARBADOS_BASE, kv_gate=True, kv_cache="shared"),
    "barbados-base": _BARBADOS_BASE,
    "debug": _DEBUG,
}
