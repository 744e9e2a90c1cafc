"""Measure how closely the bundled ControlNet follows edges of pictures that it never saw.

    python evaluate_controlnet.py [with] [without]
    EMOJI_STACK=diffusers python evaluate_controlnet.py [with] [without]

Draws each picture from its Canny edges and a prompt, with the ControlNet and without it, from the same noise, and
compares the drawing's edges with the given ones. Drawings go to $EMOJI_WORK/drawn, where an interrupted run finds
them again. Where all are there, the figures go to ../controlnet/edges.json and a sheet to samples.png beside it.

Needs data_128.npz and captions.json by `make_dataset.py 128` and OpenCV. The second form draws with PyTorch and
diffusers, faster on a CPU: from $EMOJI_WORK/model and $EMOJI_WORK/controlnet, rounded as in the converted files. Run
it where they are, then again where ppdiffusers_tome is, for the figures. One process of one thread a core.

Two sets, neither shown in the ControlNet's training:
- "Noto": Noto's drawings of concepts that the model knows, as "a flat drawing of ...";
- "held out": Fluent's and Twemoji's pictures of held_out.txt's concepts, with their own captions, whose words the
  model does not know.

Distances are means over all edge pixels of a set, in px, given to drawn (is everything there?) and drawn to given (is
there more?); of all edges, of those at the outline (3 px around the given picture's background) and of the inner ones.
"shuffled" measures the drawings against another picture's edges: what no control at all would give.
"""

import hashlib
import importlib.util
import json
import multiprocessing
import os
import platform
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
from PIL import Image

os.environ.setdefault("OMP_NUM_THREADS", "1")
HERE, WORK = Path(__file__).resolve().parent, Path(os.environ.get("EMOJI_WORK", "work"))
MODEL = HERE.parent
CONTROLNET = MODEL / "controlnet"
sys.path.insert(0, str(MODEL.parent))
import edges as edge  # noqa: E402  examples/edges.py

PICTURES, STEPS, GUIDANCE = 32, 20, 2.0
ARMS = ("with", "without")
STACK = os.environ.get("EMOJI_STACK", "ppdiffusers")
DRAWN_BY = {"ppdiffusers": ("paddlepaddle", "ppdiffusers"), "diffusers": ("torch", "diffusers", "transformers")}
SHEET = 10  # pictures of each set
NEAR = 2  # px


