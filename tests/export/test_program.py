"""Exported programs follow the rules of the tensor code.

The tests also export programs that break each rule, to show that the checks detect them.
"""

import paddle
import pytest
from conftest import tiny_pipeline
from exporting import export_linked, unmerged_programs
from paddle.static import InputSpec
from ppdiffusers.patches.tomesd_patch_utils import bipartite_soft_matching_random2d
from program_reader import Variable, read_program
from program_rules import EXPANDED, IN_PLACE, WAITS, ZEROS, broken_rules

from ppdiffusers_tome import ToMeConfig, match_tokens, merge, unmerge
from ppdiffusers_tome.attach.placement import placements
from ppdiffusers_tome.grid import Grid, count_dst
from ppdiffusers_tome.inference import read_manifest
from ppdiffusers_tome.methods import METHODS

CHANNELS = 32  # of tiny_pipeline's one level


@pytest.fixture(scope="module")
def folder_of_pairs(exported_folder, tmp_path_factory):
    """The first program of that export by the method "tomesd"."""
    folder, size = tmp_path_factory.mktemp("pairs") / "out", read_manifest(exported_folder).sizes[0]
    linked = unmerged_programs(exported_folder)
    export_linked(tiny_pipeline(), folder, 0.5, [size], linked=linked, method="tomesd")
    return folder


