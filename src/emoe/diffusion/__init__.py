"""Section 2 and App. A.1 as pure functions of tensors: no modules, no experiment configuration."""
