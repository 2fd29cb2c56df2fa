"""Trained models: train, open, draw samples, complete rows, release weights."""
