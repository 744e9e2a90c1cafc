"""The tokens of a grid: how many there are, and which are dst and which src."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import paddle

from .config import ToMeConfig
from .errors import ToMePassError

LARGEST_WINDOW = 512  # tokens: the matrix products of a window grow with the square


class Grid(NamedTuple):
    """Height and width of a feature map in tokens; token n is in row n // w, column n % w."""

    h: int
    w: int

    @property
    def tokens(self) -> int:
        """N = h·w."""
        return self.h * self.w


class Windows(NamedTuple):
    """dst and src sorted into T windows, each padded to the same number of dst and of src."""

    count_w: int  # T
    src: paddle.Tensor  # [T·P] int64: positions; padding repeats a src of the window
    dst: paddle.Tensor  # [T·Q] int64: positions; padding repeats a dst of the window
    dst_index: paddle.Tensor  # [T·Q] int64: the index of each in `Positions.dst`
    src_slot: paddle.Tensor  # [S] int64: the index in `src` of each of `Positions.src`


class EqualWindows(NamedTuple):
    """T windows of P tokens each, of which Q are dst."""

    count_w: int  # T
    p: int  # P
    q: int  # Q
    order: paddle.Tensor  # [N] int64: positions, window by window, each with its dst first
    slot: paddle.Tensor  # [N] int64: the index of each position in `order`
    begin: paddle.Tensor  # [T, 1] int64: the index in `order` of each window's first token
    is_src: paddle.Tensor  # [P] int64: 1 for the src of a window, 0 for its dst
    own: paddle.Tensor  # [P] int64: the index of each dst among those of its window, 0 for src
    of_src: paddle.Tensor  # [P] float32: the same as `is_src`
    of_dst: paddle.Tensor  # [P] float32: 2, more than any similarity, for dst, 0 for src


class Cells(NamedTuple):
    """The cells of a grid, each with one dst. A remainder at the right or bottom belongs to the cell beside it."""

    dst: paddle.Tensor  # [D] int64: positions, ascending
    cell: paddle.Tensor  # [N] int64: the index in `dst` of the dst of each position's cell
    log_sizes: paddle.Tensor  # [D] float32: logarithm of the number of tokens of each cell
    has_equal_sizes: bool


class Positions(NamedTuple):
    """Which positions of a grid are dst and which src, and the index of each in the sequence dst | src."""

    d: int  # number of dst positions, D
    s: int  # number of src positions, S
    dst: paddle.Tensor  # [D] int64, ascending
    src: paddle.Tensor  # [S] int64, ascending
    slot: paddle.Tensor  # [N] int64: the index of each position in dst | src
    count_d: paddle.Tensor  # [D] int64: 0, 1, ... D - 1
    windows: Windows | None = None  # None: a single window, the whole grid


def grid_of_ids(ids: paddle.Tensor) -> Grid:
    """The grid of FLUX's image tokens, whose frame, row and column [T + N, 3] come after those of the text.

    Raises:
        ToMePassError: they are not those of one grid.
    """
    positions = ids.cast("float32").numpy()  # NumPy has no bfloat16, in which a pipeline may pass them
    grid = Grid(*(int(last) + 1 for last in positions[:, 1:].max(axis=0)))
    if len(positions) < grid.tokens or (positions[-grid.tokens :] != _ids(grid)).any():
        raise ToMePassError(
            f"FluxPosEmbed got positions of {len(positions)} tokens that are not text and then one grid of "
            f"{grid.h}×{grid.w}: merging needs one image. remove_tome() first."
        )
    return grid


def check_ids(ids: paddle.Tensor, grid: Grid | None) -> Grid:
    """Return the grid for which a program is traced, and let the program fail for positions of another grid.

    Raises:
        ToMePassError: grid is None.
    """
    if grid is None:
        raise ToMePassError(
            "a program of FLUX that merges is for one token grid, and none is known: run the model once at the size "
            "that it is for, with merging, and then trace the same model."
        )
    is_expected = ids[-grid.tokens :].cast("float32") == paddle.to_tensor(_ids(grid))
    paddle.static.nn.control_flow.Assert(is_expected.all())
    return grid


def _ids(grid: Grid) -> np.ndarray:  # [N, 3] float32
    return np.stack([np.zeros(grid.tokens), *np.divmod(np.arange(grid.tokens), grid.w)], axis=1).astype("float32")


