import math
from itertools import combinations
from statistics import mean

import pytest
import torch

from titan_loom.training.diagnostics import StreamObserver, expert_statistics, stream_statistics


def test_statistics_of_the_stream_are_what_they_are_called():
    x = torch.randn(40, 8, generator=torch.Generator().manual_seed(0)) * torch.arange(1, 9)
    counted = torch.arange(40) % 4 != 3
    found = stream_statistics(x, counted)
    rows = x[counted].double()
    assert found["norm"].item() == pytest.approx(rows.norm(dim=1).mean().item())
    assert found["variance"].item() == pytest.approx(rows.var(0, correction=0).mean().item())
    pairs = [torch.cosine_similarity(a, b, dim=0).item() for a, b in combinations(rows, 2)]
    assert found["cosine"].item() == pytest.approx(mean(pairs), abs=1e-6)
    shares = torch.linalg.svdvals(rows)
    shares = (shares / shares.sum()).tolist()
    assert found["effective_rank"].item() == pytest.approx(math.exp(-sum(s * math.log(s) for s in shares)), rel=1e-4)


def test_a_stream_of_one_direction_has_rank_one():
    x = torch.arange(1.0, 11.0)[:, None] * torch.randn(64, generator=torch.Generator().manual_seed(1))
    found = stream_statistics(x, torch.ones(10, dtype=torch.bool))
    assert found["effective_rank"].item() == pytest.approx(1, abs=1e-3)
    assert found["cosine"].item() == pytest.approx(1)


def test_the_angle_is_between_a_loop_and_the_one_before():
    observer = StreamObserver(torch.tensor([[True, True, False]]))
    observer.after_loop(0, torch.tensor([[[1.0, 0.0], [1.0, 0.0], [1.0, 0.0]]]))
    observer.after_loop(1, torch.tensor([[[0.0, 2.0], [3.0, 3.0], [-1.0, 0.0]]]))
    assert {name: value.item() for name, value in observer.values.items()} == {"loop/2/angle": pytest.approx(67.5)}


def test_experts_are_counted_by_token_layer_and_loop():
    first, second = torch.tensor([[0, 1], [0, 1], [3, 2]]), torch.tensor([[0, 1], [2, 3], [3, 2]])
    found = expert_statistics({0: [first], 1: [second]}, torch.tensor([True, True, False]), 4)
    assert found["expert/loop/1/layer/0/load"].tolist() == [0.5, 0.5, 0, 0]
    assert found["expert/loop/2/layer/0/load"].tolist() == [0.25] * 4
    assert found["expert/loop/1/entropy"].item() == pytest.approx(math.log(2))
    assert found["expert/loop/2/entropy"].item() == pytest.approx(math.log(4))
    assert found["expert/loop/2/overlap"].item() == 1  # both experts of one token, none of the other's
    assert found["expert/distinct"].item() == 3  # 2 and 4
