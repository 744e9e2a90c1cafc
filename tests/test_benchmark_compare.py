"""What became slower is judged within each run, by medians and quartiles."""

import pytest
from compare_speed import compare, main
from speed_results import PLAIN, arm, case, result, times, write

from ppdiffusers_tome.errors import ToMeConfigError


def run(*arms, **fields):
    return result([case([arm("plain", PLAIN), *arms])], **fields)


def tome(share):
    return arm("tome", times(share), ratio=0.5)


@pytest.fixture
def compared(tmp_path):
    """Compares results, given as their contents."""

    def compared(old, *new, **arguments):
        files = [write(tmp_path / f"{index}.json", data) for index, data in enumerate((old, *new))]
        return compare(files[0], files[1:], **arguments)

    return compared


def listed(text):
    """The names of the arms below each heading."""
    parts = [part.splitlines() for part in text.split("\n\n")[1:-1]]
    return {part[0].rstrip(":"): [line.split(": ")[1] for line in part[1:]] for part in parts}


def test_a_larger_share_of_plain_is_slower(compared):
    text, is_slower = compared(run(tome(0.8)), run(tome(0.9)))
    assert is_slower and listed(text) == {"Became slower": ["ToMe 0.5, eager"]}
    assert "  sd15, one UNet pass, 512 px, batch 2: ToMe 0.5, eager: 0.800 [0.800–0.800] → 0.900 [0.900–0.9" in text
    assert "of plain's time (+12.5 %); 16 s → 18 s\n" in text
    assert text.endswith("Within 5% of the old result: 1 of 2 arms.")
    text, is_slower = compared(run(tome(0.9)), run(tome(0.8)))
    assert not is_slower and listed(text) == {"Became faster": ["ToMe 0.5, eager"]}


def of_status(status):
    return run(arm("tome", [], ratio=0.5, status=status))


def predictor(share):
    return run(arm("plain", times(share), backend="predictor"))


MEASURED, WITHOUT_PLAIN = run(tome(0.8)), result([case([tome(0.8)])])
OF_SLOW_CPU = result([case([arm("plain", times(2)), arm("tome", times(1.6), ratio=0.5)])], machine="A slow CPU")


@pytest.mark.parametrize(
    ("old", "new", "heading", "words", "slower"),
    [
        (MEASURED, of_status("out of memory"), "Became slower", "now out of memory (the allocator failed)", True),
        (MEASURED, of_status("error"), "Became slower", "was measured, now error (the allocator failed)", True),
        (of_status("error"), MEASURED, "Became faster", "was error, now measured", False),
        (MEASURED, of_status("not measured"), "Vanished", "now not measured", False),
        (of_status("not measured"), MEASURED, "Appeared", "now measured", False),
        (predictor(0.3), predictor(0.4), "Became slower", "of eager plain's time (+33.3 %)", True),
        (WITHOUT_PLAIN, WITHOUT_PLAIN, "Not compared, because a run has no plain arm", "is not known", False),
        (MEASURED, OF_SLOW_CPU, None, "Machine, threads or versions differ", False),
    ],
)
def test_verdicts(compared, old, new, heading, words, slower):
    text, is_slower = compared(old, new)
    assert is_slower == slower and words in text and list(listed(text)) == ([heading] if heading else [])
    assert " s → " not in text or "differ" not in text, "seconds of another machine"


def test_threshold(compared):
    old, new = run(tome(0.80)), run(tome(0.83))  # +3.75 %
    assert not compared(old, new)[1] and compared(old, new, threshold=0.03)[1]
    with pytest.raises(ToMeConfigError, match="threshold=0"):
        compared(old, new, threshold=0)


def test_overlapping_quartiles_are_noise(compared):
    # shares of plain: old 0.7, 0.8, 0.9 (quartiles 0.75 to 0.85); new 0.8, 0.88, 1.0 (0.84 to 0.94)
    old = run(arm("tome", [7.0, 16.0, 36.0], ratio=0.5))
    text, is_slower = compared(old, run(arm("tome", [8.0, 17.6, 40.0], ratio=0.5)))
    assert "within the noise" in text and not is_slower
    assert compared(old, run(arm("tome", [9.0, 19.0, 39.0], ratio=0.5)))[1]  # 0.9, 0.95, 0.975: from 0.925


def test_appeared_and_vanished(compared):
    text, is_slower = compared(run(tome(0.8)), run(arm("both", times(0.9), ratio=0.5)))
    assert not is_slower
    assert listed(text) == {"Appeared": ["ToMe + memory-efficient 0.5, eager"], "Vanished": ["ToMe 0.5, eager"]}
    larger = result([case([arm("plain", PLAIN), tome(0.95)], size=768)])
    text, is_slower = compared(run(tome(0.8)), larger)
    names = ["plain, eager", "ToMe 0.5, eager"]
    assert not is_slower and listed(text) == {"Appeared": names, "Vanished": names}
    text, is_slower = compared(run(tome(0.8)), larger, run(tome(0.9)))  # several new files are one run
    assert is_slower and listed(text) == {"Became slower": ["ToMe 0.5, eager"], "Appeared": names}


@pytest.mark.parametrize("name, backend", [("built-in", "eager"), ("limit", "eager"), ("tome", "PyTorch")])
def test_arms_of_others_do_not_count(compared, name, backend):
    def with_other(share):
        return run(arm("plain", PLAIN, backend="PyTorch"), arm(name, times(share), ratio=0.5, backend=backend))

    text, is_slower = compared(with_other(0.8), with_other(0.95))
    assert "Became slower:" in text and "(does not count)" in text and not is_slower


def test_methods_are_compared_with_themselves(compared):
    def methods(windows, tomesd):
        return run(arm("tome", times(windows), ratio=0.5, merging={"window": 8}), tome(tomesd))

    text, is_slower = compared(methods(0.6, 0.8), methods(0.6, 0.9))
    assert is_slower and listed(text) == {"Became slower": ["ToMe 0.5, eager"]}
    assert compared(run(tome(0.8)), methods(0.6, 0.8))[0].count("ToMe 0.5, windows of 8, eager: measured") == 1


def test_the_exit_status_reports_that_an_arm_became_slower(tmp_path, capsys):
    old, new = (str(write(tmp_path / f"{share}.json", run(tome(share)))) for share in (0.8, 0.9))
    assert main([old, old]) == 0 and main([old, new]) == 1
    assert "Became slower" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main([str(tmp_path / "no.json"), new])
    assert "no.json cannot be read as a result" in capsys.readouterr().err
