"""What NanoCoder is in transformers: its configuration and the names and shapes of its tensors there.

The code that an export carries is in `hf/`.
"""

from torch import Tensor

from titan_loom.models.nanocoder.args import NanoCoderArgs

NAME = "NanoCoder"  # of the classes in hf/: <NAME>Config, <NAME>ForCausalLM

CONFIG_KEYS = {
    "dim": "hidden_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "ffn_dim": "intermediate_size",
    "max_seq_len": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "init_std": "initializer_range",
}
"""Arguments that have another name in transformers."""


def to_hf_tensor(name: str, tensor: Tensor) -> tuple[str, Tensor]:
    """Name in the export and a view of parameter `name`: `alpha`, one element, has no dimension there."""
    return f"model.{name}", tensor.reshape(()) if name.endswith(".alpha") else tensor


def describe(args: NanoCoderArgs) -> str:
    """The architecture in a few words, for the model card."""
    return (
        f"dense pre-norm transformer of width {args.dim}, {args.num_heads} query and {args.num_kv_heads} key-value "
        f"heads of {args.head_dim}, SwiGLU of {args.ffn_dim}, {args.refresh} refresh of the token embedding in every "
        f"visit, n-gram memory of 2 x {args.ngram_rows:,} x {args.ngram_dim}, tied head"
    )
