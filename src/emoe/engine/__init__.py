"""The training loop and its storage. It knows `module(batch, ramp, rng) -> Loss` and nothing of what is trained."""
