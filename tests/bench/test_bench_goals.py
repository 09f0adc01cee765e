"""Goals: what is compared with what, and when a bar is met."""

from __future__ import annotations

import pytest
from ops.bench import goals
from ops.bench.goals import GOALS, Bar, Goal, best_peer, ratio, verdict
from ops.bench.peers.engines import CONTENDERS


def test_a_ratio_is_the_median_of_rounds_in_which_both_count() -> None:
    rounds = {"jitney": [10.0, 30.0, None, 44.0], "vllm": [10.0, 10.0, 10.0, 11.0]}
    found = ratio(rounds, "jitney", "vllm")
    assert found is not None
    assert (found.median, found.least, found.most, found.num_rounds) == (3.0, 1.0, 4.0, 3)
    assert str(found) == "×3.00 (1.00–4.00)"


def test_there_is_no_ratio_where_no_round_counts_for_both() -> None:
    assert ratio({"jitney": [None, 1.0], "vllm": [1.0, None]}, "jitney", "vllm") is None
    assert ratio({"jitney": [1.0]}, "jitney", "vllm") is None


def test_the_best_peer_is_the_one_that_is_hardest_to_beat_and_never_one_of_ours() -> None:
    rounds = {"jitney": [100.0], "jitney-engine": [500.0], "naive": [400.0], "vllm": [60.0], "openvino": [80.0]}
    assert best_peer(rounds) == "openvino"
    assert best_peer({"jitney": [1.0], "naive": [2.0]}) is None


@pytest.mark.parametrize(("rate", "word"), [(114.0, "not met"), (115.0, "met"), (200.0, "met")])
def test_a_bar_is_met_from_its_factor_on(rate: float, word: str) -> None:
    reached, said = verdict(Bar(1.15), {"jitney": [rate], "openvino": [100.0], "vllm": [50.0]})
    assert said == word
    assert reached.endswith(" of openvino")


def test_a_bar_against_an_engine_that_was_not_measured_is_open() -> None:
    assert verdict(Bar(27, "naive"), {"jitney": [1.0]}) == ("–", "not measured")
    assert verdict(Bar(1.1), {"jitney": [1.0]}) == ("–", "not measured")


def test_every_bar_of_a_measured_workload_has_a_row() -> None:
    measured = {"W8": {"jitney": [4.0], "openvino": [1.0], "vllm": [4.0]}, "W6": {"jitney": [1.0]}}
    assert goals.rows(measured) == [
        ["W8", "must", "≥ 4 × openvino", "×4.00 (4.00–4.00)", "met"],
        ["W8", "must", "≥ 0.95 × vllm", "×1.00 (1.00–1.00)", "met"],
        ["W8", "aim", "≥ 1.2 × best peer", "×1.00 (1.00–1.00) of vllm", "not met"],
    ]


def test_int8_is_compared_with_our_own_bfloat16_and_with_the_best_peer_of_the_same_weights() -> None:
    measured = {
        "W2": {
            "jitney": [10.0],
            "jitney-int8": [14.0],
            "openvino": [40.0],
            "openvino-int8": [7.0],
            "llamacpp-int8": [5.0],
        }
    }
    assert goals.rows(measured, goals.GOALS_OF["jitney-int8"], "jitney-int8") == [
        ["W2", "aim", "≥ 1.3 × jitney", "×1.40 (1.40–1.40)", "met"],
        ["W2", "aim", "≥ 1 × best peer", "×2.00 (2.00–2.00) of openvino-int8", "met"],
    ]
    assert best_peer(measured["W2"]) == "openvino"


def test_the_tax_is_judged_against_the_engine_alone() -> None:
    measured = {"W2": {"jitney": [95.0], "jitney-engine": [100.0]}}
    rows = goals.rows(measured, {"W2": goals.TAX})
    assert [(row[2], row[4]) for row in rows] == [
        ("≥ 0.93 × jitney-engine", "met"),
        ("≥ 0.97 × jitney-engine", "not met"),
    ]


def test_bars_name_engines_that_take_part_in_their_workload() -> None:
    for name, goal in GOALS.items():
        for bar in (*goal.must, *goal.aim):
            assert bar.against == goals.BEST or CONTENDERS[bar.against].runs(name), (name, bar)


def test_an_aim_is_never_below_what_must_be() -> None:
    def factors(goal: Goal) -> tuple[dict[str, float], dict[str, float]]:
        return {bar.against: bar.factor for bar in goal.must}, {bar.against: bar.factor for bar in goal.aim}

    for must, aim in map(factors, GOALS.values()):
        assert [against for against in must if against in aim and aim[against] <= must[against]] == []
