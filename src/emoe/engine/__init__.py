"""The training loop and its storage, for any `module(batch, ramp, rng) -> Loss`."""
