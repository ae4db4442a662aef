"""A short form of `soak.py`: the full one has 1,000 adaptations and 200,000 images."""

from soak import adapt_often, passed, predict_many

from small_runs import forkserver


def test_adaptations_leave_nothing_behind():
    """In a process of its own: one that has run a thousand other tests gives memory back when it likes."""
    with forkserver().Pool(1) as pool:
        figures = pool.apply(adapt_often, (20,))
    assert passed(figures), figures


def test_predictions_in_flat_memory():
    figures = predict_many(3_000, workers=0)
    assert figures["rows"] == 3_000
    assert passed(figures), figures


def test_growth_is_seen():
    figures = {
        "handles_after_warm_up": 9,
        "handles_at_the_end": 9,
        "threads_after_warm_up": 2,
        "threads_at_the_end": 2,
    }
    flat = {"rss_mib_after_warm_up": 500.0, "rss_mib_at_the_end": 501.0}
    assert passed(figures | flat)
    assert not passed(figures | flat | {"rss_mib_at_the_end": 540.0})
    assert not passed(figures | flat | {"handles_at_the_end": 12})
    assert not passed(figures | flat | {"threads_at_the_end": 3})
