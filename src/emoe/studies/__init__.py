"""Studies: a table of the paper, or the demo, from training to figures, each as one command that can be resumed."""
