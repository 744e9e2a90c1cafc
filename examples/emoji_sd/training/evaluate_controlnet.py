"""Measure how closely the bundled ControlNet follows the edges of images that it never saw.

    python evaluate_controlnet.py [with] [without]
    EMOJI_STACK=diffusers python evaluate_controlnet.py [with] [without]

Generates each image from its Canny edges and a prompt, with the ControlNet and without it, from the same noise, and
compares the edges of output and input. Outputs go to $EMOJI_WORK/generated; an interrupted run continues from them.
Once all exist, the figures go to ../controlnet/edges.json and a sheet to samples.png beside it.

Needs OpenCV, and data_128.npz and captions.json from `make_dataset.py 128`. The second form uses PyTorch and
diffusers, which is faster on a CPU, with $EMOJI_WORK/model and $EMOJI_WORK/controlnet rounded as in the converted
files. Run it where those are installed, then again where ppdiffusers_tome is, for the figures. It starts one process
with one thread per core.

Two sets, neither of which was used to train the ControlNet:
- "Noto": Noto's drawings of concepts that the model knows, as "a flat drawing of ...";
- "held out": Fluent's and Twemoji's images of the concepts in held_out.txt, with their own captions, whose words the
  model does not know.

Distances are means over all edge pixels of a set, in px: input to output (are all input edges there?) and output to
input (are there further edges?); for all edges, those of the outline (within 3 px of the input's background) and the
inner ones. "shuffled" compares the outputs with the edges of another input: the distances expected by chance.
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

import edges as edge
import numpy as np
from PIL import Image

os.environ.setdefault("OMP_NUM_THREADS", "1")
HERE, WORK = Path(__file__).resolve().parent, Path(os.environ.get("EMOJI_WORK", "work"))
MODEL = HERE.parent
CONTROLNET = MODEL / "controlnet"

IMAGES, STEPS, GUIDANCE_SCALE = 32, 20, 2.0
ARMS = ("with", "without")
STACK = os.environ.get("EMOJI_STACK", "ppdiffusers")
PACKAGES = {"ppdiffusers": ("paddlepaddle", "ppdiffusers"), "diffusers": ("torch", "diffusers", "transformers")}
SHEET_IMAGES = 10  # of each set
NEAR = 2  # px


def read_sets():
    """Name of a set -> list of (image, prompt)."""
    rows, images = json.loads((WORK / "captions.json").read_text()), np.load(WORK / "data_128.npz")["x"]
    trained, held_out = ((HERE / name).read_text().split() for name in ("concepts.txt", "held_out.txt"))
    noto = [row["caption"].startswith("a cartoon") for row in rows]
    chosen = {
        "Noto": [i for i, row in enumerate(rows) if noto[i] and row["concept"] in trained],
        "held out": [i for i, row in enumerate(rows) if not noto[i] and row["concept"] in held_out],
    }
    sets = {}
    for name, indices in chosen.items():
        sample = [indices[n * len(indices) // IMAGES] for n in range(IMAGES)]
        sets[name] = [(images[i], rows[i]["caption"].replace("a cartoon of", "a flat drawing of")) for i in sample]
    return sets


def weights_hash():
    return hashlib.sha256((CONTROLNET / "diffusion_paddle_model.safetensors").read_bytes()).hexdigest()[:12]


def path_of(arm, name, n):
    folder = f"with_{weights_hash()}" if arm == "with" else arm
    return WORK / "generated" / STACK / folder / f"{name.replace(' ', '_')}_{n}.png"


def load(arm):
    """Load the pipeline and its tensor function into this process."""
    load.pipe, load.tensor = (load_ppdiffusers if STACK == "ppdiffusers" else load_diffusers)(arm)
    load.pipe.set_progress_bar_config(disable=True)


def load_ppdiffusers(arm):
    import paddle
    import ppdiffusers
    from paddlenlp.utils.log import logger

    logger.set_level("WARNING")
    ppdiffusers.utils.logging.set_verbosity_error()
    options = {"paddle_dtype": paddle.float32}
    if arm == "without":
        return ppdiffusers.StableDiffusionPipeline.from_pretrained(str(MODEL), **options), paddle.to_tensor
    controlnet = ppdiffusers.ControlNetModel.from_pretrained(str(CONTROLNET), **options)
    pipe = ppdiffusers.StableDiffusionControlNetPipeline.from_pretrained(str(MODEL), controlnet=controlnet, **options)
    return pipe, paddle.to_tensor


def load_diffusers(arm):
    import diffusers
    import torch

    torch.set_num_threads(1)
    options = {"torch_dtype": torch.float32, "safety_checker": None}
    if arm == "without":
        return diffusers.StableDiffusionPipeline.from_pretrained(WORK / "model", **options), torch.from_numpy
    controlnet = diffusers.ControlNetModel.from_pretrained(WORK / "controlnet").half().float()
    cls = diffusers.StableDiffusionControlNetPipeline
    return cls.from_pretrained(WORK / "model", controlnet=controlnet, **options), torch.from_numpy


def draw(job):
    arm, name, n, image, prompt = job
    arguments = {"image": edge.as_image(edge.canny(image))} if arm == "with" else {"height": 128, "width": 128}
    noise = np.random.RandomState(n).standard_normal((1, 4, 32, 32)).astype("float32")
    arguments |= {"num_inference_steps": STEPS, "guidance_scale": GUIDANCE_SCALE, "latents": load.tensor(noise)}
    output = load.pipe(prompt, **arguments).images[0]
    path = path_of(arm, name, n)
    output.save(path.with_suffix(".tmp"), format="png")
    path.with_suffix(".tmp").replace(path)
    return path


def draw_missing(arm, sets):
    jobs = [(arm, name, n, *pair) for name, pairs in sets.items() for n, pair in enumerate(pairs)]
    jobs = [job for job in jobs if not path_of(*job[:3]).exists()]
    if jobs:
        folder = path_of(*jobs[0][:3]).parent
        folder.mkdir(parents=True, exist_ok=True)
        versions = {name: version(name) for name in PACKAGES[STACK]}
        (folder.parent / "versions.json").write_text(json.dumps({"python": platform.python_version(), **versions}))
        with multiprocessing.get_context("spawn").Pool(len(os.sched_getaffinity(0)), load, (arm,)) as pool:
            for count, path in enumerate(pool.imap(draw, jobs), 1):
                print(f"{count} of {len(jobs)}: {path}", flush=True)


def summarise(distances):
    joined = np.concatenate(distances)
    return {
        "mean": round(float(joined.mean()), 2),
        f"within_{NEAR}_px": round(float((joined <= NEAR).mean()), 3),
        "edge_pixels": len(joined),
    }


def compare(pairs):
    """Figures for pairs of input and output images."""
    figures = {}
    for direction in ("input_to_output", "output_to_input"):
        distances = {"all": [], "outline": [], "inner": []}
        for source, output in pairs:
            edges, reference = edge.canny(source), edge.canny(output)
            if direction == "output_to_input":
                edges, reference = reference, edges
            outline = edge.outline_region(source)
            for part, mask in (("all", edges), ("outline", edges & outline), ("inner", edges & ~outline)):
                distances[part].append(edge.distances(mask, reference))
        figures[direction] = {part: summarise(arrays) for part, arrays in distances.items()}
    return figures


def measure(sets):
    from ppdiffusers_tome.evaluation.results import make_result, write_result

    result = make_result(
        "edges",
        f"EMOJI_STACK={STACK} python examples/emoji_sd/training/evaluate_controlnet.py",
        generated_with=json.loads((WORK / "generated" / STACK / "versions.json").read_text()),
        weights=f"sha256 {weights_hash()}…",
        steps=STEPS,
        guidance_scale=GUIDANCE_SCALE,
        canny_thresholds=[edge.LOW, edge.HIGH],
        outline_px=edge.OUTLINE,
        images_per_set=IMAGES,
        sets={},
    )
    rows = []
    for name, pairs in sets.items():
        inputs = [image for image, _ in pairs]
        outputs = {arm: [np.asarray(Image.open(path_of(arm, name, n))) for n in range(IMAGES)] for arm in ARMS}
        figures = {arm: compare(list(zip(inputs, outputs[arm], strict=True))) for arm in ARMS}
        figures["shuffled"] = compare(list(zip(inputs[1:] + inputs[:1], outputs["with"], strict=True)))
        result["sets"][name] = {"prompts": [prompt for _, prompt in pairs], **figures}
        indices = range(0, IMAGES, IMAGES // SHEET_IMAGES)[:SHEET_IMAGES]
        rows.append([inputs[n] for n in indices])
        rows.append([np.asarray(edge.as_image(edge.canny(inputs[n]))) for n in indices])
        rows += [[outputs[arm][n] for n in indices] for arm in ARMS]
    write_result(CONTROLNET / "edges.json", result)
    sheet = Image.fromarray(np.concatenate([np.concatenate(row, 1) for row in rows]))
    small = sheet.resize((sheet.width * 3 // 4, sheet.height * 3 // 4), Image.LANCZOS)
    small.quantize(256).save(CONTROLNET / "samples.png", optimize=True)
    return result


if __name__ == "__main__":
    sets = read_sets()
    arms = sys.argv[1:] or ARMS
    for arm in arms:
        draw_missing(arm, sets)
    if importlib.util.find_spec("ppdiffusers_tome") and all(
        path_of(arm, name, n).exists() for arm in ARMS for name in sets for n in range(IMAGES)
    ):
        print(json.dumps(measure(sets)["sets"], indent=1, ensure_ascii=False))
