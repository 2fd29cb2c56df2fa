"""Networks: one file each, denoiser and matching recognition encoder side by side. They know no objective."""
