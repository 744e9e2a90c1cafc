"""benchmarks/gpu.py: each cell is a process, the end of time or memory loses no figure, and the page shows both."""

import copy
import json
import signal
import sys

import gpu
import paddle
import pytest

from ppdiffusers_tome.evaluation.speed.runner import WorkerEndedError

ON_CPU = ["--architecture", "tiny", "--dtype", "float32"]


class Worker:
    """Takes the place of the process of a cell: a row of its batch takes 0.01 s, less with a higher ratio.

    Above `memory` rows of plain attention it ends as on a GPU without memory; merged ones need half, fused ones none.
    """

    def __init__(self, memory=10**9, end=None, seconds=0.0):
        self.memory, self.end, self.seconds, self.cells = memory, end, seconds, []

    def __call__(self, cell, settings, programs, skip):
        cell = copy.deepcopy(cell)
        (arm,) = cell.arms
        self.cells.append((cell.size, cell.batch, arm.name, list(skip)))
        yield arm.name, "check"
        gpu.time.clock += self.seconds
        need = cell.batch * (cell.size // 512) * {"plain": 1, "tome": 0.5}.get(arm.arm, 0)
        if need > self.memory:
            raise self.end or WorkerEndedError(1, "ResourceExhaustedError: Out of memory error on GPU 0")
        arm.seconds = [0.01 * cell.batch * (1 - arm.ratio)] * settings.rounds
        arm.status, arm.peak_memory_bytes = "measured", 10**9
        yield cell


class Clock:
    """The module `time`, standing still."""

    clock = 0.0

    def monotonic(self):
        return self.clock


@pytest.fixture
def run(monkeypatch, tmp_path):
    """A function that runs the script with a worker and returns its result and page."""

    def run(worker, *arguments):
        monkeypatch.setattr(gpu, "worker_messages", worker)
        monkeypatch.setattr(gpu, "time", Clock())
        monkeypatch.setattr(sys, "argv", ["gpu.py", "--output", str(tmp_path / "new"), *arguments])
        run.status = gpu.main()
        return json.loads((tmp_path / "new" / "gpu.json").read_text()), (tmp_path / "new" / "gpu.md").read_text()

    return run


@pytest.fixture
def on_gpu(monkeypatch):
    """Paddle reports a GPU, on which nothing runs."""
    monkeypatch.setattr(paddle, "get_device", lambda: "gpu:0")
    monkeypatch.setattr(paddle.device.cuda, "get_device_name", lambda: "A100")


def table(page, ratio):
    section = page.partition(f"## Ratio {ratio}\n")[2].partition("\n## ")[0]
    header, _, *rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("|")]
    return [dict(zip(header, row, strict=True)) for row in rows]


def test_tables_of_a_gpu_stand_beside_the_published_ones(run, on_gpu):
    worker = Worker(memory=24)
    result, page = run(worker)
    assert len(worker.cells) < len(result["cases"]) == 3 * 7 * 8
    assert {case["dtype"] for case in result["cases"]} == {"float16"}
    assert {case["arms"][0]["attention"] for case in result["cases"]} == {"plain", "xformers"}
    assert "# Token merging on gpu:0: A100" in page and run.status == 0
    rows = {(row["size, px"], row["images"]): row for row in table(page, 0.5)}
    assert len(rows) == 21
    one, ten, large = rows["512", "1"], rows["512", "10"], rows["1024", "10"]
    assert one["plain"] == "1.00 (1.00 GB)" and one["ToMe + xformers"] == "0.500 (2.00×, 1.00 GB)"
    assert one["diffusers, V100"] == "1.88 / 1.57 / 1.57" and one["ppdiffusers, A100"] == "2.08 / 2.15 / 1.99"
    assert ten["diffusers, A100"] == "6.88 / 5.26 / 4.69" and ten["ToMe"] == "5.00 (2.00×, 1.00 GB)"
    assert (large["plain"], large["ToMe"], large["diffusers, A100"]) == ("OOM", "5.00 (1.00 GB)", "OOM / OOM / OOM")
    seventy_five = {(row["size, px"], row["images"]): row for row in table(page, 0.75)}
    assert seventy_five["512", "10"]["ppdiffusers, A100"] == "14.15 / 10.04 / 8.87"
    assert "diffusers, A100" not in table(page, 0.25)[0]


