"""Labels of runs in figures."""

from smoothcert.report.panels import short_labels

LOW, HIGH = (0.5, "mnist"), (1.0, "mnist")


def test_runs_that_differ_in_sigma_only_share_a_label() -> None:
    runs = [
        ("gaussian-0.5", "gaussian", LOW),
        ("eta1-0.5", "smoothmix", LOW),
        ("eta5-0.5", "smoothmix", LOW),
        ("gaussian-1.0", "gaussian", HIGH),
        ("eta5-1.0", "smoothmix", HIGH),
        ("mine-2", "smoothmix", HIGH),
    ]
    assert short_labels(runs) == {
        "gaussian-0.5": "gaussian",
        "gaussian-1.0": "gaussian",
        "eta1-0.5": "eta1",
        "eta5-0.5": "eta5",
        "eta5-1.0": "eta5",
        "mine-2": "mine-2",
    }


def test_a_name_without_its_sigma_is_not_taken_from_another_run() -> None:
    runs = [("a-0.5", "m", LOW), ("a", "m", LOW), ("n-0.5", "other", LOW), ("g", "n", LOW), ("-0.5", "other", LOW)]
    assert short_labels(runs) == {"a-0.5": "a-0.5", "a": "a", "n-0.5": "n-0.5", "g": "n", "-0.5": "-0.5"}


def test_a_method_of_several_runs_may_be_the_label_of_one() -> None:
    runs = [("mix-0.5", "mix", LOW), ("mix-one-step-0.5", "mix", LOW), ("mix-1", "mix", HIGH)]
    assert short_labels(runs) == {"mix-0.5": "mix", "mix-one-step-0.5": "mix-one-step", "mix-1": "mix"}
