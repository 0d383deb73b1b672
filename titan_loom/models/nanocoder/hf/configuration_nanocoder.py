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

    def __init__(
        self,
        vocab_size=8192,
        hidden_size=256,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        intermediate_size=700,
        prelude=2,
        loop=3,
        coda=3,
        num_loops=2,
        schedule=None,
        ngram_visits=None,
        refresh="scalar",
        ngram_rows=29744,
        ngram_dim=32,
        max_position_embeddings=4096,
        rope_theta=100000.0,
        rope_interleaved=True,
        rms_norm_eps=1e-6,
        initializer_range=0.02,
        use_cache=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=True,
        **kwargs,
    ):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.head_dim = head_dim
        self.intermediate_size = intermediate_size
        self.prelude = prelude
        self.loop = loop
        self.coda = coda
        self.num_loops = num_loops
        self.schedule = schedule
        self.ngram_visits = ngram_visits
        self.refresh = refresh
        self.ngram_rows = ngram_rows
        self.ngram_dim = ngram_dim
        self.max_position_embeddings = max_position_embeddings
        self.rope_theta = rope_theta
        self.rope_interleaved = rope_interleaved
        self.rms_norm_eps = rms_norm_eps
        self.initializer_range = initializer_range
        self.use_cache = use_cache
        for derived in ("num_layers", "num_hidden_layers"):
            kwargs.pop(derived, None)
        self.num_layers = len(set(self.visits()))
        self.num_hidden_layers = len(self.visits())
        super().__init__(
            pad_token_id=pad_token_id,
            bos_token_id=bos_token_id,
            eos_token_id=eos_token_id,
            tie_word_embeddings=tie_word_embeddings,
            **kwargs,
        )

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