def test_half_of_the_tokens_comes_first(run, on_gpu):
    worker = Worker()
    run(worker, "--size", "1024", "512", "--batch", "2", "1")
    first = [(size, batch) for size, batch, name, _ in worker.cells[:16]]
    assert first == [(size, batch) for size in (512, 1024) for batch in (2, 4) for _ in range(4)]
    assert not any("0.25" in name or "0.75" in name for _, _, name, _ in worker.cells[:16])


def test_nothing_larger_is_tried_where_memory_ended(run, on_gpu):
    worker = Worker(memory=8)
    _, page = run(worker, "--ratio", "0.5", "--arms", "plain")
    tried = {size: [batch // 2 for px, batch, *_ in worker.cells if px == size] for size in (512, 768, 1024)}
    assert tried == {512: [1, 2, 4, 8], 768: [1, 2, 4], 1024: [1, 2, 4]}
    assert [row["plain"] for row in table(page, 0)].count("OOM") == 13
    (reason,) = page.partition("## Not measured\n")[2].strip().splitlines()
    assert "Out of memory error on GPU 0" in reason and "1024 px, batch 64" in reason


def test_only_the_first_cell_of_an_arm_runs_others_for_comparison(run, on_gpu):
    worker = Worker()
    run(worker, "--ratio", "0.5", "--size", "512", "--batch", "1", "2")
    plain, tome = worker.cells[0][2], worker.cells[2][2]
    assert [skip for *_, skip in worker.cells] == [[]] * 4 + [[], [plain], [plain], sorted([plain, tome])]


def test_time_ends_and_the_same_command_continues(run, on_gpu):
    command = ["--ratio", "0.5", "--size", "512", "--batch", "1", "--minutes", "1"]
    worker = Worker(seconds=25)
    result, page = run(worker, *command)
    assert [case["arms"][0]["status"] for case in result["cases"]] == ["measured", "measured", "planned", "planned"]
    assert "**2 of 4 cells are not measured yet**" in page and table(page, 0.5)[0]["plain"] == "1.00 (1.00 GB)"
    worker.cells.clear()
    result, page = run(worker, *command)
    first, second = (name for _, _, name, _ in worker.cells)
    assert first.startswith("default 0.5,") and second.startswith("default + ")
    assert {case["arms"][0]["status"] for case in result["cases"]} == {"measured"} and "not measured yet" not in page
    worker.cells.clear()
    run(worker, *command)
    assert worker.cells == []
    run(worker, *command, "--restart")
    assert len(worker.cells) == 3
    result, page = run(worker, *command, "--batch", "2", "--minutes", "9")  # what is measured stays
    assert [row["images"] for row in table(page, 0.5)] == ["1", "2"]


def test_another_machine_is_refused(run, on_gpu, monkeypatch, capsys):
    run(Worker(), "--size", "512", "--batch", "1")
    monkeypatch.setattr(paddle.device.cuda, "get_device_name", lambda: "V100")
    with pytest.raises(SystemExit):
        run(Worker(), "--size", "512", "--batch", "1")
    assert "was measured with other environment" in capsys.readouterr().err


@pytest.mark.parametrize(("is_memory", "status"), [(True, "out of memory"), (False, "error")])
def test_a_process_that_is_ended_is_a_cell(run, on_gpu, is_memory, status):
    worker = Worker(memory=0, end=WorkerEndedError(-signal.SIGKILL, "", is_memory))
    result, _ = run(worker, "--size", "512", "--batch", "1", "--ratio", "0.5", "--arms", "plain", "both")
    assert [case["arms"][0]["status"] for case in result["cases"]] == [status, "measured"]
    assert "check: the worker ended by SIGKILL" in result["cases"][0]["arms"][0]["reason"]


def test_float16_needs_a_gpu(run, capsys):
    with pytest.raises(SystemExit):
        run(Worker(), "--architecture", "tiny")
    assert "--dtype float16 is not allowed on the CPU" in capsys.readouterr().err


def test_cells_run_in_processes(run, monkeypatch):
    """On the CPU, with a limit in which only the merged arm fits."""
    real, *arguments = gpu.worker_messages, *ON_CPU, "--size", "256", "--batch", "16", "--ratio", "0.5"
    result, page = run(real, *arguments, "--arms", "plain", "tome", "--memory-limit", "0.4", "--rounds", "1")
    assert [case["arms"][0]["status"] for case in result["cases"]] == ["out of memory", "measured"]
    (row,) = table(page, 0.5)
    assert row["plain"] == "OOM" and 0.1 < float(row["ToMe"].split("(")[1].split()[0]) < 0.3