def count_dst(grid: Grid, sx: int, sy: int) -> int:
    """Number of dst tokens of a grid: one per complete sx×sy cell, none in a remainder at the right or bottom."""
    return (grid.h // sy) * (grid.w // sx)


def count_removed(grid: Grid, config: ToMeConfig, *, keys: bool = False) -> int:
    """r: number of tokens of a grid that a config merges away; with `keys` from keys and values of self-attention."""
    return config.removed(grid.tokens, count_dst(grid, config.sx, config.sy), keys=keys)


def tokens_kept(grid: Grid, config: ToMeConfig) -> tuple[int, int]:
    """Tokens of a grid after merging: all but those of `count_removed`, and the same with `keys`."""
    return grid.tokens - count_removed(grid, config), grid.tokens - count_removed(grid, config, keys=True)


def count_pairs(grid: Grid, config: ToMeConfig) -> int:
    """The number of pairs of src and dst tokens that matching compares: all, or those in the same window."""
    window = window_of(grid, config.sx, config.sy, config.window)
    dst = np.bincount(window[choose_dst(grid, config.sx, config.sy)], minlength=1)
    return int((dst * (np.bincount(window, minlength=len(dst)) - dst)).sum())


def choose_dst(
    grid: Grid,
    sx: int = 2,
    sy: int = 2,
    random_key: Sequence[int] | None = None,
) -> np.ndarray:  # [D] int64, ascending
    """Choose one dst token in each sx×sy cell of the grid.

    Args:
        grid: tokens along each axis.
        sx, sy: width and height of a cell, in tokens.
        random_key: integers >= 0 that seed a random choice: the same key and grid give the same choice on every
            machine. None chooses the first (top left) token of each cell.

    Returns:
        The positions of the dst tokens, D = (h // sy)·(w // sx). No global random state is read or advanced.

    Source: tomesd draws from the same distribution, but from a generator whose state depends on earlier calls.

    Example:
        >>> choose_dst(Grid(4, 6)).tolist()
        [0, 2, 4, 12, 14, 16]
    """
    rows, columns = grid.h // sy, grid.w // sx
    if random_key is None:
        offset = np.zeros((rows, columns), dtype=np.int64)
    else:
        entropy = np.random.SeedSequence([*random_key, grid.h, grid.w])
        # RandomState: NumPy promises never to change its streams (NEP 19).
        stream = np.random.RandomState(np.random.MT19937(entropy))
        offset = stream.randint(sx * sy, size=(rows, columns), dtype=np.int64)
    y = np.arange(rows)[:, None] * sy + offset // sx
    x = np.arange(columns)[None, :] * sx + offset % sx
    return np.sort((y * grid.w + x).reshape(-1))


def window_of(
    grid: Grid,
    sx: int,
    sy: int,
    window: int | None,
) -> np.ndarray:  # [N] int64
    """The window of each token, numbered row by row; all tokens are in window 0 if `window` is None.

    Windows begin at multiples of `window`, rounded up to a multiple of sx or sy. A remainder at the right or bottom
    edge that has no complete cell, and therefore no dst, belongs to the window before it.
    """
    if window is None:
        return np.zeros(grid.tokens, dtype=np.int64)
    rows, columns = _windows_along(grid.h, sy, window), _windows_along(grid.w, sx, window)
    return (rows[:, None] * (columns[-1] + 1) + columns).reshape(-1)


def _windows_along(length: int, cell: int, window: int) -> np.ndarray:
    """[length] int64: the window of each position along one axis."""
    window += -window % cell
    return np.minimum(np.arange(length) // window, max(0, (length - cell) // window))


@paddle.jit.not_to_static  # constants, which Paddle would compute in the program
def constant_cells(grid: Grid, sx: int, sy: int, random_key: Sequence[int] | None) -> Cells:
    """The cells of a grid that has one at least, with dst from `choose_dst`, as constants of a program."""
    dst = choose_dst(grid, sx, sy, random_key)
    rows = np.minimum(np.arange(grid.h) // sy, grid.h // sy - 1)
    columns = np.minimum(np.arange(grid.w) // sx, grid.w // sx - 1)
    number = (rows[:, None] * (grid.w // sx) + columns).reshape(-1)
    cell = np.argsort(number[dst])[number]  # dst is sorted by position, not by cell
    sizes = np.bincount(cell)
    return Cells(
        dst=_constant(dst),
        cell=_constant(cell),
        log_sizes=paddle.to_tensor(np.log(sizes), dtype="float32"),
        has_equal_sizes=bool((sizes == sizes[0]).all()),
    )


@paddle.jit.not_to_static  # constants, which Paddle would compute in the program
def constant_windows(
    grid: Grid, sx: int, sy: int, random_key: Sequence[int] | None, window: int | None
) -> EqualWindows | None:
    """The windows of a grid, with dst from `choose_dst`, as constants of a program.

    None if they have not all as many tokens and dst, or too many tokens for matrix products.
    """
    of_token, dst = window_of(grid, sx, sy, window), choose_dst(grid, sx, sy, random_key)
    count = int(of_token.max()) + 1
    tokens, dst_tokens = np.bincount(of_token), np.bincount(of_token[dst], minlength=count)
    p, q = int(tokens[0]), int(dst_tokens[0])
    if q == 0 or p > LARGEST_WINDOW or (tokens != p).any() or (dst_tokens != q).any():
        return None
    is_src = np.ones(grid.tokens, dtype=np.int64)
    is_src[dst] = 0
    order = np.lexsort((is_src, of_token))
    is_dst = np.arange(p) < q
    return EqualWindows(
        count_w=count,
        p=p,
        q=q,
        order=_constant(order),
        slot=_constant(np.argsort(order)),
        begin=_constant(np.arange(count)[:, None] * p),
        is_src=_constant((~is_dst).astype(np.int64)),
        own=_constant(np.where(is_dst, np.arange(p), 0)),
        of_src=paddle.to_tensor(1.0 - is_dst, dtype="float32"),
        of_dst=paddle.to_tensor(2.0 * is_dst, dtype="float32"),
    )


@paddle.jit.not_to_static  # constants, which Paddle would compute in the program
def constant_positions(
    grid: Grid, sx: int, sy: int, random_key: Sequence[int] | None, window: int | None = None
) -> Positions:
    """The positions on a grid, with dst from `choose_dst`, as constants of a program."""
    dst = choose_dst(grid, sx, sy, random_key)
    src = np.setdiff1d(np.arange(grid.tokens), dst, assume_unique=True)
    slot = np.argsort(np.concatenate([dst, src]))
    # Constants instead of arange, because Paddle 2.6's arange switches a device that all threads share.
    return Positions(
        d=len(dst),
        s=len(src),
        dst=_constant(dst),
        src=_constant(src),
        slot=_constant(slot),
        count_d=_constant(np.arange(len(dst))),
        windows=None if window is None else _windows(dst, src, window_of(grid, sx, sy, window)),
    )


def _windows(dst: np.ndarray, src: np.ndarray, window: np.ndarray) -> Windows | None:
    """dst and src sorted by the window [N] of each token; None if there is only one window."""
    count = int(window.max(initial=0)) + 1
    if count == 1:
        return None
    dst_index, _ = _pad(window[dst], count)
    src_index, src_slot = _pad(window[src], count)
    return Windows(
        count_w=count,
        src=_constant(src[src_index]),
        dst=_constant(dst[dst_index]),
        dst_index=_constant(dst_index),
        src_slot=_constant(src_slot),
    )


def _pad(window: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Sort tokens by window and pad the windows to one length P.

    Args:
        window: of each token [L]; every one of 0 … count - 1 occurs.

    Returns:
        [count·P] the token in each slot, ascending within a window, the last one repeated as padding; and [L] the
        slot of each token.
    """
    order = np.argsort(window, kind="stable")
    sizes = np.bincount(window, minlength=count)
    begins = np.cumsum(sizes) - sizes
    longest = sizes.max()
    within = np.minimum(np.arange(longest), sizes[:, None] - 1)  # [count, P]
    slot = np.empty(len(window), dtype=np.int64)
    slot[order] = np.arange(len(window)) - np.repeat(begins - np.arange(count) * longest, sizes)
    return order[(begins[:, None] + within).reshape(-1)], slot


def _constant(array: np.ndarray) -> paddle.Tensor:
    return paddle.to_tensor(array, dtype="int64")
