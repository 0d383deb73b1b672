import subprocess
import sys
from dataclasses import replace

import pytest

from titan_loom.config import job_config
from titan_loom.errors import UserError
from titan_loom.models import model_args
from titan_loom.models.nanocoder import FLAVORS

NANOCODER, MINICODER, DEBUG = FLAVORS["nanocoder"], FLAVORS["minicoder"], FLAVORS["debug"]


def test_published_execution_orders():
    assert [layer + 1 for layer in NANOCODER.visits()] == [1, 2, 3, 4, 5, 3, 4, 5, 6, 7, 8]
    assert [layer + 1 for layer in MINICODER.visits()] == [*range(1, 10), *range(5, 10), *range(10, 14)]
    assert (NANOCODER.num_layers, NANOCODER.num_visits, NANOCODER.looped_layers) == (8, 11, (2, 3, 4))
    assert (MINICODER.num_layers, MINICODER.num_visits, MINICODER.looped_layers) == (13, 18, (4, 5, 6, 7, 8))


def test_the_memory_is_added_at_the_start_of_every_loop_and_later_loops_use_the_last_scale():
    assert NANOCODER.injections() == {2: 0, 5: 1}
    assert NANOCODER.injections(num_loops=1) == {2: 0}
    assert NANOCODER.injections(num_loops=4) == {2: 0, 5: 1, 8: 1, 11: 1}
    assert NANOCODER.num_injections == 2


def test_another_number_of_loops_repeats_only_the_looped_stack():
    assert NANOCODER.visits(num_loops=1) == tuple(range(8))
    assert NANOCODER.visits(num_loops=3) == (0, 1, 2, 3, 4, 2, 3, 4, 2, 3, 4, 5, 6, 7)
    assert NANOCODER.looped_layers == (2, 3, 4)


def test_a_loop_may_be_the_whole_model_and_a_plain_model_has_one_loop():
    whole = replace(DEBUG, prelude=0, loop=4, coda=0, num_loops=3)
    assert whole.visits() == (0, 1, 2, 3) * 3
    assert whole.injections() == {0: 0, 4: 1, 8: 2}
    plain = replace(DEBUG, prelude=0, loop=4, coda=0, num_loops=1)
    assert plain.visits() == (0, 1, 2, 3)
    assert plain.looped_layers == ()


def test_a_list_replaces_the_four_counts():
    args = replace(DEBUG, schedule=(0, 1, 1, 2, 0), ngram_visits=(0, 3))
    assert args.visits() == (0, 1, 1, 2, 0)
    assert args.injections() == {0: 0, 3: 1}
    assert (args.num_layers, args.num_visits, args.num_injections, args.looped_layers) == (3, 5, 2, (0, 1))


def test_a_list_has_no_loops_to_count():
    args = replace(DEBUG, schedule=(0, 1, 1), ngram_visits=(1,))
    with pytest.raises(UserError, match="num_loops is 3"):
        args.visits(num_loops=3)
    with pytest.raises(UserError, match=r"num_loops is 0; it must be 1 or more"):
        DEBUG.visits(num_loops=0)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"num_loops": 0}, r"model\.args\.num_loops is 0; it must be greater than 0"),
        ({"prelude": -1}, r"model\.args\.prelude is -1; it must be 0 or greater"),
        ({"dim": -256}, r"model\.args\.dim is -256; it must be greater than 0"),
        ({"loop": 0}, r"model\.args\.loop is 0"),
        ({"rope_theta": 0.0}, r"model\.args\.rope_theta is 0\.0"),
        ({"head_dim": 31}, r"model\.args\.head_dim is 31; it must be even"),
        ({"num_kv_heads": 3}, r"model\.args\.num_kv_heads is 3; it must be a divisor of num_heads = 4"),
        ({"schedule": [0, 2], "ngram_visits": [0]}, r"model\.args\.schedule is \(0, 2\)"),
        ({"schedule": [0, -1], "ngram_visits": [0]}, r"model\.args\.schedule is \(0, -1\)"),
        ({"schedule": [], "ngram_visits": [0]}, r"model\.args\.schedule is \(\)"),
        ({"schedule": [0, 1]}, r"model\.args\.ngram_visits is None; it must be rising positions .* from 0 to 1"),
        ({"schedule": [0, 1], "ngram_visits": [2]}, r"model\.args\.ngram_visits is \(2,\)"),
        ({"schedule": [0, 1], "ngram_visits": [1, 0]}, r"model\.args\.ngram_visits is \(1, 0\)"),
        ({"ngram_visits": [1]}, r"model\.args\.ngram_visits is \(1,\); it must be unset without model\.args\.schedule"),
        ({"num_loop": 2}, r"model\.args\.num_loop is not a key; the nearest one is model\.args\.num_loops"),
        ({"refresh": "none"}, r"model\.args\.refresh is .*scalar.*gated"),
    ],
)
def test_impossible_arguments_are_named_with_their_value_and_what_is_allowed(change, sentence):
    with pytest.raises(UserError, match=sentence):
        model_args(job_config.Model(args=change))


def test_unknown_families_and_flavors_name_the_choices():
    with pytest.raises(UserError, match=r"model\.name is 'nanocode'; it must be one of nanocoder"):
        model_args(job_config.Model(name="nanocode"))
    with pytest.raises(
        UserError, match=r"model\.flavor is 'large'; it must be one of nanocoder, .*minicoder-gated, debug"
    ):
        model_args(job_config.Model(flavor="large"))


def test_arguments_override_the_flavor():
    args = model_args(job_config.Model(flavor="minicoder", args={"num_loops": 3}))
    assert args == replace(MINICODER, num_loops=3)


def test_arguments_are_read_without_torch():
    """A mistyped key must be reported at once, not after seconds of importing."""
    code = (
        "import sys; from titan_loom.config.job_config import Model; from titan_loom.models import model_args;"
        "model_args(Model()); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
