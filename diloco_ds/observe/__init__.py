"""What a run tells about itself: metrics, manifest, status, live view, wandb, report. None of it is on a hot path."""
