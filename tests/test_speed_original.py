"""The original figures are those of the pages: held to a second transcription, made from the pages' own layout."""

import pytest

from ppdiffusers_tome.evaluation.speed import original
from ppdiffusers_tome.evaluation.speed.original_layouts import theirs_by_size

# The page's rows as it prints them, per cents included: GPU | size | batch | vanilla | ToMe | ToMe + xFormers
DIFFUSERS = """
A100 | 512 | 10 | 6.88 | 5.26 (+23.55%) | 4.69 (+31.83%)
A100 | 768 | 10 | OOM | 14.71 | 11
A100 | 768 | 8 | OOM | 11.56 | 8.84
A100 | 768 | 4 | OOM | 5.98 | 4.66
A100 | 768 | 2 | 4.99 | 3.24 (+35.07%) | 2.1 (+37.88%)
A100 | 768 | 1 | 3.29 | 2.24 (+31.91%) | 2.03 (+38.3%)
A100 | 1024 | 10 | OOM | OOM | OOM
A100 | 1024 | 8 | OOM | OOM | OOM
A100 | 1024 | 4 | OOM | 12.51 | 9.09
A100 | 1024 | 2 | OOM | 6.52 | 4.96
A100 | 1024 | 1 | 6.4 | 3.61 (+43.59%) | 2.81 (+56.09%)
V100 | 512 | 10 | OOM | 10.03 | 9.29
V100 | 512 | 8 | OOM | 8.05 | 7.47
V100 | 512 | 4 | 5.7 | 4.3 (+24.56%) | 3.98 (+30.18%)
V100 | 512 | 2 | 3.14 | 2.43 (+22.61%) | 2.27 (+27.71%)
V100 | 512 | 1 | 1.88 | 1.57 (+16.49%) | 1.57 (+16.49%)
V100 | 768 | 10 | OOM | OOM | 23.67
V100 | 768 | 8 | OOM | OOM | 18.81
V100 | 768 | 4 | OOM | 11.81 | 9.7
V100 | 768 | 2 | OOM | 6.27 | 5.2
V100 | 768 | 1 | 5.43 | 3.38 (+37.75%) | 2.82 (+48.07%)
V100 | 1024 | 10 | OOM | OOM | OOM
V100 | 1024 | 8 | OOM | OOM | OOM
V100 | 1024 | 4 | OOM | OOM | 19.35
V100 | 1024 | 2 | OOM | 13 | 10.78
V100 | 1024 | 1 | OOM | 6.66 | 5.54
"""
PPDIFFUSERS = """
1 | 2.08 | 2.15 / 2.06 | 1.99 / 1.95
10 | 14.15 | 10.94 / 10.04 | 9.21 / 8.87
16 | 21.93 | 16.73 / 15.31 | 13.98 / 13.95
32 | 42.93 | 32.88 / 29.48 | 26.82 / 29.08
64 | OOM | 63.79 / 58.21 | 52.86 / 50.8
"""
# r% | FID | s/image | GB/image
TOMESD = """
0 | 33.12 | 3.09 | 3.41
10 | 32.86 | 2.56 (1.21x) | 2.99 (1.14x)
20 | 32.86 | 2.29 (1.35x) | 2.17 (1.57x)
30 | 32.80 | 2.06 (1.50x) | 1.71 (1.99x)
40 | 32.87 | 1.85 (1.67x) | 1.26 (2.71x)
50 | 33.02 | 1.65 (1.87x) | 0.89 (3.83x)
60 | 33.37 | 1.52 (2.03x) | 0.60 (5.68x)
"""


def rows(page):
    return [line.split(" | ") for line in page.strip().splitlines()]


def number(text):
    return text if text == "OOM" else float(text)


def test_diffusers_rows_are_the_pages():
    assert len(original.DIFFUSERS_ROWS) == 26
    for row, (gpu, size, batch, *cells) in zip(original.DIFFUSERS_ROWS, rows(DIFFUSERS), strict=True):
        assert (row.gpu, row.size, row.batch) == (gpu, int(size), int(batch))
        assert [row.plain, row.tome, row.both] == [number(cell.split(" (")[0]) for cell in cells]


def test_our_percentages_are_the_pages_with_the_other_sign_but_for_its_misprint():
    table = {
        tuple(row[:3]): row[4:] for row in (line.strip("| ").split(" | ") for line in theirs_by_size({512, 768, 1024}))
    }
    differ = []
    for gpu, size, batch, _, *cells in rows(DIFFUSERS):
        for ours, printed in zip(table[gpu, size, batch], cells, strict=True):
            assert ("(" in ours) == ("(" in printed)
            if "(" in printed and float(printed.split("(+")[1].strip("%)")) != float(ours.split("(−")[1].strip(" %)")):
                differ.append((gpu, size, batch, ours, printed))
    assert differ == [("A100", "768", "2", "2.1 (−57.92 %)", "2.1 (+37.88%)")]
    assert "+37.88 %, where its seconds say 57.92 %" in original.DIFFUSERS.unit


def test_ppdiffusers_rows_are_the_pages():
    for row, (batch, plain, tome, both) in zip(original.PPDIFFUSERS_ROWS, rows(PPDIFFUSERS), strict=True):
        assert (row.batch, row.plain) == (int(batch), number(plain))
        assert [list(row.tome), list(row.both)] == [[float(x) for x in cell.split(" / ")] for cell in (tome, both)]
    assert original.PPDIFFUSERS_ROWS[0].tome[0] > original.PPDIFFUSERS_ROWS[0].plain  # merging lost at batch 1


def test_tomesd_rows_and_their_factors_are_the_papers():
    for row, (percent, fid, seconds, memory) in zip(original.TOMESD_ROWS, rows(TOMESD), strict=True):
        assert (100 * row.ratio, row.fid) == (pytest.approx(float(percent)), float(fid))
        for value, factor, cell in (
            (row.seconds, row.speed_up, seconds),
            (row.memory_gb, 1 / row.memory_share, memory),
        ):
            printed = cell.split(" (")
            assert value == float(printed[0])
            assert f"{factor:.2f}" == (printed[1].strip("x)") if len(printed) == 2 else "1.00")


@pytest.mark.parametrize("document", [original.DIFFUSERS, original.PPDIFFUSERS, original.TOMESD])
def test_each_document_names_its_source_and_machine(document):
    assert document.source.startswith("https://")
    assert any(gpu in document.machine for gpu in ("A100", "V100", "4090"))
