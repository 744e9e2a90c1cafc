"""Every figure in the documents equals the field of the committed result that it comes from.

A figure has a place: a cell of a table, which is chosen by its document and its first header cell, or the group of a
regular expression that matches a document's prose exactly once.
"""

import re

import committed_figures as figures
import pytest
from committed_figures import value
from markdown_text import documents, prose, tables, text_of

from ppdiffusers_tome import ToMeConfig
from ppdiffusers_tome.evaluation.quality.frontier import NOISE

SD15_UNET, LOAD = "results/sd15_unet.json", "results/load.json"
IMAGE_CLIENTS = ("openai", "txt2img", "img2img")
TABLES = {  # by document and first header cell
    ("README.md", "what runs"): lambda: figures.speed_table(0),
    ("README_zh.md", "测试对象"): lambda: figures.speed_table(1),
    ("README.md", "size"): lambda: figures.quality_table(0),
    ("README_zh.md", "尺寸"): lambda: figures.quality_table(1),
    ("docs/methods.md", "variant"): figures.experiments_table,
    ("docs/methods.md", "ratios"): figures.schedules_table,
    ("docs/methods.md", "instead of plain"): figures.alternatives_table,
    ("docs/comparison.md", "method"): figures.operations_table,
    ("docs/inference.md", "size"): figures.predictor_table,
    ("docs/inference.md", "threads"): figures.runtimes_table,
    ("docs/serving.md", "size"): figures.one_client_table,
    ("docs/serving.md", "seconds until images"): figures.load_table,
}
PROSE = [  # document, expression with one group around the figure, the figure
    ("README.md", r"medians of (\d+) rounds", figures.rounds_of_speed_table),
    ("README.md", r"of (\d+) for a pass of `emoji_sd`", lambda: value("results/emoji_unet.json", "rounds")),
    ("README.md", r"one CPU thread with Paddle ([\d.]+),", lambda: value(SD15_UNET, "environment.paddlepaddle")),
    ("README.md", r"take (\d+) steps at 256 px", lambda: figures.steps_of_images(256)),
    ("README.md", r"both passes together are (\S+) as fast", figures.hires_speed_up),
    ("README.md", r"compares (\d+) prompts at 128 px", lambda: figures.images_per_setting("128")),
    ("README.md", r"and (\d+) prompts at 256 px", lambda: figures.images_per_setting("256")),
    ("README.md", r"at 256 px \((\d+) steps of the bundled", figures.steps_of_prompts),
    (
        "README.md",
        r"and (\d+) and \d+ images by image-to-image",
        lambda: figures.images_per_setting("photographs_128"),
    ),
    (
        "README.md",
        r"and \d+ and (\d+) images by image-to-image",
        lambda: figures.images_per_setting("photographs_256"),
    ),
    ("README.md", r"one thread, (\d+) rounds at 128 px", lambda: figures.rounds_of_pass("128")),
    ("README.md", r"rounds at 128 px, (\d+) at 256 px", lambda: figures.rounds_of_pass("256")),
    ("README.md", r"at strength (\S+), from", figures.strength_of_photographs),
    ("README.md", r"between them by up to (.+?),", figures.noise),
    ("README.md", r"between runs by up to (.+?)\.", lambda: figures.noise("predictor")),
    ("README.md", r"at 128 px by (\d+) dB on", lambda: figures.gain("128")),
    ("README.md", r"prompts and (\d+) dB in image-to-image", lambda: figures.gain("photographs_128")),
    ("README.md", r"at 256 px by (\d+) dB", lambda: figures.gain("256")),
    ("README.md", r"\((\d+) dB on the 16 prompts", lambda: figures.gain("frontier_256")),
    ("README.md", r"dB on the (\d+) prompts of", lambda: figures.images_per_setting("frontier_256")),
    ("README.md", r"frontier\.md\) and (\d+) dB", lambda: figures.gain("photographs_256")),
    ("README.md", r"prompts change (.+?) as much", lambda: figures.change_against_seed("128")),
    ("README.md", r"another seed, image-to-image (.+?)\.", lambda: figures.change_against_seed("photographs_128")),
    ("README.md", r"KID does not separate (.+?) from", lambda: figures.methods_that_kid_separates("any method")),
    ("README.md", r"all (\d+) pipeline classes", figures.pipeline_classes),
    ("README_zh.md", r"取 (\d+) 轮的中位数", figures.rounds_of_speed_table),
    ("README_zh.md", r"一次前向取 (\d+) 轮", lambda: value("results/emoji_unet.json", "rounds")),
    ("README_zh.md", r"0\.5、Paddle ([\d.]+)、CPU", lambda: value(SD15_UNET, "environment.paddlepaddle")),
    ("README_zh.md", r"完整生成在 256 px 时采样步数为 (\d+)", lambda: figures.steps_of_images(256)),
    ("README_zh.md", r"两次合计加速 (\S+?)（", figures.hires_speed_up),
    ("README_zh.md", r"128 px 用 (\d+) 个提示词", lambda: figures.images_per_setting("128")),
    ("README_zh.md", r"256 px 用 (\d+) 个，", lambda: figures.images_per_setting("256")),
    ("README_zh.md", r"个，采样步数 (\d+)）", figures.steps_of_prompts),
    ("README_zh.md", r"分别为 (\d+) 张和", lambda: figures.images_per_setting("photographs_128")),
    ("README_zh.md", r"张和 (\d+) 张，强度", lambda: figures.images_per_setting("photographs_256")),
    ("README_zh.md", r"128 px 取 (\d+) 轮", lambda: figures.rounds_of_pass("128")),
    ("README_zh.md", r"256 px 取 (\d+) 轮", lambda: figures.rounds_of_pass("256")),
    ("README_zh.md", r"强度 (\S+?)，", figures.strength_of_photographs),
    ("README_zh.md", r"最多相差 (.+?)，更小", figures.noise),
    ("README_zh.md", r"最多相差 ([^，]+)，所以", lambda: figures.noise("predictor")),
    ("README_zh.md", r"128 px 的提示词上近 (\d+) dB", lambda: figures.gain("128")),
    ("README_zh.md", r"图生图近 (\d+) dB，256", lambda: figures.gain("photographs_128")),
    ("README_zh.md", r"256 px 的提示词上近 (\d+) dB", lambda: figures.gain("256")),
    ("README_zh.md", r"个提示词上为 (\d+) dB", lambda: figures.gain("frontier_256")),
    ("README_zh.md", r"的 (\d+) 个提示词上为", lambda: figures.images_per_setting("frontier_256")),
    ("README_zh.md", r"图生图近 (\d+) dB。", lambda: figures.gain("photographs_256")),
    ("README_zh.md", r"变化是换一个种子的 (.+?)，图", lambda: figures.change_against_seed("128")),
    ("README_zh.md", r"图生图则为 (.+?)。", lambda: figures.change_against_seed("photographs_128")),
    ("README_zh.md", r"从 KID 看，(.+?)的结果都", lambda: figures.methods_that_kid_separates("任何方法")),
    ("README_zh.md", r"全部 (\d+) 个 pipeline 类", figures.pipeline_classes),
    ("docs/methods.md", r"from (\S+) to \S+ at 128 px", lambda: figures.level_speed_up(128, 1)),
    ("docs/methods.md", r"from \S+ to (\S+) at 128 px", lambda: figures.level_speed_up(128, 2)),
    ("docs/methods.md", r"from (\S+) to \S+ at 256 px", lambda: figures.level_speed_up(256, 1)),
    ("docs/methods.md", r"from \S+ to (\S+) at 256 px", lambda: figures.level_speed_up(256, 2)),
    ("docs/methods.md", r"Medians of (\d+) images at 128 px", lambda: figures.images_of_alternatives("128")),
    ("docs/methods.md", r"merged program becomes (\S+) as", lambda: figures.bfloat16_speed_up("window 16")),
    ("docs/methods.md", r"a plain one (\S+) \(", lambda: figures.bfloat16_speed_up("plain")),
    *(
        ("docs/methods.md", pattern, lambda kind=kind, config=config: figures.psnr(kind, config))
        for pattern, kind, config in (
            (r"median PSNR is (\S+) dB instead", "frontier_photographs_256", figures.TWO_LEVELS),
            (r"the default's (\S+) dB, and", "frontier_photographs_256", figures.DEFAULT),
            (r"and (\S+) dB instead of \S+ dB on prompts", "frontier_256", figures.TWO_LEVELS),
            (r"dB instead of (\S+) dB on prompts", "frontier_256", figures.DEFAULT),
            (r"its median PSNR is (\S+) dB,", "frontier_256", ToMeConfig(ratio=0.8, sx=4)),
            (r"2×2 at 0\.75 is (\S+) dB,", "frontier_256", ToMeConfig(ratio=0.75)),
            (r"they are (\S+) dB and", "frontier_photographs_256", ToMeConfig(ratio=0.8, sx=4)),
            (r"they are \S+ dB and (\S+) dB", "frontier_photographs_256", ToMeConfig(ratio=0.75)),
            (r"has a median PSNR of (\S+) dB instead", "cells_photographs_128", ToMeConfig(ratio=0.5, sx=4)),
            (r"instead of (\S+) dB, at 0\.75", "cells_photographs_128", figures.DEFAULT),
        )
    ),
    *(
        ("docs/limits.md", pattern, lambda of=of: figures.speed_up(*of))
        for pattern, of in (
            (r"is generated (\S+) as fast in eager", ("emoji_pipeline_128", "eager", 128, 1)),
            (r"eager mode and (\S+) in a predictor", ("emoji_pipeline_128", "predictor", 128, 1)),
            (r"batch 2 is (\S+) and", ("emoji_unet", "eager")),
            (r"batch 2 is \S+ and (\S+) as fast", ("emoji_unet", "predictor")),
        )
    ),
    ("docs/limits.md", r"at 0\.75, (\S+) dB, is further", lambda: figures.psnr("quality", ToMeConfig(ratio=0.75))),
    ("docs/limits.md", r"at 0\.5, (\S+) dB \(", lambda: figures.psnr("frontier_128", figures.TOMESD[0])),
    ("docs/limits.md", r"at 512 px gains (\S+) at", lambda: figures.speed_up("sd15_unet", size=512)),
    ("docs/limits.md", r"0\.5 instead of ([^,]+),", lambda: figures.speed_up_by_macs("sd15_unet", 512, 2)),
    ("docs/limits.md", r"with attention slicing (\S+) \(", figures.speed_up_of_sliced),
    (
        "docs/limits.md",
        r"blocks gains (\S+) at",
        lambda: figures.speed_up("sd15_block", size=1024, batch=1, form=".1f"),
    ),
    (
        "docs/limits.md",
        r"1024 px instead of (\S+) \(",
        lambda: figures.speed_up_by_macs("sd15_block", 1024, 1, ".1f"),
    ),
    ("docs/limits.md", r"(\d+) of the \d+ measured cases", lambda: figures.near_limit()[0]),
    ("docs/limits.md", r"of the (\d+) measured cases", lambda: figures.near_limit()[1]),
    ("docs/limits.md", r"below the limit, by up to (.+?),", lambda: figures.near_limit()[2]),
    ("docs/limits.md", r"changes prompts (.+?) as much", lambda: figures.change_against_seed("128")),
    ("docs/limits.md", r"does, image-to-image (.+?)\.", lambda: figures.change_against_seed("photographs_128")),
    ("docs/limits.md", r"at strength (\S+), and the prompts", figures.strength_of_photographs),
    ("docs/limits.md", r"tomesd is (\S+) times as fast", figures.torch_speed_up),
    ("docs/comparison.md", r"perceptual distance of (\S+) against", lambda: figures.perceptual("0.5-tomesd")),
    ("docs/comparison.md", r"against ([\d.]+) \(", lambda: figures.perceptual("0.5-proportional=False_window=None")),
    ("docs/comparison.md", r"medians of (\d+) rounds", lambda: value("ops.json", "rounds")),
    ("docs/comparison.md", r"random order, (.+?), one thread", figures.operations_case),
    ("docs/inference.md", r"medians of (\d+) rounds", lambda: value("results/emoji_unet.json", "rounds")),
    *(
        ("docs/inference.md", pattern, lambda of=(backend, size): figures.against_tomesd(*of))
        for pattern, backend, size in (
            (r"predictor is (\S+) as fast at 128 px", "predictor", 128),
            (r"at 128 px and (\S+) at 256 px, ONNX", "predictor", 256),
            (r"ONNX Runtime (\S+) and \S+\.", "onnxruntime", 128),
            (r"ONNX Runtime \S+ and (\S+)\.", "onnxruntime", 256),
        )
    ),
    ("docs/inference.md", r"PyTorch ([\d.]+), milli", lambda: value("results/emoji_unet.json", "environment.torch")),
    ("docs/inference.md", r"diffusers ([\d.]+),", lambda: value("results/emoji_unet.json", "environment.diffusers")),
    ("docs/inference.md", r"tomesd ([\d.]+),", lambda: value("results/emoji_unet.json", "environment.tomesd")),
    ("docs/serving.md", r"bundled model, (\d+) steps, one", lambda: value(LOAD, "one_client.steps")),
    ("docs/serving.md", r"cores, (\d+) seconds:", lambda: figures.load_option("--seconds")),
    ("docs/serving.md", r"kept short \((\d+)\)", lambda: figures.load_option("--queue")),
    ("docs/serving.md", r"seconds: ([\d,]+) requests", lambda: value(LOAD, "requests", ",")),
    ("docs/serving.md", r"(\d+) of them abandoned", lambda: value(LOAD, "abandoned.by_clients")),
    ("docs/serving.md", r"(\d+) responses with images", lambda: figures.answers(200, IMAGE_CLIENTS)),
    ("docs/serving.md", r"([\d.]+) images per call", lambda: value(LOAD, "images_per_call", ".2f")),
    ("docs/serving.md", r"(\d+) with status 429", lambda: figures.answers(429, (*IMAGE_CLIENTS, "invalid"))),
    ("docs/serving.md", r"(\d+) MiB in the second", lambda: value(LOAD, "memory_mib.second_quarter")),
    ("docs/serving.md", r"(\d+) MiB in the last", lambda: value(LOAD, "memory_mib.last_quarter")),
    ("docs/serving.md", r"At (\d+) images per hour", figures.images_per_hour),
    ("docs/serving.md", r"24 × (\d+)\)", figures.images_per_hour),
    ("docs/serving.md", r"= (\d+) cores", lambda: figures.machines(cores=1)),
    ("docs/serving.md", r"(\d+) machines of 16 cores", lambda: figures.machines(cores=16)),
    ("benchmarks/README.md", r"is (\S+) px without the", lambda: figures.edge_distance("without")),
    ("benchmarks/README.md", r"(\S+) px plain", lambda: figures.edge_distance("plain")),
    ("benchmarks/README.md", r"(\S+) px at ratio 0\.5", lambda: figures.edge_distance("0.5")),
    ("benchmarks/README.md", r"\((\S+) at 0\.5\)", figures.controlnet_speed_up),
    ("benchmarks/README.md", r"ControlNet \((\d+) steps", lambda: value("controlnet_canny_128.json", "steps")),
]


