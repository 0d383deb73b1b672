"""Configuration of NanoCoder, a looped transformer with an n-gram memory, as trained by titan_loom.

A *layer* is physical, a *loop* is a pass over the looped stack, a *visit* is one execution of a layer.
"""

from transformers import PreTrainedConfig


class NanoCoderConfig(PreTrainedConfig):
    """Sizes and schedule of a NanoCoder.

    Args:
        prelude, loop, coda, num_loops: layers before, in and after the looped stack, and how often that runs.
        schedule: layers (from 0) in the order in which they run; replaces the four above.
        ngram_visits: with `schedule`, the positions in it before which the n-gram memory is added.
        refresh: "scalar" or "gated", how a layer takes in the token embedding again.
        ngram_rows, ngram_dim: shape of each of the two n-gram tables.
        rope_interleaved: RoPE turns the pairs (2i, 2i + 1) of a head, else (i, i + head_dim / 2).

    Attributes:
        num_layers: physical layers.
        num_hidden_layers: visits as trained; each has an entry in the cache.
    """

    model_type = "nanocoder"
    keys_to_ignore_at_inference = ("cache", "past_key_values")

    vocab_size: int = 8192
    hidden_size: int = 256
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    head_dim: int = 32
    intermediate_size: int = 700
    prelude: int = 2
    loop: int = 3
    coda: int = 3
    num_loops: int = 2
    schedule: list[int] | None = None
    ngram_visits: list[int] | None = None
    refresh: str = "scalar"
    ngram_rows: int = 29744
    ngram_dim: int = 32
    max_position_embeddings: int = 4096
    rope_theta: float = 100000.0
    rope_interleaved: bool = True
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    use_cache: bool = True
    pad_token_id: int | None = 0
    bos_token_id: int | None = 1
    eos_token_id: int | None = 2
    tie_word_embeddings: bool = True

    def __post_init__(self, **kwargs):
        for derived in ("num_layers", "num_hidden_layers"):
            kwargs.pop(derived, None)
        self.num_layers = len(set(self.visits()))
        self.num_hidden_layers = len(self.visits())
        super().__post_init__(**kwargs)

    def visits(self, num_loops=None):
        """Layers in the order in which they run. `num_loops`: passes over the looped stack; default: as trained."""
        num_loops = self._num_loops(num_loops)
        if self.schedule is not None:
            return list(self.schedule)
        first, last = self.prelude, self.prelude + self.loop
        return [*range(first), *list(range(first, last)) * num_loops, *range(last, last + self.coda)]

    def injections(self, num_loops=None):
        """Visits before which the n-gram memory is added, each with the index of its scale.

        Loops beyond the trained ones use the last scale.
        """
        num_loops = self._num_loops(num_loops)
        if self.schedule is not None:
            return {visit: scale for scale, visit in enumerate(self.ngram_visits)}
        return {self.prelude + t * self.loop: min(t, self.num_loops - 1) for t in range(num_loops)}

    def _num_loops(self, num_loops):
        if num_loops is None:
            return self.num_loops
        if num_loops < 1:
            raise ValueError(f"num_loops is {num_loops}; it must be 1 or more")
        if self.schedule is not None:
            raise ValueError(f"num_loops is {num_loops}; with a schedule the order is fixed")
        return num_loops
