from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("transformers")

from tests.exports import TINY_LOOM, make_checkpoint
from tests.unit.test_hf_models import build, ids, shared_cache_recurrence
from titan_loom import cli
from titan_loom.hub.evaluate_caches import compare_caches

BARBADOS = replace(TINY_LOOM, kv_gate=True)


@torch.no_grad()
def test_the_losses_are_those_of_one_pass_and_of_the_recurrence():
    model = build("barbados")
    first, second = (ids()[row] for row in (0, 1))
    parts = [(first[:-1], first[1:].clone()), (second[:-1], second[1:])]
    parts[0][1][3] = -100
    (per_loop, shared), count = compare_caches(model, parts, 20)
    assert count == 19  # all 13 of the first part but one, 7 of the second
    for result, forward in (
        (per_loop, lambda tokens: model(tokens[None], use_cache=False).logits[0]),
        (shared, lambda tokens: shared_cache_recurrence(model, tokens)),
    ):
        logits = torch.cat([forward(parts[0][0]), forward(parts[1][0][:7])])
        expected = F.cross_entropy(logits, torch.cat([parts[0][1], parts[1][1][:7]]))
        assert result.loss == pytest.approx(expected.item(), abs=1e-6)
    assert abs(per_loop.loss - shared.loss) > 1e-3
    assert model.config.kv_cache == "per_loop"


@torch.no_grad()
@pytest.mark.parametrize("num_loops", [None, 1, 4])
def test_bytes_are_what_a_cache_grows_by(num_loops):
    results, _ = compare_caches(build("barbados"), [(ids()[0, :-1], ids()[0, 1:])], 2, num_loops)
    for result in results:
        model = build(result.kv_cache.replace("per_loop", "barbados"))
        cache = model(ids(), num_loops=num_loops).cache
        kept = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers[:-1])
        assert result.bytes_per_token == kept / ids().numel()
    # 2 layers and loops of 2 heads of 8 numbers, for keys and for values, in fp64
    assert results[0].bytes_per_token == 2 * (num_loops or 3) * 2 * 8 * 2 * 8
    assert results[1].bytes_per_token == 2 * 2 * 8 * 2 * 8
    if num_loops == 1:
        assert results[0].loss == pytest.approx(results[1].loss, abs=1e-6)


def test_the_table_sets_both_caches_side_by_side(tmp_path, capsys):
    make_checkpoint(tmp_path / "checkpoint", BARBADOS)
    (tmp_path / "text.txt").write_text("for i in range(12):\n    print(i)\n" * 9)
    argv = ["eval", str(tmp_path / "checkpoint"), "--unverified", "--text", str(tmp_path / "text.txt")]
    assert cli.main([*argv, "--cache_tokens", "30"]) == 0
    printed = capsys.readouterr()
    rows = [[cell.strip() for cell in line[1:-1].split("│")] for line in printed.out.splitlines() if line[0] == "│"]
    assert [row[:3] for row in rows[1:]] == [["as trained", "per_loop", "768"], ["as trained", "shared", "256"]]
    losses = [float(row[3]) for row in rows[1:]]
    assert [float(row[4]) for row in rows[1:]] == pytest.approx([0, losses[1] - losses[0]], abs=2e-4)
    assert "bytes per token (float32)" in printed.out and "on the first 30 tokens" in printed.err
    assert cli.main([*argv, "--cache_tokens", "0"]) == 0
    assert "per_loop" not in capsys.readouterr().out
    assert cli.main([*argv, "--cache_tokens", "-1"]) == 2
    assert capsys.readouterr().err == "error: cache_tokens is -1; it must be 0 or more\n"
