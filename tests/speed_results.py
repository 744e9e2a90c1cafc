"""Small speed results for the tests of what is made from them."""

GB = 10**9


def arm(name, seconds, *, backend="eager", ratio=0.0, status="measured", memory=None, **more):
    """One arm; `seconds` is one number per round."""
    attention = {"memory-efficient": "slicing", "both": "slicing"}.get(name, "plain")
    return {
        "arm": name,
        "backend": backend,
        "attention": attention,
        "ratio": ratio,
        "max_downsample": None,
        "kept": int(4096 * (1 - ratio)),
        "status": status,
        "reason": None if status == "measured" else "Allocator says no",
        "seconds": list(seconds),
        "parity": {"against": "its definition", "difference": 2e-6},
        "peak_memory_bytes": None if memory is None else int(memory * GB),
        "macs": 10**9,
        "shares": None,
        **more,
    }


def case(arms, *, size=512, batch=2, **more):
    return {
        "model": "sd15",
        "scope": "unet",
        "size": size,
        "batch": batch,
        "dtype": "float32",
        "steps": None,
        "latent": [size // 8, size // 8],
        "tokens": (size // 8) ** 2,
        "memory_limit_gb": None,
        "arms": arms,
        **more,
    }


def result(cases, *, rounds=3, machine="Test CPU", **more):
    return {
        "kind": "speed",
        "format": 1,
        "command": "python -m ppdiffusers_tome bench --quick",
        "commit": "abc1234",
        "environment": {
            "machine": machine,
            "cores": 2,
            "threads": "1",
            "device": "cpu",
            "python": "3.11.9",
            "ppdiffusers_tome": "0.9.0",
            "paddlepaddle": "2.6.2",
            "paddlepaddle-gpu": "not installed",
            "ppdiffusers": "0.29.0",
            "numpy": "1.26.4",
        },
        "rounds": rounds,
        "warm_up": 1,
        "threads": 1,
        "cases": cases,
        **more,
    }
