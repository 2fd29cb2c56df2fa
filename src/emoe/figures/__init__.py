"""Figures with matplotlib: curves, panels of samples, animations. No pyplot, so no global state."""
