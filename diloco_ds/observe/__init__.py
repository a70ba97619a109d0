"""What a run tells about itself: metrics, manifest, status, live view, wandb, report. Never on a hot path."""