def read_sets():
    """name -> list of (picture, prompt)"""
    rows, pictures = json.loads((WORK / "captions.json").read_text()), np.load(WORK / "data_128.npz")["x"]
    taught, held_out = ((HERE / name).read_text().split() for name in ("concepts.txt", "held_out.txt"))
    noto = [row["caption"].startswith("a cartoon") for row in rows]
    chosen = {
        "Noto": [i for i, row in enumerate(rows) if noto[i] and row["concept"] in taught],
        "held out": [i for i, row in enumerate(rows) if not noto[i] and row["concept"] in held_out],
    }
    sets = {}
    for name, every in chosen.items():
        some = [every[n * len(every) // PICTURES] for n in range(PICTURES)]
        sets[name] = [(pictures[i], rows[i]["caption"].replace("a cartoon of", "a flat drawing of")) for i in some]
    return sets


def weights_hash():
    return hashlib.sha256((CONTROLNET / "diffusion_paddle_model.safetensors").read_bytes()).hexdigest()[:12]


def path_of(arm, name, n):
    folder = f"with_{weights_hash()}" if arm == "with" else arm
    return WORK / "drawn" / STACK / folder / f"{name.replace(' ', '_')}_{n}.png"


def load(arm):
    """The pipeline and its kind of tensor, kept in this process."""
    load.pipe, load.tensor = (load_ppdiffusers if STACK == "ppdiffusers" else load_diffusers)(arm)
    load.pipe.set_progress_bar_config(disable=True)


def load_ppdiffusers(arm):
    import paddle
    import ppdiffusers
    from paddlenlp.utils.log import logger

    logger.set_level("WARNING")
    ppdiffusers.utils.logging.set_verbosity_error()
    single = {"paddle_dtype": paddle.float32}
    if arm == "without":
        return ppdiffusers.StableDiffusionPipeline.from_pretrained(str(MODEL), **single), paddle.to_tensor
    controlnet = ppdiffusers.ControlNetModel.from_pretrained(str(CONTROLNET), **single)
    pipe = ppdiffusers.StableDiffusionControlNetPipeline.from_pretrained(str(MODEL), controlnet=controlnet, **single)
    return pipe, paddle.to_tensor


def load_diffusers(arm):
    import diffusers
    import torch

    torch.set_num_threads(1)
    single = {"torch_dtype": torch.float32, "safety_checker": None}
    if arm == "without":
        return diffusers.StableDiffusionPipeline.from_pretrained(WORK / "model", **single), torch.from_numpy
    controlnet = diffusers.ControlNetModel.from_pretrained(WORK / "controlnet").half().float()
    kind = diffusers.StableDiffusionControlNetPipeline
    return kind.from_pretrained(WORK / "model", controlnet=controlnet, **single), torch.from_numpy


def draw(job):
    arm, name, n, picture, prompt = job
    more = {"image": edge.as_picture(edge.canny(picture))} if arm == "with" else {"height": 128, "width": 128}
    noise = np.random.RandomState(n).standard_normal((1, 4, 32, 32)).astype("float32")
    more |= {"num_inference_steps": STEPS, "guidance_scale": GUIDANCE, "latents": load.tensor(noise)}
    image = load.pipe(prompt, **more).images[0]
    path = path_of(arm, name, n)
    image.save(path.with_suffix(".tmp"), format="png")
    path.with_suffix(".tmp").replace(path)
    return path


def draw_missing(arm, sets):
    jobs = [(arm, name, n, *pair) for name, pairs in sets.items() for n, pair in enumerate(pairs)]
    jobs = [job for job in jobs if not path_of(*job[:3]).exists()]
    if jobs:
        folder = path_of(*jobs[0][:3]).parent
        folder.mkdir(parents=True, exist_ok=True)
        found = {name: version(name) for name in DRAWN_BY[STACK]}
        (folder.parent / "versions.json").write_text(json.dumps({"python": platform.python_version(), **found}))
        with multiprocessing.get_context("spawn").Pool(os.cpu_count(), load, (arm,)) as pool:
            for count, path in enumerate(pool.imap(draw, jobs), 1):
                print(f"{count} of {len(jobs)}: {path}", flush=True)


def summarise(pieces):
    every = np.concatenate(pieces)
    return {
        "mean": round(float(every.mean()), 2),
        f"within {NEAR} px": round(float((every <= NEAR).mean()), 3),
        "edge pixels": len(every),
    }


def compare(pairs):
    """Figures for (given picture, drawn picture) pairs."""
    figures = {}
    for way in ("given to drawn", "drawn to given"):
        pieces = {"all": [], "outline": [], "inner": []}
        for given, drawn in pairs:
            of, to = edge.canny(given), edge.canny(drawn)
            if way == "drawn to given":
                of, to = to, of
            outline = edge.outline_region(given)
            for part, mask in (("all", of), ("outline", of & outline), ("inner", of & ~outline)):
                pieces[part].append(edge.distances(mask, to))
        figures[way] = {part: summarise(each) for part, each in pieces.items()}
    return figures


def measure(sets):
    from ppdiffusers_tome.evaluation.environment import describe_environment

    record = {
        "command": f"EMOJI_STACK={STACK} python examples/emoji_sd/training/evaluate_controlnet.py",
        "drawn with": json.loads((WORK / "drawn" / STACK / "versions.json").read_text()),
        "weights": f"sha256 {weights_hash()}…",
        "steps": STEPS,
        "guidance": GUIDANCE,
        "canny": [edge.LOW, edge.HIGH],
        "outline, px": edge.OUTLINE,
        "pictures of each set": PICTURES,
        "environment": describe_environment(),
        "sets": {},
    }
    rows = []
    for name, pairs in sets.items():
        given = [picture for picture, _ in pairs]
        drawn = {a: [np.asarray(Image.open(path_of(a, name, n))) for n in range(PICTURES)] for a in ARMS}
        figures = {arm: compare(list(zip(given, drawn[arm], strict=True))) for arm in ARMS}
        figures["shuffled"] = compare(list(zip(given[1:] + given[:1], drawn["with"], strict=True)))
        record["sets"][name] = {"prompts": [prompt for _, prompt in pairs], **figures}
        shown = range(0, PICTURES, PICTURES // SHEET)[:SHEET]
        rows += [[given[n] for n in shown], [np.asarray(edge.as_picture(edge.canny(given[n]))) for n in shown]]
        rows += [[drawn[arm][n] for n in shown] for arm in ARMS]
    (CONTROLNET / "edges.json").write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    sheet = Image.fromarray(np.concatenate([np.concatenate(row, 1) for row in rows]))
    small = sheet.resize((sheet.width * 3 // 4, sheet.height * 3 // 4), Image.LANCZOS)
    small.quantize(256).save(CONTROLNET / "samples.png", optimize=True)
    return record


if __name__ == "__main__":
    sets = read_sets()
    arms = sys.argv[1:] or ARMS
    for arm in arms:
        draw_missing(arm, sets)
    if importlib.util.find_spec("ppdiffusers_tome") and all(
        path_of(arm, name, n).exists() for arm in ARMS for name in sets for n in range(PICTURES)
    ):
        print(json.dumps(measure(sets)["sets"], indent=1, ensure_ascii=False))
