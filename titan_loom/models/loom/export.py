"""What LOOM is in transformers: its configuration and the names and shapes of its tensors there.

The code that an export carries is in `hf/`.
"""

from torch import Tensor

from titan_loom.models.loom.args import LoomArgs

NAME = "Loom"  # of the classes in hf/: <NAME>Config, <NAME>ForCausalLM

CONFIG_KEYS = {
    "dim": "hidden_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "top_k": "num_experts_per_tok",
    "expert_dim": "moe_intermediate_size",
    "max_seq_len": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
}
"""Arguments that have another name in transformers."""


def to_hf_tensor(name: str, tensor: Tensor) -> tuple[str, Tensor]:
    """Name in the export and a view of parameter or buffer `name`."""
    return "lm_head.weight" if name == "head.weight" else f"model.{name}", tensor


def describe(args: LoomArgs) -> str:
    """The architecture in a few words, for the model card."""
    gate = f", gated key-value state with the {args.kv_cache} cache" if args.kv_gate else ""
    return (
        f"mixture of experts of width {args.dim}, {args.num_heads} query and {args.num_kv_heads} key-value heads of "
        f"{args.head_dim}, {args.num_experts} experts of {args.expert_dim}, of which a token visits {args.top_k}, and "
        f"{args.num_shared_experts} shared ones, {args.num_routers} routers a layer{gate}"
    )
