"""Small speed results with known answers, for the tests of what reads them."""

import json

PLAIN = [10.0, 20.0, 40.0]  # a shared machine: seconds vary, ratios within rounds do not


def times(share, seconds=PLAIN):
    return [share * second for second in seconds]


def arm(name, seconds, *, backend="eager", ratio=0.0, status="measured", memory=None, **fields):
    """One arm; `seconds` has one number per round, `memory` is in GB."""
    return {
        "arm": name,
        "backend": backend,
        "ratio": ratio,
        "max_downsample": None,
        "attention": "slicing" if name in ("memory-efficient", "both") else "plain",
        "kept": int(4096 * (1 - ratio)),
        "status": status,
        "reason": None if status == "measured" else "the allocator failed",
        "seconds": list(seconds),
        "parity": {"against": "its definition", "difference": 2e-6},
        "peak_memory_bytes": None if memory is None else int(memory * 10**9),
        "macs": 10**9,
        "shares": None,
        **fields,
    }


def case(arms, *, size=512, batch=2, **fields):
    return {
        "model": "sd15",
        "scope": "unet",
        "size": size,
        "batch": batch,
        "dtype": "float32",
        "steps": None,
        "guidance_scale": None,
        "latent": [size // 8, size // 8],
        "tokens": (size // 8) ** 2,
        "memory_limit_gb": None,
        "arms": arms,
        **fields,
    }


def result(cases, *, machine="Test CPU", **fields):
    environment = {"machine": machine, "cores": 2, "device": "cpu", "python": "3.11.9", "paddlepaddle": "2.6.2"}
    environment |= {"paddlepaddle-gpu": "not installed", "ppdiffusers": "0.29.0", "ppdiffusers_tome": "0.9.0"}
    return {
        "kind": "speed",
        "format": 2,
        "command": "python -m ppdiffusers_tome bench --quick",
        "commit": "abc1234",
        "environment": environment,
        "rounds": 3,
        "warm_up": 1,
        "threads": 1,
        "cases": cases,
        **fields,
    }


def write(path, data):
    """Write a result, or any text, and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(data if isinstance(data, str) else json.dumps(data), encoding="utf-8")
    return path
