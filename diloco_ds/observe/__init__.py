"""What a run tells about itself: metrics, manifest, status, the live view, wandb and the report. Nothing here is on a hot path."""
