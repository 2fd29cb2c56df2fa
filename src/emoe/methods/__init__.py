"""Methods: one small file each. A method owns its networks, its loss and its sampler."""
