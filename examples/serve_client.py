"""Request images from a running server, by OpenAI's API and by that of stable-diffusion-webui.

python -m ppdiffusers_tome serve --model build/emoji --port 8000 &
python examples/serve_client.py "a 3d render of fox" --ratio 0.5
python examples/serve_client.py "a 3d render of wolf" --image examples/emoji_sd/fox.png    (needs export --img2img)

This script does not need the package; docs/serving.md shows the same with curl, openai and webuiapi.
"""

import argparse
import base64
import os
import sys
from pathlib import Path

import requests


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("prompt")
    add("--url", default="http://127.0.0.1:8000", help="default: http://127.0.0.1:8000")
    add("--image", type=Path, help="start from this image")
    add("--ratio", type=float, help="share of tokens to merge, one of the exported ratios")
    add("--steps", type=int, default=20)
    add("--guidance-scale", type=float, default=2.0)
    add("--seed", type=int, help="default: chosen by the server")
    add("--output", type=Path, default=Path("outputs"), help="folder for served.png (default: outputs)")
    args = parser.parse_args(argv)
    key = os.environ.get("PPDIFFUSERS_TOME_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        path, body = from_image(args) if args.image else from_text(args)
        response = requests.post(args.url + path, json=body, headers=headers, timeout=600)
        if not response.ok:
            print(f"{response.status_code}: {response.text}", file=sys.stderr)
            return 1
        content = response.json()
    except requests.RequestException as error:
        print(
            f"{args.url} has no answer ({type(error).__name__}): start the server, or name it with --url",
            file=sys.stderr,
        )
        return 1
    except OSError as error:
        parser.error(f"--image {args.image}: {error.strerror}.")
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    image = content["images"][0] if args.image else content["data"][0]["b64_json"]
    args.output.mkdir(parents=True, exist_ok=True)
    file = args.output / "served.png"
    file.write_bytes(base64.b64decode(image))
    print(f"{file}" + ("" if args.image else f", seed {content['data'][0]['seed']}"))
    return 0


def from_text(args):
    """An OpenAI request, with the fields that this server adds."""
    body = {"prompt": args.prompt, "steps": args.steps, "guidance_scale": args.guidance_scale}
    optional = {"seed": args.seed, "tome_ratio": args.ratio}
    return "/v1/images/generations", body | {name: value for name, value in optional.items() if value is not None}


def from_image(args):
    """A stable-diffusion-webui request."""
    image = base64.b64encode(args.image.read_bytes()).decode()
    body = {"prompt": args.prompt, "init_images": [image], "steps": args.steps, "cfg_scale": args.guidance_scale}
    body["seed"] = -1 if args.seed is None else args.seed
    if args.ratio is not None:
        body["override_settings"] = {"token_merging_ratio": args.ratio}
    return "/sdapi/v1/img2img", body


if __name__ == "__main__":
    sys.exit(main())