@pytest.mark.parametrize("method", ["interlace", "tomesd"])
def test_merging_follows_the_rules(method, request):
    folder = request.getfixturevalue("exported_folder" if method == "interlace" else "folder_of_pairs")
    manifest, channels = read_manifest(folder), CHANNELS
    for file in manifest.programs_of("unet"):
        program = read_program(folder / file.files["paddle"].program)
        grid = Grid(*(side // manifest.vae_factor for side in file.size))
        # otherwise an index could look like an expanded one
        assert channels not in (grid.tokens, *lengths_of_indices(method, grid))
        tokens = (-1, grid.tokens, channels)
        assert any(out.dtype == "float32" and out.shape == tokens for op in program for out in op.outputs)
        has_pairs = bool(file.ratio) and method == "tomesd"
        assert ("scatter_nd_add" in {op.name for op in program}) == has_pairs
        broken = broken_rules(program, channels)
        if file.ratio and method == "interlace":  # the step decides how many tokens remain, once in a block
            merging = [one for one in placed_in_unet(method) if one.count_kept(grid) < grid.tokens]
            counted = [one for one in broken if one.rule == WAITS and one.operation.name == "slice"]
            assert len(counted) == len(merging) and all(one.operation.outputs[0].dtype == "int64" for one in counted)
            broken = [one for one in broken if one not in counted]
        assert list(map(str, broken)) == [], file.name


def placed_in_unet(method):
    """What merges in the blocks of the tiny pipeline's UNet at ratio 0.5."""
    return [placement for _, placement in placements(tiny_pipeline().unet, ToMeConfig(0.5, method))]


def lengths_of_indices(method, grid):
    """How many tokens the programs have indices of, at ratio 0.5."""
    n = grid.tokens
    kept = {placement.count_kept(grid) for placement in placed_in_unet(method)}
    if not METHODS[method].merges_queries:
        return kept
    d = count_dst(grid, 2, 2)
    return {d, n - d, *kept, *(n - k for k in kept), *(k - d for k in kept)}


# Programs that break a rule: tokens [B, N, C] on a grid of 6×8, of which R merge away

B, H, W, C, R = 2, 6, 8, 19, 16
N = H * W


class Broken(paddle.nn.Layer):
    """A computation on tokens [B, N, C] and, for each of N tokens, a row [B, N].

    The inputs are returned as well, because Paddle cannot export layers with unused inputs.
    """

    def __init__(self, compute):
        super().__init__()
        self.compute = compute

    def forward(self, x, rows):
        return self.compute(x, rows), x * 2.0, rows * 2


def as_rows(x):
    return x.reshape([-1, C])


def indices(rows):
    return rows.reshape([-1, 1])


def built_in_merge(x, rows):
    """Merging as in ppdiffusers' built-in apply_tome."""
    matched = bipartite_soft_matching_random2d(x, W, H, 2, 2, R, no_rand=True)
    return matched[0](x)


def unmerge_as_built_in(x, rows):
    """Unmerging as in ppdiffusers and tomesd, out of place, because Paddle cannot export the in-place form."""
    index = rows.unsqueeze(-1).expand([B, N, C])
    return paddle.put_along_axis(paddle.zeros([B, N, C]), index, x, axis=1)


def sum_into_expanded_zeros(x, rows):
    zeros = paddle.full([1, 1], 0.0).astype("float64").expand([B * N, C]).astype("float32")
    return paddle.scatter(zeros, rows.reshape([-1]), as_rows(x), overwrite=False)


def find_rows(x, rows):
    return paddle.gather(as_rows(x), paddle.nonzero(rows.reshape([-1]) > 0).reshape([-1]))


def index_over_all_elements(x, rows):
    index = rows.unsqueeze(-1) * C + paddle.arange(C, dtype="int64")
    return paddle.gather(x.reshape([-1]), index.reshape([-1]))


def assigned_slice(x, rows):
    y = x * 2.0
    y[:, 0] = 0.0
    return y


def merge_and_unmerge(x, rows):
    plan = match_tokens(x, Grid(H, W), N - R)
    return unmerge(merge(x, plan), plan)


# Paddle 2's branches and loops write to variables of the program around them.
WAITS_IN_FLOW = {WAITS, IN_PLACE} if paddle.__version__.startswith("2.") else {WAITS}

COMPUTATIONS = {  # with the rules that each breaks
    "built-in merge": (built_in_merge, {EXPANDED}),
    "unmerge as built in": (unmerge_as_built_in, {ZEROS, EXPANDED}),
    "sum into zeros_like": (
        lambda x, rows: paddle.scatter_nd_add(as_rows(paddle.zeros_like(x)), indices(rows), as_rows(x)),
        {ZEROS},
    ),
    "sum into expanded zeros": (sum_into_expanded_zeros, {ZEROS}),
    "sum into nothing": (lambda x, rows: paddle.scatter_nd(indices(rows), as_rows(x), [B * N, C]), {ZEROS}),
    "sum into zero times x": (
        lambda x, rows: paddle.index_add(as_rows(x * 0.0), rows.reshape([-1]), 0, as_rows(x)),
        {ZEROS},
    ),
    "find rows": (find_rows, {WAITS}),
    "mask rows": (lambda x, rows: paddle.masked_select(x, x > 0), {WAITS}),
    "slice by a value": (lambda x, rows: x[:, : rows.max()], {WAITS}),
    "branch": (lambda x, rows: paddle.static.nn.cond(rows.sum() > 0, lambda: x * 2.0, lambda: x), WAITS_IN_FLOW),
    "loop": (
        lambda x, rows: paddle.static.nn.while_loop(lambda y: y.sum() < 9, lambda y: [y + 1.0], [x])[0],
        WAITS_IN_FLOW,
    ),
    "expanded index": (
        lambda x, rows: paddle.take_along_axis(x, rows.unsqueeze(-1).expand([B, N, C]), axis=1),
        {EXPANDED},
    ),
    "index that Paddle expands": (
        lambda x, rows: paddle.take_along_axis(x, rows.unsqueeze(-1), axis=1),
        {EXPANDED},
    ),
    "index over all elements": (index_over_all_elements, {EXPANDED}),
    "assigned slice": (assigned_slice, {IN_PLACE}),
    "merge and unmerge": (merge_and_unmerge, set()),
    "sum into ones": (
        lambda x, rows: paddle.scatter_nd_add(as_rows(paddle.ones_like(x)), indices(rows), as_rows(x)),
        set(),
    ),
    "slice by a shape": (lambda x, rows: x[:, : paddle.shape(x)[1] // 2], set()),
}


@pytest.mark.filterwarnings("ignore")  # Paddle's tracer warns about code of Paddle and ppdiffusers
@pytest.mark.parametrize(("compute", "rules"), COMPUTATIONS.values(), ids=COMPUTATIONS)
def test_each_check_detects_violations(compute, rules, tmp_path):
    spec = [InputSpec([None, N, C], "float32", "x"), InputSpec([None, N], "int64", "rows")]
    paddle.jit.save(paddle.jit.to_static(Broken(compute), input_spec=spec, full_graph=True), str(tmp_path / "layer"))
    path = next(path for path in tmp_path.iterdir() if path.suffix in (".json", ".pdmodel"))
    program = read_program(path)
    assert Variable("x", "float32", (-1, N, C)) in {
        Variable(op.attributes.get("name", out.name), out.dtype, out.shape) for op in program for out in op.outputs
    } | {operand for op in program for operand in op.inputs}
    assert {finding.rule for finding in broken_rules(program, C)} == rules


def test_other_files_are_rejected(tmp_path):
    with pytest.raises(ValueError, match=r"unet\.pdiparams .*\.pdmodel or \.json"):
        read_program(tmp_path / "unet.pdiparams")
