"""Sections 3.2-3.3: the discrete latent. Routes, their divergence, and the experts they select."""
