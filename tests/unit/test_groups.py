import pytest
import torch

from titan_loom.models import build_model
from titan_loom.models.nanocoder import FLAVORS
from titan_loom.optim.groups import assign_groups

WEIGHT, BIAS = torch.zeros(2, 3), torch.zeros(3)


def matrices(name, parameter):
    return parameter.ndim == 2


def vectors(name, parameter):
    return parameter.ndim == 1


def test_members_keep_their_order_and_groups_may_be_empty():
    groups = assign_groups(
        [("a", WEIGHT), ("b", BIAS), ("c", WEIGHT)],
        {"matrices": matrices, "vectors": vectors, "empty": lambda name, parameter: False},
    )
    assert {group: [name for name, _ in members] for group, members in groups.items()} == {
        "matrices": ["a", "c"],
        "vectors": ["b"],
        "empty": [],
    }


def test_a_parameter_in_no_group_is_named():
    with pytest.raises(ValueError, match=r"parameter b of shape \(3,\) is in 0 optimizer groups"):
        assign_groups([("a", WEIGHT), ("b", BIAS)], {"matrices": matrices})


def test_a_parameter_in_two_groups_is_named_with_both():
    with pytest.raises(ValueError, match=r"parameter a .* is in 2 optimizer groups \(matrices, everything\)"):
        assign_groups([("a", WEIGHT)], {"matrices": matrices, "everything": lambda name, parameter: True})


@pytest.mark.parametrize("flavor", FLAVORS)
def test_every_parameter_of_a_model_has_the_group_of_its_kind(flavor):
    with torch.device("meta"):
        model = build_model(FLAVORS[flavor])
    groups = assign_groups(model.named_parameters(), model.group_rules())
    names = {group: {name for name, _ in members} for group, members in groups.items()}
    assert names["embeddings"] == {"embedding.weight"}
    assert names["ngram"] == {
        f"ngram.{name}"
        for name in ("injection_scales", "bigram_table.weight", "fourgram_table.weight", "out_proj.weight")
    }
    assert all(parameter.ndim == 2 for _, parameter in groups["muon"])
    assert {name.rpartition(".")[2] for name in names["muon"]} <= {"weight", "kernel"}
    assert all(parameter.ndim == 1 for _, parameter in groups["controls"])
    assert {"blocks.0.alpha", "blocks.0.attention.query_norm.weight", "final_norm.weight"} <= names["controls"]
