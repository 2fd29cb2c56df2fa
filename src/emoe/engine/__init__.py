"""The training loop and its storage. It knows `module(batch, knobs, rng) -> Loss` and nothing of what is trained."""