DISPROVED = {  # what a document once claimed: what disproves it
    r"have not been published for diffusion": "ImprovedTokenMerge (2024) and AsymRnR (arXiv:2412.11706)",
    r"integer key|2⁻²⁴": "matching.py sorts similarities as values",
    r"up to three inputs": "tracing.TRIES",
    r"nearest to the plain|最接近未合并": "keys and values are nearer in image-to-image and further on prompts",
    r"[Bb]elow 10 % are noise|10 % 以内": "the speed-ups of results that measured the same",
    r"no merging can be faster|fastest that merging can|tokens can be faster": "arms are below the free-merge limit",
    r"\| bundled model, |\| 自带模型，": "the rows are of two models",
    r"Cost\*\*: none[; ]": "every method costs something",
    r"[Pp]hotographs, dB|PSNR of photographs|dB on photographs|照片的 PSNR|照片上近": "made by image-to-image",
}


@pytest.mark.parametrize(("document", "first"), TABLES)
def test_tables_have_the_figures_of_the_results(document, first):
    (table,) = [table for table in tables(document) if table[0][0] == first]
    header, *rows = table
    expected_rows = list(TABLES[document, first]())
    shape = [len(row) for row in expected_rows]
    assert [len(row) for row in rows] == shape, f"{document}, table {first!r}: the results give rows of {shape} cells"
    wrong = [
        f"{document}, table {first!r}, row {nth}, column {name!r}: {cell!r} must be {figure.text!r} ({figure.field})"
        for nth, (row, expected) in enumerate(zip(rows, expected_rows, strict=True), 1)
        for name, cell, figure in zip(header, row, expected, strict=True)
        if cell != figure.text
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(("document", "pattern", "expected"), PROSE, ids=[f"{entry[0]}-{entry[1]}" for entry in PROSE])
def test_prose_has_the_figures_of_the_results(document, pattern, expected):
    matches = re.findall(pattern, prose(document))
    assert len(matches) == 1, f"{document}: {pattern!r} must match once, not {len(matches)} times"
    figure = expected()
    assert matches[0] == figure.text, (
        f"{document}, {pattern!r}: {matches[0]!r} must be {figure.text!r} ({figure.field})"
    )


@pytest.mark.parametrize("document", sorted({entry[0] for entry in PROSE} | {"docs/evaluation.md", "docs/api.md"}))
def test_every_speed_up_in_prose_is_compared_with_a_result(document):
    text = prose(document)
    compared = {
        found.span(1) for name, pattern, _ in PROSE if name == document for found in re.finditer(pattern, text)
    }
    spans = {match.span(): match[0] for match in re.finditer(r"(?<![`\d])\d+\.\d+×(?!`)", text)}
    loose = [speed_up for span, speed_up in spans.items() if span not in compared]
    assert not loose, f"{document}: {loose} must be in PROSE, with the field that they come from"


@pytest.mark.parametrize("document", documents("README*.md", "docs/*.md", "examples/**/*.md", "benchmarks/**/*.md"))
def test_documents_do_not_claim_what_is_disproved(document):
    text = " ".join(text_of(document).split())
    claims = {found[0]: why for claim, why in DISPROVED.items() for found in re.finditer(claim, text)}
    assert not claims, f"{document}: {claims}"


def test_what_another_run_changes_is_no_place_on_the_frontier():
    assert figures.noise("predictor").text == f"{100 * NOISE:g} %"


def test_methods_credits_who_matched_keys_and_values_first():
    text = prose("docs/methods.md")
    assert "github.com/ethansmith2000/ImprovedTokenMerge" in text and "arXiv:2412.11706" in text


def test_the_load_that_the_documents_report_found_no_fault():
    assert figures.read(LOAD)["violations"] == []
