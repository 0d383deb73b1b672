import pytest

from titan_loom.config import Hub, Training
from titan_loom.config.milestones import milestone_tags
from titan_loom.errors import UserError

TRAINING = Training(steps=30, global_batch_size=4, seq_len=25)


def test_by_default_every_twentieth_is_a_milestone():
    tags = milestone_tags(Hub().milestones, TRAINING)
    assert list(tags)[:4] == [2, 3, 5, 6] and tags[2] == ["checkpoint-005pct"]
    assert len(tags) == 20 and tags[30] == ["checkpoint-100pct"]
    assert milestone_tags(Hub().milestones, Training(steps=1))[1][::19] == ["checkpoint-005pct", "checkpoint-100pct"]


def test_percents_steps_and_tokens_are_rounded_up_to_steps():
    tags = milestone_tags(["25%", "8 steps", "1_001 tokens"], TRAINING)
    assert tags == {8: ["checkpoint-025pct", "checkpoint-8steps"], 11: ["checkpoint-1001tokens"]}


@pytest.mark.parametrize(
    ("milestone", "part"),
    [
        ("25", 'as in "25%"'),
        ("0%", 'as in "25%"'),
        ("2.5%", 'as in "25%"'),
        ("101%", "is step 31; the run has 30 steps"),
        ("31 steps", "is step 31; the run has 30 steps"),
    ],
)
def test_what_is_no_milestone_is_one_sentence(milestone, part):
    with pytest.raises(UserError) as error:
        milestone_tags([milestone], TRAINING)
    assert repr(milestone) in str(error.value) and part in str(error.value)
