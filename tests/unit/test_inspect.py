import json
from dataclasses import replace

import pytest
import torch

from titan_loom.config.job_config import JobConfig, Model, Optimizer, Training
from titan_loom.errors import UserError
from titan_loom.models import build_model
from titan_loom.models.nanocoder import FLAVORS
from titan_loom.tools.inspect import check_expected_parameters, check_fits, inspect, main


def job(flavor: str, **model) -> JobConfig:
    return JobConfig(model=Model(flavor=flavor, **model), training=Training(seq_len=4096))


def test_facts_of_the_published_model():
    facts = inspect(job("nanocoder"))
    assert facts["parameters"] == {
        "total": 9_895_690,
        "transformer": 7_975_688,
        "ngram": 1_920_002,
        "embedding": 2_097_152,
        "blocks": 5_878_280,
        "final_norm": 256,
    }
    assert (facts["num_layers"], facts["num_visits"]) == (8, 11)
    # 11 visits of 734,208 weights and 8 x 32 x 4,096 x 2 of attention, the head, the memory's projection; 6 each.
    assert facts["flops_per_token"] == 6 * (11 * (734_208 + 2 * 8 * 32 * 4096) + 8192 * 256 + 64 * 256)
    assert facts["groups"]["muon"] == {
        "tensors": 56,
        "parameters": 5_873_664,
        "optimizer": "Muon",
        "lr": 0.02,
        "weight_decay": 0.1,
    }
    assert facts["groups"]["controls"]["weight_decay"] == 0.0
    assert list(facts["groups"]) == ["muon", "embeddings", "ngram", "controls"]
    assert sum(group["parameters"] for group in facts["groups"].values()) == 9_895_690


def test_adamw_for_every_group_is_reported_as_such():
    facts = inspect(JobConfig(optimizer=Optimizer(name="AdamW", lr=3e-4)))
    assert list(facts["groups"]) == ["matrices", "embeddings", "ngram", "controls"]
    assert facts["groups"]["matrices"]["lr"] == 3e-4
    assert {group["optimizer"] for group in facts["groups"].values()} == {"AdamW"}


def test_json_is_one_object_with_the_same_facts(capsys):
    main(job("nanocoder"), as_json=True)
    assert json.loads(capsys.readouterr().out) == inspect(job("nanocoder"))


def test_tables_show_counts_stages_and_groups(capsys):
    main(job("nanocoder"), as_json=False)
    printed = capsys.readouterr().out
    for text in ("9,895,690", "1,920,002", "loop 2", "2 3 4", "scale 1 at visit 5", "11 visits", "controls", "Muon"):
        assert text in printed


def test_the_other_family_is_described_alike(capsys):
    config = JobConfig(model=Model(name="loom", flavor="loom_1p7b"), training=Training(seq_len=1023))
    facts = inspect(config)
    assert (facts["num_layers"], facts["num_visits"]) == (15, 135)
    assert facts["parameters"]["active"] == 452_793_600
    # Nine times the active matrices and 20 x 64 x 1,023 x 2 of attention a layer, and the head; 6 each.
    matrices = 452_793_600 - 15 * 1280
    assert facts["flops_per_token"] == 6 * (9 * (matrices + 15 * 2 * 20 * 64 * 1023) + 49_152 * 1280)
    assert sum(group["parameters"] for group in facts["groups"].values()) == 1_644_913_920
    main(config, as_json=False)
    assert "g = 0.0645" in capsys.readouterr().out


def test_expected_parameters_must_be_met_exactly():
    assert inspect(job("nanocoder", expected_parameters=9_895_690))
    with pytest.raises(UserError, match=r"model\.expected_parameters is 9,895,691 .* 9,895,690 parameters"):
        inspect(job("nanocoder", expected_parameters=9_895_691))
    with torch.device("meta"):
        model = build_model(FLAVORS["minicoder"])
    check_expected_parameters(model, None)
    check_expected_parameters(model, 24_949_999)


def test_a_model_that_no_memory_holds_is_one_sentence():
    """It once ended in the allocator's traceback."""
    with torch.device("meta"):
        fits, huge = build_model(FLAVORS["minicoder"]), build_model(replace(FLAVORS["debug"], ngram_rows=10**12))
    check_fits(fits, torch.device("cpu"))
    with pytest.raises(UserError, match=r"parameters, [\d,.]+ GiB in each process; this device has [\d.]+ GiB"):
        check_fits(huge, torch.device("cpu"))
